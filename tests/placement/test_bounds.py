"""Bounds: below every placement, and the exact optimum where a solver is there."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from helpers_placement import topologies
from hypothesis import given, settings
from hypothesis import strategies as st

from moeserve_placement.bounds import exact_optimum, lower_bound
from moeserve_placement.load import LoadHistory
from moeserve_placement.planners import get_planner
from moeserve_placement.planners.eplb import eplb_table
from moeserve_placement.shares import balanced_shares
from moeserve_placement.slot_table import slot_table
from moeserve_placement.topology import Topology


@settings(max_examples=80, deadline=None)
@given(
    st.integers(1, 8).flatmap(lambda n: st.tuples(st.just(n), topologies(n))),
    st.integers(0, 2**32 - 1),
)
def test_no_placement_with_its_best_split_is_below_the_bound(
    case: tuple[int, Topology], seed: int
) -> None:
    experts, topology = case
    rng = np.random.default_rng(seed)
    load = rng.integers(1, 100, (3, experts)) * rng.integers(0, 2, (3, experts)) * 1.0
    speeds = np.where(topology.alive, topology.speeds, 1.0)
    for weights in (load, rng.random(load.shape)):
        table = eplb_table(weights, topology)
        found = balanced_shares(load, table, speeds=speeds)
        assert ((found.rank_loads / speeds).max(1) >= lower_bound(load, topology) - 1e-9).all()


@pytest.mark.parametrize("seed", range(4))
def test_bound_is_below_brute_force_without_spare_slots(seed: int) -> None:
    load = np.random.default_rng(seed).integers(1, 50, (1, 6)).astype(float)
    topology = Topology.uniform(3, 2)
    best = min(
        max(load[0, list(order[i : i + 2])].sum() for i in (0, 2, 4))
        for order in itertools.permutations(range(6))
    )
    assert lower_bound(load, topology)[0] <= best


@pytest.mark.parametrize("seed", range(3))
def test_planned_shares_come_close_to_the_exact_optimum(seed: int) -> None:
    pytest.importorskip("highspy")
    load = np.random.default_rng(seed).integers(1, 60, 6).astype(float)
    topology = Topology.uniform(3, 3)
    exact = exact_optimum(load, topology)
    assert exact >= lower_bound(load[None], topology)[0] - 1e-6
    history = LoadHistory([0], 6)
    history.observe(1e6 * load[None])
    plan = get_planner("scenario", split="planned").plan(history, topology)
    found = balanced_shares(load[None], slot_table(plan.placement, [0]))
    assert found.rank_loads.max() >= exact - 1e-6
    assert found.rank_loads.max() <= 1.02 * exact
    assert exact_optimum(load, topology, split="even") >= exact - 1e-6


@pytest.mark.parametrize("bad", [[1.0, np.nan], [1.0, np.inf], [-5.0, 1.0]])
def test_bounds_of_what_is_no_load_are_refused(bad: list[float]) -> None:
    with pytest.raises(ValueError, match="load: must be finite and 0 or more"):
        lower_bound(np.array([bad]), Topology.uniform(2, 1))
    with pytest.raises(ValueError, match="load: must be finite and 0 or more"):
        exact_optimum(np.array(bad), Topology.uniform(2, 1))
    with pytest.raises(ValueError, match=r"load: has shape \(2,\)"):
        lower_bound(np.array(bad), Topology.uniform(2, 1))


def test_unknown_split_is_named() -> None:
    with pytest.raises(ValueError, match="split = 'odd'"):
        exact_optimum(np.ones(2), Topology.uniform(2, 1), split="odd")
