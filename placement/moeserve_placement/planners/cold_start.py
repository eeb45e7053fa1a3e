"""Placements from nothing: copies by the worst scenarios, heaviest first where it hurts least."""

from __future__ import annotations

import numpy as np

from moeserve_placement.planners.eplb import heaviest_first, replica_counts
from moeserve_placement.planners.problem import Problem, raised
from moeserve_placement.slot_table import FREE, Floats, Ints

_PEAK = 8  # p-norm over scenarios that ranks experts by their worst share, not by their mean


def cold_table(problem: Problem) -> Ints:
    """Tables [A, G, max_slots] that keep the smooth maximum over scenarios low.

    Like EPLB, but an expert's weight is a p-norm over the scenarios, and a copy goes to the rank
    whose contribution to the objective rises least (list scheduling of vectors).
    """
    peak = worst_share(problem)
    counts = replica_counts(peak, int(problem.room.sum()), most=int((problem.room > 0).sum()))
    return place(problem, counts, peak / np.maximum(counts, 1))


def worst_share(problem: Problem) -> Floats:
    """p-norm over scenarios of each expert's load: float64 [A, num_experts]."""
    result: Floats = (raised(problem.loads, _PEAK) @ problem.weights) ** (1.0 / _PEAK)
    return result


def place(problem: Problem, counts: Ints, unit: Floats) -> Ints:
    """Heaviest copy first, each to the rank with room where the objective rises least."""
    layers, _, scenarios = problem.loads.shape
    ranks, power = len(problem.room), problem.power
    table = np.full((layers, ranks, int(problem.room.max())), FREE, dtype=np.int64)
    levels, used = np.zeros((layers, ranks, scenarios)), np.zeros((layers, ranks), np.int64)
    heat = np.zeros((layers, ranks))
    held = np.zeros((layers, counts.shape[1], ranks), np.bool_)
    each = problem.loads / np.maximum(counts, 1)[..., None]
    rows = np.arange(layers)
    for expert in heaviest_first(unit, counts).T:
        row = rows[expert >= 0]
        expert = expert[expert >= 0]
        raised_levels = levels[row] + each[row, expert][:, None] / problem.speeds[:, None]
        after = raised(raised_levels, power) @ problem.weights
        blocked = (used[row] >= problem.room) | held[row, expert]
        rank = np.where(blocked, np.inf, after - heat[row]).argmin(1)
        at = np.arange(len(row))
        fits = ~blocked[at, rank]
        row, expert, rank, at = row[fits], expert[fits], rank[fits], at[fits]
        table[row, rank, used[row, rank]] = expert
        used[row, rank] += 1
        levels[row, rank] = raised_levels[at, rank]
        heat[row, rank] = after[at, rank]
        held[row, expert, rank] = True
    return table
