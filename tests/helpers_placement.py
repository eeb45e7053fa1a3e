"""Random machines, loads and placements for the tests of the placement library."""

from __future__ import annotations

from typing import Any

import numpy as np
from hypothesis import strategies as st

from moeserve_placement.load import LoadHistory
from moeserve_placement.placement import Placement
from moeserve_placement.planners.eplb import eplb_table
from moeserve_placement.slot_table import to_placement
from moeserve_placement.topology import Topology


@st.composite
def topologies(draw: Any, num_experts: int, *, max_ranks: int = 5) -> Topology:
    """A topology that holds the experts: unequal slots, nodes and speeds, perhaps a rank gone."""
    ranks = draw(st.integers(1, max_ranks))
    alive = [True, *(draw(st.booleans()) or draw(st.booleans()) for _ in range(ranks - 1))]
    slots = [draw(st.integers(0, 4)) for _ in range(ranks)]
    nodes = draw(st.integers(1, ranks))
    missing = num_experts - sum(s for s, a in zip(slots, alive, strict=True) if a)
    slots[0] += max(missing, 0)
    return Topology(
        slots_per_rank=tuple(slots),
        node_of_rank=tuple(rank * nodes // ranks for rank in range(ranks)),
        speed_of_rank=tuple(draw(st.sampled_from([0.5, 1.0, 2.0])) for _ in range(ranks)),
        alive=tuple(alive),
        bytes_per_expert=3,
    )


@st.composite
def histories(draw: Any, num_experts: int, *, layers: int = 2) -> LoadHistory:
    """A history of one to four windows of small, empty or enormous counts, perhaps with pairs."""
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    history = LoadHistory([1, 4][:layers], num_experts)
    pairs = draw(st.booleans())
    for _ in range(draw(st.integers(1, 4))):
        scale = draw(st.sampled_from([0, 1, 50, 2**40]))
        counts = rng.integers(0, scale + 1, (layers, num_experts))
        counts[draw(st.integers(0, layers - 1))] *= draw(st.integers(0, 1))
        both = np.minimum(counts[:, :, None], counts[:, None]) * 0.3 if pairs else None
        history.observe(counts, both)
    return history


@st.composite
def situations(draw: Any) -> tuple[LoadHistory, Topology, Placement | None]:
    """A history, a topology that holds its experts, and perhaps a random placement."""
    experts = draw(st.integers(1, 8))
    topology = draw(topologies(experts))
    history = draw(histories(experts))
    current = None
    if draw(st.booleans()):
        rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
        whole = Topology(slots_per_rank=topology.slots_per_rank)
        table = eplb_table(rng.random((2, experts)), whole)
        current = to_placement(table, history.layer_ids, num_experts=experts, topology=whole)
    return history, topology, current


def copies_of(placement: Placement, topology: Topology, layer: int) -> set[int]:
    """Experts that some rank alive holds."""
    return {
        expert
        for rank, slots in enumerate(placement.layers[layer])
        if topology.alive[rank]
        for expert in slots
        if expert is not None
    }


def num_lost(placement: Placement, history: LoadHistory, topology: Topology) -> int:
    """Experts without a copy on a rank alive, over all layers."""
    held = [len(copies_of(placement, topology, layer)) for layer in history.layer_ids]
    return len(held) * history.num_experts - sum(held)


def zipf(num_experts: int, exponent: float, layers: int, seed: int) -> np.ndarray:
    """Zipf loads with log-normal jitter in random order; rows sum to 1."""
    rng = np.random.default_rng(seed)
    load = np.arange(1, num_experts + 1.0) ** -exponent
    load = rng.permuted(load * rng.lognormal(0, 0.15, (layers, num_experts)), axis=1)
    return load / load.sum(1, keepdims=True)
