"""Placements for the tests of this folder."""

from __future__ import annotations

import pytest
import torch
from hypothesis import strategies as st

from moeserve_placement import Placement


@st.composite
def _placements(draw: st.DrawFn) -> Placement:
    num_experts, num_ranks = draw(st.integers(1, 12)), draw(st.integers(1, 5))
    layers = {}
    for layer in draw(st.sets(st.integers(0, 40), min_size=1, max_size=3)):
        ranks: list[list[int | None]] = [[] for _ in range(num_ranks)]
        for expert in range(num_experts):
            for rank in draw(st.sets(st.integers(0, num_ranks - 1), min_size=1)):
                ranks[rank].append(expert)
        for slots in ranks:
            slots += [None] * draw(st.integers(0, 2))
        layers[layer] = tuple(tuple(draw(st.permutations(slots))) for slots in ranks)
    return Placement(num_experts=num_experts, layers=layers)


@pytest.fixture(scope="session")
def placements() -> st.SearchStrategy[Placement]:
    """Any valid placement: copies, free slots, empty ranks, layers of different shapes."""
    return _placements()


@pytest.fixture(scope="session", autouse=True)
def one_thread() -> None:
    """The machine's cores are shared; tensors here are tiny."""
    torch.set_num_threads(1)
