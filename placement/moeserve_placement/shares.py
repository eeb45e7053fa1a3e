"""How to split each expert's tokens over its copies so that the fullest rank is least full.

For a fixed placement that is a small linear program per layer; the reachable rank loads form a base
polytope, so the split with the least sum of squares is also the one with the least maximum. It is
found by proximal steps: with copies as resistors between ranks, equal levels are the potentials of
a network, one linear solve. What a solve would take below zero is dropped and what could still take
load is added back (block principal pivoting), and a maximum flow settles the rare rest.

The split is a run-time answer: the factorised network depends on the placement only, so a serving
engine keeps a ``ShareSolver`` per placement and calls ``solve`` with the counts of every batch.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from moeserve_placement.checks import check_number
from moeserve_placement.flow import exact_split
from moeserve_placement.network import components, equalised, feasible, network_inverse
from moeserve_placement.placement import PlacementError
from moeserve_placement.share_graph import ShareGraph, tight_sets, tightest_bound
from moeserve_placement.slot_table import Floats, Ints, even_shares

_PIVOTS = 16  # rounds of block pivoting before a layer is given to the maximum flow
_ROUNDING = 1e-12  # of an expert's tokens


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Split:
    """A split of every expert over its copies.

    shares: fraction of its expert that a slot takes, float64 [num_layers, num_ranks, max_slots], 0
    where free. rank_loads: tokens by rank, float64 [num_layers, num_ranks]. bound: the level (load
    over speed) that no split of this placement can beat, float64 [num_layers]; the largest level
    is at most ``1 + tolerance`` times it.
    """

    shares: Floats
    rank_loads: Floats
    bound: Floats


def balanced_shares(
    counts: NDArray[np.generic],
    table: Ints,
    *,
    speeds: Floats | None = None,
    tolerance: float = 1e-6,
) -> Split:
    """The min-max split of these counts, for one-off use; see ``ShareSolver``."""
    copies = _Copies(table, counts.shape[-1], speeds=speeds, tolerance=tolerance)
    flat = copies.checked(counts)
    graph, demand, base = copies.graph, copies.demand(flat), copies.graph.base_loads(flat)
    tokens, bound = pivoted(graph, demand, base, flat, copies.speeds, tolerance=tolerance)
    return copies.split(tokens, demand, base + graph.edge_loads(tokens), bound)


class _Copies:
    """The copies of one placement, checked, and how tokens per copy become a ``Split``."""

    def __init__(
        self, table: Ints, num_experts: int, *, speeds: Floats | None, tolerance: float
    ) -> None:
        self.table = table
        self.num_experts = num_experts
        self.tolerance = check_number("tolerance", tolerance, low=0, above=True)
        self.speeds = np.ones(table.shape[1]) if speeds is None else np.asarray(speeds, float)
        if not (np.isfinite(self.speeds).all() and (self.speeds > 0).all()):
            raise PlacementError(f"speeds = {self.speeds}: must be finite and above 0")
        self.graph = ShareGraph.of(table, num_experts)
        placed = np.zeros(len(table) * num_experts, dtype=np.bool_)
        placed[self.graph.edge_expert] = placed[self.graph.single_expert] = True
        if not placed.all():
            layer, expert = divmod(int(np.flatnonzero(~placed)[0]), num_experts)
            raise PlacementError(f"row {layer} of the table: no rank holds expert {expert}")
        self.even = even_shares(table, num_experts).ravel()

    def checked(self, counts: NDArray[np.generic]) -> Floats:
        """The counts raveled."""
        shape = (len(self.table), self.num_experts)
        if counts.shape != shape:
            raise PlacementError(f"counts: has shape {counts.shape}, must have {shape}")
        flat = counts.astype(np.float64).ravel()
        if not (np.isfinite(flat).all() and (flat >= 0).all()):
            raise PlacementError("counts: must be finite and 0 or more")
        return flat

    def demand(self, flat: Floats) -> Floats:
        """Tokens of each expert that has several copies."""
        return flat[self.graph.edge_expert[self.graph.starts]]

    def split(self, tokens: Floats, demand: Floats, loads: Floats, bound: Floats) -> Split:
        """The split with these tokens per edge; even where an expert has no tokens."""
        shares = self.even.copy()
        whole = demand[self.graph.group]
        slot = self.graph.edge_slot
        shares[slot] = np.divide(tokens, whole, out=shares[slot], where=whole > 0)
        return Split(
            shares=shares.reshape(self.table.shape),
            rank_loads=loads.reshape(self.table.shape[:2]),
            bound=bound,
        )


class ShareSolver(_Copies):
    """Splits batches over the copies of one placement.

    table: slots [num_layers, num_ranks, max_slots], -1 where free; each expert is somewhere.
    speeds: rank speeds [num_ranks], above 0; a level is load over speed. Default: all 1.
    nominal: expected counts [num_layers, num_experts]: the nearer the batches are to it, the fewer
    need more than the one prepared solve. Default: all experts alike.
    tolerance: how far the largest level may be above what is possible, relative.

    Raises:
        PlacementError: an expert has no copy, or a value is out of range.
    """

    def __init__(
        self,
        table: Ints,
        num_experts: int,
        *,
        speeds: Floats | None = None,
        nominal: NDArray[np.generic] | None = None,
        tolerance: float = 1e-6,
    ) -> None:
        super().__init__(table, num_experts, speeds=speeds, tolerance=tolerance)
        self._components = components(self.graph)
        expected = np.ones((len(table), num_experts)) if nominal is None else nominal
        self._prepare(self.checked(expected))

    def _prepare(self, expected: Floats) -> None:
        """Solves the nominal counts the long way and factorises the network that they use."""
        graph = self.graph
        base = graph.base_loads(expected)
        demand = self.demand(expected)
        tokens, _ = pivoted(graph, demand, base, expected, self.speeds, tolerance=self.tolerance)
        levels = (base + graph.edge_loads(tokens)).reshape(len(self.table), -1) / self.speeds
        self._tight = tight_sets(graph, levels, tokens, 1e-6)
        even = self.even[graph.edge_slot]
        share = np.divide(tokens, demand[graph.group], out=even, where=demand[graph.group] > 0)
        self._nominal_share = feasible(graph, share, np.ones(len(demand)))
        self._conductance = conductance(graph, self._nominal_share, demand, levels.mean(1))
        self._inverse = network_inverse(graph, self._conductance, self.speeds)

    def solve(self, counts: NDArray[np.generic]) -> Split:
        """The min-max split of counts [num_layers, num_experts], finite and not negative.

        Raises:
            PlacementError: wrong shape or values.
        """
        flat = self.checked(counts)
        graph = self.graph
        base = graph.base_loads(flat)
        demand = self.demand(flat)
        start = demand[graph.group] * self._nominal_share
        bound = self._component_bound(base + graph.edge_loads(start))
        tokens = equalised(graph, start, base, inverse=self._inverse, conductance=self._conductance)
        tokens = feasible(graph, tokens, demand)
        largest = self._largest(base + graph.edge_loads(tokens))
        open_layers = np.flatnonzero(largest > bound * (1 + self.tolerance))
        if len(open_layers):
            bound = np.maximum(bound, tightest_bound(graph, flat, self.speeds, self._tight))
            open_layers = np.flatnonzero(largest > bound * (1 + self.tolerance))
        if len(open_layers):
            self._pivot(open_layers, flat, tokens, bound)
        return self.split(tokens, demand, base + graph.edge_loads(tokens), bound)

    def _pivot(self, open_layers: Ints, flat: Floats, tokens: Floats, bound: Floats) -> None:
        """Solves these layers the long way, into ``tokens`` and ``bound``."""
        part, edges = self.graph.select(open_layers)
        counts = flat.reshape(len(self.table), -1)[open_layers].ravel()
        demand = counts[part.edge_expert[part.starts]]
        tokens[edges], bound[open_layers] = pivoted(
            part,
            demand,
            part.base_loads(counts),
            counts,
            self.speeds,
            tolerance=self.tolerance,
        )

    def _component_bound(self, loads: Floats) -> Floats:
        """Load over speed of the fullest group of connected ranks: float64 [num_layers]."""
        speeds = np.tile(self.speeds, len(self.table))
        level = np.bincount(self._components, loads) / np.bincount(self._components, speeds)
        result: Floats = level[self._components].reshape(len(self.table), -1).max(1)
        return result

    def _largest(self, loads: Floats) -> Floats:
        level: Floats = (loads.reshape(len(self.table), -1) / self.speeds).max(1)
        return level


def conductance(graph: ShareGraph, share: Floats, demand: Floats, mean_level: Floats) -> Floats:
    """Conductance per edge: the tokens it carries over the mean level of its layer.

    Then a step changes an edge in proportion to what it carries, which seldom goes below zero.
    """
    scale = np.where(mean_level > 0, mean_level, 1.0)[graph.group_layer]
    carried = share * np.maximum(demand / scale, 1e-9)[graph.group]
    return carried


def pivoted(
    graph: ShareGraph,
    demand: Floats,
    base: Floats,
    counts: Floats,
    speeds: Floats,
    *,
    tolerance: float,
) -> tuple[Floats, Floats]:
    """Tokens per edge of a min-max split, and the level per layer that none can beat.

    demand: by expert with several copies. base: load of the others. counts: raveled.
    """
    layers = graph.shape[0]
    mean = (base + graph.edge_loads(np.zeros(len(graph.group)))).reshape(layers, -1).sum(1)
    mean = (mean + np.bincount(graph.group_layer, demand, minlength=layers)) / speeds.sum()
    copies = graph.by_group(np.ones(len(graph.group)))
    full = conductance(graph, 1.0 / copies[graph.group], demand, mean)
    used = np.ones(len(graph.group), dtype=np.bool_)
    best = demand[graph.group] / copies[graph.group]
    done = np.zeros(layers, dtype=np.bool_)
    bound = mean.copy()
    edge_layer = graph.group_layer[graph.group]
    for _ in range(_PIVOTS if len(best) else 0):
        now = np.where(used, full, 0.0)
        start = demand[graph.group] * now / graph.by_group(now)[graph.group]
        inverse = network_inverse(graph, now, speeds)
        raw = equalised(graph, start, base, inverse=inverse, conductance=now)
        tokens = feasible(graph, raw, demand)
        levels = (base + graph.edge_loads(tokens)).reshape(layers, -1) / speeds
        tight = tight_sets(graph, levels, tokens, tolerance)
        bound = np.maximum(bound, tightest_bound(graph, counts, speeds, tight))
        solved = ~done & (levels.max(1) <= bound * (1 + tolerance))
        done |= solved
        best = np.where(solved[edge_layer], tokens, best)
        if done.all():
            return best, bound
        used = _next_support(graph, used, raw, base, now, demand, speeds)
    for layer in np.flatnonzero(~done) if len(best) else []:
        edges, groups = graph.edges_of(int(layer)), graph.group_layer == layer
        if not groups.any():
            continue
        ranks = slice(int(layer) * graph.shape[1], (int(layer) + 1) * graph.shape[1])
        best[edges], level = exact_split(
            demand[groups],
            graph.group[edges] - int(np.argmax(groups)),
            graph.edge_rank[edges] - ranks.start,
            base=base[ranks],
            speeds=speeds,
        )
        bound[layer] = max(bound[layer], level)
    best = feasible(graph, best, demand)  # the flow may leave a rounding error unserved
    return best, np.maximum(bound, (base.reshape(layers, -1) / speeds).max(1))


def _next_support(
    graph: ShareGraph,
    used: NDArray[np.bool_],
    raw: Floats,
    base: Floats,
    now: Floats,
    demand: Floats,
    speeds: Floats,
) -> NDArray[np.bool_]:
    """Without the copies that went below zero, with those that could still take load."""
    layers = graph.shape[0]
    level = ((base + graph.edge_loads(raw)).reshape(layers, -1) / speeds).ravel()[graph.edge_rank]
    offer = (graph.by_group(now * level) / graph.by_group(now))[graph.group]
    keep = used & (raw >= -_ROUNDING * demand[graph.group])
    wanted = keep | (~used & (level < offer * (1 - 1e-9)))
    empty = ~np.logical_or.reduceat(wanted, graph.starts)
    result: NDArray[np.bool_] = wanted | (used & empty[graph.group])
    return result
