"""Experts with several copies as a graph: one edge per copy, all layers in flat arrays.

Layers have different numbers of copies; flat arrays with segment starts need no padding, and all
layers go through each numpy call together.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from moeserve_placement.slot_table import Floats, Ints, copy_counts


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ShareGraph:
    """The copies of one placement, sorted by layer and expert.

    Edges are the copies of experts that have two or more; singles those of the others. All indices
    are flat: expert = layer * num_experts + e, rank = layer * num_ranks + g, slot = position in the
    raveled table. ``starts``: first edge of each expert that has several copies. ``group``: edge ->
    position in ``starts``. ``group_layer``: layer of each such expert.
    """

    shape: tuple[int, int, int]  # layers, ranks, slots
    num_experts: int
    edge_expert: Ints
    edge_rank: Ints
    edge_slot: Ints
    group: Ints
    starts: Ints
    group_layer: Ints
    single_expert: Ints
    single_rank: Ints
    single_slot: Ints

    @classmethod
    def of(cls, table: Ints, num_experts: int) -> ShareGraph:
        """The graph of a slot table [num_layers, num_ranks, max_slots]."""
        layer, rank, _ = np.nonzero(table >= 0)
        slot = np.flatnonzero(table.ravel() >= 0)
        expert = layer * num_experts + table.ravel()[slot]
        order = np.argsort(expert, kind="stable")
        expert, slot = expert[order], slot[order]
        flat_rank = (layer * table.shape[1] + rank)[order]
        several = copy_counts(table, num_experts).ravel()[expert] > 1
        edge_expert = expert[several]
        first = np.concatenate([[True], edge_expert[1:] != edge_expert[:-1]])[: len(edge_expert)]
        starts = np.flatnonzero(first)
        return cls(
            shape=(table.shape[0], table.shape[1], table.shape[2]),
            num_experts=num_experts,
            edge_expert=edge_expert,
            edge_rank=flat_rank[several],
            edge_slot=slot[several],
            group=np.cumsum(first) - 1,
            starts=starts,
            group_layer=edge_expert[starts] // num_experts,
            single_expert=expert[~several],
            single_rank=flat_rank[~several],
            single_slot=slot[~several],
        )

    def select(self, layers: Ints) -> tuple[ShareGraph, NDArray[np.bool_]]:
        """The graph of these layers only (ascending), and which edges of this one it has."""
        wanted = np.zeros(self.shape[0], dtype=np.bool_)
        wanted[layers] = True
        shift = np.arange(self.shape[0]) - (np.cumsum(wanted) - 1)  # layers that fall away before
        edges = wanted[self.edge_expert // self.num_experts]
        singles = wanted[self.single_expert // self.num_experts]
        ranks, slots = self.shape[1], self.shape[1] * self.shape[2]

        def moved(index: Ints, keep: NDArray[np.bool_], size: int) -> Ints:
            kept = index[keep]
            result: Ints = kept - shift[kept // size] * size
            return result

        groups = wanted[self.group_layer]
        number = np.cumsum(groups) - 1
        group = number[self.group[edges]]
        part = ShareGraph(
            shape=(len(layers), ranks, self.shape[2]),
            num_experts=self.num_experts,
            edge_expert=moved(self.edge_expert, edges, self.num_experts),
            edge_rank=moved(self.edge_rank, edges, ranks),
            edge_slot=moved(self.edge_slot, edges, slots),
            group=group,
            starts=np.searchsorted(group, np.arange(int(groups.sum()))),
            group_layer=moved(self.group_layer, groups, 1),
            single_expert=moved(self.single_expert, singles, self.num_experts),
            single_rank=moved(self.single_rank, singles, ranks),
            single_slot=moved(self.single_slot, singles, slots),
        )
        return part, edges

    def base_loads(self, counts: Floats) -> Floats:
        """Load of the single copies: [num_layers * num_ranks] for raveled counts."""
        return self._by_rank(self.single_rank, counts[self.single_expert])

    def edge_loads(self, tokens: Floats) -> Floats:
        """Load of the edges: [num_layers * num_ranks] for tokens per edge."""
        return self._by_rank(self.edge_rank, tokens)

    def by_group(self, values: Floats) -> Floats:
        """Sum over the copies of each expert: [num groups] for values per edge."""
        return np.add.reduceat(values, self.starts) if len(values) else values

    def _by_rank(self, index: Ints, values: Floats) -> Floats:
        size = self.shape[0] * self.shape[1]
        loads: Floats = np.bincount(index, weights=values, minlength=size).astype(np.float64)
        return loads

    def edges_of(self, layer: int) -> slice:
        """The edges of one layer."""
        low, high = np.searchsorted(
            self.edge_expert, [layer * self.num_experts, (layer + 1) * self.num_experts]
        )
        return slice(int(low), int(high))


def tightest_bound(
    graph: ShareGraph, counts: Floats, speeds: Floats, ranks: NDArray[np.bool_]
) -> Floats:
    """What no split can beat, from one set of ranks per layer: float64 [num_layers].

    Experts with all their copies inside the set must be served there, so the largest level is at
    least their tokens over the speed of the set. ranks: bool [num_layers, num_ranks], not empty.
    """
    layers = graph.shape[0]
    inside = ranks.ravel()
    total = np.where(inside, graph.base_loads(counts), 0.0).reshape(layers, -1).sum(1)
    if len(graph.starts):
        captive = np.logical_and.reduceat(inside[graph.edge_rank], graph.starts)
        tokens = np.where(captive, counts[graph.edge_expert[graph.starts]], 0.0)
        total = total + np.bincount(graph.group_layer, weights=tokens, minlength=layers)
    result: Floats = total / np.where(ranks, speeds, 0.0).sum(1)
    return result


def tight_sets(
    graph: ShareGraph, levels: Floats, tokens: Floats, tolerance: float
) -> NDArray[np.bool_]:
    """Per layer the ranks that the fullest one could still push load to: bool [layers, ranks].

    Follows copies that take tokens: if an expert is served on a rank of the set, its other copies'
    ranks belong to it too. In an optimal split they are all as full.
    """
    inside: NDArray[np.bool_] = levels >= levels.max(1, keepdims=True) * (1.0 - tolerance)
    serves = tokens > tolerance * max(float(levels.mean()), 1e-300)
    while True:
        flat = inside.ravel()
        reached = np.logical_or.reduceat(serves & flat[graph.edge_rank], graph.starts)
        grown = flat.copy()
        grown[graph.edge_rank[reached[graph.group]]] = True
        if (grown == flat).all():
            return inside
        inside = grown.reshape(inside.shape)
