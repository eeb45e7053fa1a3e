"""Exact counts of the experts' load."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from moeserve.experts.load import LoadCounter


@settings(deadline=None)
@given(
    batches=st.lists(
        st.tuples(
            st.sampled_from([1, 4]),
            st.lists(st.lists(st.integers(0, 6), min_size=2, max_size=2), max_size=5),
        ),
        max_size=6,
    )
)
def test_counts_are_exact(batches: list[tuple[int, list[list[int]]]]) -> None:
    """Per layer and expert, and their sum is tokens x top_k."""
    counter = LoadCounter([1, 4], num_experts=7)
    wanted: Counter[tuple[int, int]] = Counter()
    for layer, rows in batches:
        counter.count(layer, torch.tensor(rows, dtype=torch.int64).view(-1, 2))
        wanted.update((layer, expert) for row in rows for expert in row)
    counts = counter.snapshot()
    assert counts.dtype == torch.int64
    assert counts.tolist() == [[wanted[layer, e] for e in range(7)] for layer in counter.layers]
    assert int(counts.sum()) == 2 * sum(len(rows) for _, rows in batches)


def test_a_snapshot_does_not_grow() -> None:
    """It is a copy."""
    counter = LoadCounter([0], num_experts=2)
    before = counter.snapshot()
    counter.count(0, torch.tensor([[1]]))
    assert before.tolist() == [[0, 0]]
    assert counter.snapshot().tolist() == [[0, 1]]


@pytest.mark.parametrize("expert", [-1, 2])
def test_an_impossible_expert_is_an_error_and_counts_nothing(expert: int) -> None:
    """A routing bug must not become a wrong placement decision."""
    counter = LoadCounter([0], num_experts=2)
    with pytest.raises((ValueError, RuntimeError)):
        counter.count(0, torch.tensor([[0, expert]]))
    assert counter.snapshot().sum() == 0
