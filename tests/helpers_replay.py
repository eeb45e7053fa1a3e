"""Replays for tests: hypothesis cases of tokens on a placement, and tiny traces with domains."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from hypothesis import strategies as st

from moeserve_placement.slot_table import Ints
from moeserve_placement.topology import Topology
from moeserve_placement.traces.trace import RoutingTrace, count_experts


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Case:
    """Tokens of some sequences, on a valid table of a small machine."""

    topk_ids: Ints
    sequences: Ints
    num_experts: int
    table: Ints
    topology: Topology

    @property
    def num_ranks(self) -> int:
        return self.topology.num_ranks

    def counts(self) -> Ints:
        return count_experts(self.topk_ids, self.num_experts)


@st.composite
def cases(draw: st.DrawFn) -> Case:
    """Any small case: unequal speeds, ranks that are gone, several nodes, copies, free slots."""
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    num_ranks, num_nodes = draw(st.integers(1, 6)), draw(st.integers(1, 3))
    num_nodes = min(num_nodes, num_ranks)
    num_experts = draw(st.integers(1, 10))
    layers, top_k = draw(st.integers(1, 3)), draw(st.integers(1, min(num_experts, 4)))
    tokens = draw(st.integers(1, 40))
    alive = rng.random(num_ranks) > 0.2
    alive[rng.integers(num_ranks)] = True
    homes = np.flatnonzero(alive)
    slots = -(-num_experts // len(homes)) + draw(st.integers(0, 2))
    table = np.full((layers, num_ranks, slots), -1, dtype=np.int64)
    for layer in range(layers):
        names = rng.permutation(num_experts)
        for index, expert in enumerate(names):
            table[layer, homes[index % len(homes)], index // len(homes)] = expert
        for rank in homes:
            absent = np.setdiff1d(np.arange(num_experts), table[layer, rank])
            free = np.flatnonzero(table[layer, rank] < 0)
            extra = rng.permutation(absent)[: int(rng.integers(0, len(free) + 1))]
            table[layer, rank, free[: len(extra)]] = extra
    scores = rng.random((tokens, layers, num_experts)) ** np.arange(1, num_experts + 1)
    return Case(
        topk_ids=np.argsort(scores, axis=2)[:, :, :top_k],
        sequences=np.sort(rng.integers(0, 9, tokens)),
        num_experts=num_experts,
        table=table,
        topology=Topology(
            slots_per_rank=(slots,) * num_ranks,
            node_of_rank=tuple(r * num_nodes // num_ranks for r in range(num_ranks)),
            speed_of_rank=tuple(rng.choice([0.5, 1.0, 2.0], num_ranks).tolist()),
            alive=tuple(bool(up) for up in alive),
        ),
    )


def domain_trace(
    *,
    num_experts: int = 8,
    layers: int = 2,
    top_k: int = 2,
    domains: tuple[str, ...] = ("left", "right"),
    sequences: int = 8,
    length: int = 16,
    seed: int = 0,
) -> RoutingTrace:
    """Sequences of domains that each prefer their own stretch of experts."""
    rng = np.random.default_rng(seed)
    blocks, labels = [], []
    for index, name in enumerate(domains):
        middle = (index + 0.5) * num_experts / len(domains)
        distance = np.abs(np.arange(num_experts) + 0.5 - middle)
        for _ in range(sequences):
            scores = rng.gumbel(size=(length, layers, num_experts)) - distance
            blocks.append(np.argsort(-scores, axis=2)[:, :, :top_k])
            labels.append(name)
    return RoutingTrace(
        topk_ids=np.concatenate(blocks).astype(np.uint8),
        num_experts=num_experts,
        layer_ids=tuple(range(3, 3 + layers)),
        sequence_lengths=np.full(len(labels), length),
        labels=tuple(labels),
        arrival_times_s=np.arange(len(labels))[::-1].astype(float),
    )
