"""Exact balance on one load by unequal shares: fill ranks to their mean, cutting an expert each.

A rank takes as many experts as it has slots, chosen so that their sum just passes its part of the
load, and the heaviest of them is cut: the rest of it stays in the pool for the next rank. With
about one spare slot per rank that leaves every rank at the mean. It fits the one load it is made
for and nothing else, so it is a candidate beside others, never the plan by itself.
"""

from __future__ import annotations

import numpy as np

from moeserve_placement.slot_table import FREE, Floats, Ints, is_complete
from moeserve_placement.topology import Topology


def sliding_cut_table(load: Floats, topology: Topology) -> Ints:
    """Tables [num_layers, num_ranks, max_slots] for loads [num_layers, num_experts].

    Free slots take further copies of the heaviest experts. A layer where the experts do not fit in
    this way (too few spare slots) comes back empty, which no placement can be.
    """
    table = np.full((len(load), topology.num_ranks, topology.max_slots), FREE, dtype=np.int64)
    for row, layer in enumerate(load):
        _fill_ranks(table[row], layer, topology)
        if is_complete(table[row : row + 1], load.shape[1]):
            _use_free_slots(table[row], layer, topology)
        else:
            table[row] = FREE
    return table


def _fill_ranks(table: Ints, load: Floats, topology: Topology) -> None:
    order = np.argsort(load, kind="stable")
    experts, weights = order.tolist(), load[order].tolist()  # the pool, lightest first
    share = load.sum() * topology.speeds / topology.speeds.sum()
    quota = _quota(topology, len(load))
    ranks = np.flatnonzero(quota)
    ranks = ranks[np.argsort(-quota[ranks], kind="stable")]
    for position, rank in enumerate(ranks):
        slots = int(quota[rank])
        if not experts:
            return
        if position == len(ranks) - 1:
            order_left = sorted(
                range(len(experts)), key=lambda i: ((table == experts[i]).any(), -weights[i])
            )  # what is nowhere yet comes first
            table[rank, : min(slots, len(experts))] = [experts[i] for i in order_left[:slots]]
            return
        chosen = _choice(np.asarray(weights), slots, float(share[rank]))
        table[rank, : len(chosen)] = [experts[index] for index in chosen]
        _take(experts, weights, chosen, float(share[rank]))


def _quota(topology: Topology, num_experts: int) -> Ints:
    """Slots of each rank to fill: one cut per rank but the last; further spare slots stay free."""
    quota = topology.usable_slots.copy()
    needed = num_experts + int((quota > 0).sum()) - 1
    for _ in range(int(quota.sum()) - needed):
        fullest = int(quota.argmax())
        quota[fullest] -= 1
    return quota


def _choice(weights: Floats, slots: int, target: float) -> list[int]:
    """Positions of at most ``slots`` entries of the pool whose sum just reaches the target."""
    count = len(weights)
    if count <= slots:
        return list(range(count))
    if weights[-1] >= target:
        return [*range(slots - 1), count - 1]
    sums = np.concatenate([[0.0], np.cumsum(weights)])
    windows = sums[slots:] - sums[:-slots]
    start = int(np.searchsorted(windows, target))
    if start >= len(windows):
        return list(range(count - slots, count))
    if start == 0:
        return list(range(slots))
    # the window before falls short: exchange its lightest entry for the first that is enough
    rest = windows[start - 1] - weights[start - 1]
    last = int(np.searchsorted(weights, target - rest))
    last = min(max(last, start - 1 + slots), count - 1)
    return [*range(start, start - 1 + slots), last]


def _take(experts: list[int], weights: list[float], chosen: list[int], target: float) -> None:
    """Removes what a rank took from the pool; the rest of the cut expert goes back, in order."""
    over = sum(weights[index] for index in chosen) - target
    cut = max(chosen, key=lambda index: weights[index])
    expert, rest = experts[cut], min(over, weights[cut])
    for index in sorted(chosen, reverse=True):
        del experts[index], weights[index]
    if rest > 1e-9 * target:
        at = int(np.searchsorted(weights, rest))
        experts.insert(at, expert)
        weights.insert(at, rest)


def _use_free_slots(table: Ints, load: Floats, topology: Topology) -> None:
    counts = np.bincount(table[table >= 0], minlength=len(load))
    for rank, slots in enumerate(topology.usable_slots):
        for slot in np.flatnonzero(table[rank, :slots] < 0):
            heat = load / counts
            heat[table[rank][table[rank] >= 0]] = -1.0
            expert = int(heat.argmax())
            if heat[expert] < 0:
                return
            table[rank, slot] = expert
            counts[expert] += 1
