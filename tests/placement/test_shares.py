"""Shares: against the exact optimum over all sets of ranks, and against their own promises."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moeserve_placement.flow import exact_split
from moeserve_placement.shares import ShareSolver, balanced_shares
from moeserve_placement.slot_table import even_shares, imbalance, rank_loads


def best_level(counts: np.ndarray, table: np.ndarray, speeds: np.ndarray) -> float:
    """max over sets of ranks of (tokens that must be served there) / (speed of the set): Hall."""
    ranks = len(table)
    held = np.array([(table == expert).any(-1) for expert in range(len(counts))])
    best = 0.0
    for mask in range(1, 2**ranks):
        inside = np.array([bool(mask >> rank & 1) for rank in range(ranks)])
        captive = ~(held & ~inside).any(1)
        best = max(best, counts[captive].sum() / speeds[inside].sum())
    return best


@st.composite
def cases(draw: st.DrawFn) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Counts [layers, experts], a table and rank speeds."""
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    ranks, slots = draw(st.integers(1, 5)), draw(st.integers(1, 4))
    experts, layers = draw(st.integers(1, ranks * slots)), draw(st.integers(1, 3))
    table = np.full((layers, ranks, slots), -1)
    for layer in table:
        cells = rng.permutation(ranks * slots)
        layer.flat[cells[:experts]] = np.arange(experts)
        for cell in cells[experts:]:
            extra = rng.integers(0, experts)
            if extra not in layer[cell // slots]:
                layer.flat[cell] = extra
    scale = draw(st.sampled_from([1, 60, 2**40]))
    counts = rng.integers(0, scale + 1, (layers, experts)) * rng.integers(0, 2, (layers, experts))
    speeds = rng.uniform(0.5, 2.0, ranks) if draw(st.booleans()) else np.ones(ranks)
    return counts, table, speeds


@settings(max_examples=150, deadline=None)
@given(cases())
def test_largest_level_is_the_least_possible(case: tuple[np.ndarray, ...]) -> None:
    counts, table, speeds = case
    found = balanced_shares(counts, table, speeds=speeds)
    for row in range(len(counts)):
        exact = best_level(counts[row], table[row], speeds)
        level = (found.rank_loads[row] / speeds).max()
        assert level <= exact * (1 + 2e-6) + 1e-12
        assert found.bound[row] <= exact * (1 + 1e-9) + 1e-12


@settings(max_examples=60, deadline=None)
@given(cases())
def test_shares_add_up_and_give_the_stated_loads(case: tuple[np.ndarray, ...]) -> None:
    counts, table, speeds = case
    found = balanced_shares(counts, table, speeds=speeds)
    assert (found.shares >= 0).all()
    assert not found.shares[table < 0].any()
    for row in range(len(counts)):
        for expert in range(counts.shape[1]):
            assert found.shares[row][table[row] == expert].sum() == pytest.approx(1.0)
    loads = rank_loads(counts.astype(float), table, shares=found.shares)
    np.testing.assert_allclose(loads, found.rank_loads, rtol=1e-9, atol=1e-9)


@settings(max_examples=150, deadline=None)
@given(cases(), st.integers(0, 2**32 - 1))
def test_no_expert_is_forgotten_beside_counts_that_are_enormous(
    case: tuple[np.ndarray, ...], seed: int
) -> None:
    """Counts from 1e-30 to 1e30: of the small ones a solve knows only rounding errors."""
    _, table, speeds = case
    rng = np.random.default_rng(seed)
    shape = (len(table), int(table.max()) + 1)
    counts, other = 10.0 ** rng.uniform(-30, 30, (2, *shape))
    splits = (
        balanced_shares(counts, table, speeds=speeds),
        ShareSolver(table, shape[1], speeds=speeds).solve(counts),
        ShareSolver(table, shape[1], speeds=speeds, nominal=other).solve(counts),
    )
    for split in splits:
        for row in range(len(table)):
            for expert in range(shape[1]):
                assert split.shares[row][table[row] == expert].sum() == pytest.approx(1.0)
            exact = best_level(counts[row], table[row], speeds)
            assert (split.rank_loads[row] / speeds).max() <= exact * (1 + 2e-6)


@settings(max_examples=60, deadline=None)
@given(cases(), st.integers(0, 2**32 - 1))
def test_solver_made_for_other_counts_finds_the_same_level(
    case: tuple[np.ndarray, ...], seed: int
) -> None:
    counts, table, speeds = case
    other = np.random.default_rng(seed).integers(0, 9, counts.shape)
    solver = ShareSolver(table, counts.shape[1], speeds=speeds, nominal=other)
    found = solver.solve(counts)
    for row in range(len(counts)):
        exact = best_level(counts[row], table[row], speeds)
        assert (found.rank_loads[row] / speeds).max() <= exact * (1 + 2e-6) + 1e-12


@settings(max_examples=60, deadline=None)
@given(cases())
def test_maximum_flow_alone_finds_the_exact_level(case: tuple[np.ndarray, ...]) -> None:
    counts, table, speeds = case
    counts, table = counts[0].astype(float), table[0]
    held = np.array([(table == expert).any(-1) for expert in range(len(counts))])
    several = np.flatnonzero(held.sum(1) > 1)
    base = counts[held.sum(1) == 1] @ held[held.sum(1) == 1]
    group, rank = np.nonzero(held[several])
    if not len(group):
        return
    tokens, level = exact_split(counts[several], group, rank, base=base, speeds=speeds)
    loads = base + np.bincount(rank, weights=tokens, minlength=len(base))
    exact = best_level(counts, table, speeds)
    assert level == pytest.approx(exact, rel=1e-9, abs=1e-12)
    assert (loads / speeds).max() <= exact * (1 + 1e-9) + 1e-9
    np.testing.assert_allclose(np.bincount(group, tokens), counts[several], rtol=1e-9)


def test_many_layers_at_once_are_never_worse_than_an_even_split() -> None:
    rng = np.random.default_rng(0)
    table = np.stack([rng.permuted(np.tile(np.arange(16), 2)).reshape(8, 4) for _ in range(20)])
    table = np.array([[_unique(rank) for rank in layer] for layer in table])
    for row in table:
        missing = sorted(set(range(16)) - set(row.ravel()))
        row.flat[np.flatnonzero(row.ravel() < 0)[: len(missing)]] = missing
    counts = rng.integers(0, 1000, (20, 16)).astype(float)
    ours = imbalance(balanced_shares(counts, table).rank_loads)
    even = imbalance(rank_loads(counts, table, shares=even_shares(table, 16)))
    assert (ours <= even + 1e-9).all()


def _unique(rank: np.ndarray) -> list[int]:
    return [int(e) if e not in rank[:i] else -1 for i, e in enumerate(rank)]


@pytest.mark.parametrize("bad", [np.nan, np.inf, -1.0])
def test_counts_that_are_not_counts_are_refused(bad: float) -> None:
    with pytest.raises(ValueError, match="finite and 0 or more"):
        balanced_shares(np.array([[1.0, bad]]), np.array([[[0, 1]]]), speeds=np.ones(1))


def test_an_expert_without_a_copy_is_named() -> None:
    with pytest.raises(ValueError, match="no rank holds expert 1"):
        ShareSolver(np.array([[[0], [0]]]), 2)
