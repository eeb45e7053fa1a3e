"""Local search on placements of many layers at once: each round one step per layer, the best found.

A step swaps two experts of two ranks (two copies, one where a slot is free), or gives a hot expert
one more copy in a free slot or in place of an expert that has others (one copy). One rank of the
pair is the one that contributes most to the objective, the other one of the least loaded ones.
The best step is the one with the largest gain per copy.

Layers advance in lockstep, so that each numpy call works on all of them.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from moeserve_placement.fanout import copies_on_nodes, meeting_gains
from moeserve_placement.planners.problem import Effort, Problem, Step, raised
from moeserve_placement.slot_table import Floats, Ints, copy_counts, holds

_EXACT_VICTIMS = 3


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Meetings:
    """Fewer nodes per token, in units of the objective; expert -1 is the last row and brings none.

    arrive: when an expert comes to a node, leave: what is lost when a copy there goes, both
    [A, num_experts + 1, num_nodes]. pairs: [A, num_experts + 1, num_experts + 1].
    """

    arrive: Floats
    leave: Floats
    pairs: Floats


class _State:
    """Tables of some layers with what the search needs of them."""

    def __init__(self, problem: Problem, table: Ints, *, freeze: bool) -> None:
        self.problem = problem
        self.table = table.copy()
        layers, experts, scenarios = problem.loads.shape
        self.rows = np.arange(layers)
        self.padded = np.concatenate(
            [problem.loads, np.zeros((layers, 1, scenarios))], axis=1
        )  # expert -1 is the last row: a free slot has no load
        self.counts = np.concatenate(
            [copy_counts(table, experts), np.ones((layers, 1), np.int64)], axis=1
        )
        self.held = np.concatenate(
            [holds(table, experts), np.zeros((layers, 1, table.shape[1]), np.bool_)], axis=1
        )
        self.unusable = np.arange(table.shape[2]) >= problem.room[:, None]
        self.locked = np.broadcast_to(self.unusable, table.shape).copy()
        self.freeze = freeze
        self.unit = self.padded / self.counts[..., None]
        taken = self.unit[self.rows[:, None, None], self.table]
        self.levels = taken.sum(2) / problem.speeds[:, None]  # [A, G, K]
        self.heat = raised(self.levels, problem.power) @ problem.weights  # [A, G]
        self.refresh()

    def refresh(self) -> None:
        """The objective's parts from ``heat`` and the table."""
        problem = self.problem
        self.balance = self.heat.mean(1) ** (1.0 / problem.power)
        self.meetings = None if problem.pair_gain is None else self._meetings(problem.pair_gain)

    def carried(self, rows: Ints, experts: Ints) -> Floats:
        """What one expert per row puts on each rank: [len(rows), G, K]."""
        result: Floats = self.held[rows, experts][..., None] * self.unit[rows, experts][:, None]
        return result

    def _meetings(self, pair_gain: Floats) -> _Meetings:
        experts = pair_gain.shape[1]
        copies = copies_on_nodes(self.table, experts, self.problem.nodes)
        new, lost = meeting_gains(pair_gain, copies[:, :-1] > 0)
        none = np.zeros((len(new), 1, new.shape[2]))
        return _Meetings(
            arrive=np.concatenate([np.where(copies[:, :-1] > 0, 0.0, new), none], axis=1),
            leave=np.concatenate([np.where(copies[:, :-1] == 1, lost, 0.0), none], axis=1),
            pairs=np.pad(pair_gain, ((0, 0), (0, 1), (0, 1))),
        )

    def part(self, keep: Ints) -> _State:
        """The state of some of the layers."""
        state = _State(self.problem.part(keep), self.table[keep], freeze=self.freeze)
        state.locked = self.locked[keep]
        return state


def search(
    problem: Problem,
    table: Ints,
    *,
    max_copies: int,
    min_gain: float,
    freeze: bool,
    effort: Effort,
) -> tuple[Ints, list[list[Step]]]:
    """Improved tables [A, G, max_slots], and per layer the steps that lead there.

    max_copies: per layer. min_gain: least drop of the objective per copy for a step to be taken.
    freeze: whether a slot that was written stays as it is, so that no copy is in vain.
    A layer is done when none of its ``effort.depth`` hottest ranks has a step worth taking.
    """
    steps: list[list[Step]] = [[] for _ in table]
    result = table.copy()
    number = np.arange(len(table))
    left = np.full(len(table), max_copies)
    state = _State(problem, table, freeze=freeze)
    tried = np.zeros(len(table), np.int64)  # hottest ranks in vain since the last step
    for _ in range(effort.rounds):
        best = _best_steps(state, left, tried, effort)
        goes = best.gain_per_copy >= min_gain
        tried = np.where(goes, 0, tried + 1)
        done = tried >= min(effort.depth, table.shape[1])
        result[number[done]] = state.table[done]
        if done.all():
            return result, steps
        if done.mean() > 0.25:
            keep = np.flatnonzero(~done)
            state, best, number = state.part(keep), best.part(keep), number[keep]
            left, goes, tried = left[keep], goes[keep], tried[keep]
        copies = _apply(state, best, goes & (tried == 0))
        left = left - copies
        for row in np.flatnonzero(goes):
            steps[number[row]].append(
                Step(
                    writes=best.writes(int(row)),
                    copies=int(copies[row]),
                    gain=float(best.gain_per_copy[row] * copies[row]),
                )
            )
    result[number] = state.table
    return result, steps


@dataclass(slots=True, eq=False)
class _Best:
    """One step per layer: up to two slot writes; ``second_rank`` -1 where there is only one."""

    gain_per_copy: Floats
    first: Ints  # [A, 3]: rank, slot, new expert
    second: Ints  # [A, 3], rank -1: none

    def part(self, keep: Ints) -> _Best:
        return _Best(self.gain_per_copy[keep], self.first[keep], self.second[keep])

    def writes(self, row: int) -> tuple[tuple[int, int, int], ...]:
        pair = [self.first[row].tolist(), self.second[row].tolist()]
        return tuple((rank, slot, expert) for rank, slot, expert in pair if rank >= 0)

    def take(self, better: NDArray[np.bool_], other: _Best) -> None:
        for name in ("gain_per_copy", "first", "second"):
            getattr(self, name)[better] = getattr(other, name)[better]


def _best_steps(state: _State, left: Ints, tried: Ints, effort: Effort) -> _Best:
    order = np.argsort(-state.heat, axis=1)
    hot = order[state.rows, np.minimum(tried, order.shape[1] - 1)]
    cold = order[:, -min(effort.width, order.shape[1]) :]
    best = _best_swaps(state, hot, cold, left)
    items = state.table[state.rows, hot]
    pull = ((state.unit[state.rows[:, None], items] ** 4) @ state.problem.weights) * (
        state.counts[state.rows[:, None], items] < state.table.shape[1]
    )
    hottest = items[state.rows, pull.argmax(1)]
    other = _best_copies(state, hottest, _victims(state, cold))
    other.gain_per_copy[left < 1] = -np.inf
    best.take(other.gain_per_copy > best.gain_per_copy, other)
    return best


def _gain(state: _State, delta: Floats) -> Floats:
    """Drop of the smooth maximum for a change of the summed heat [A, ...]."""
    shape = (-1, *(1,) * (delta.ndim - 1))
    heat = state.heat.mean(1).reshape(shape) + delta / state.heat.shape[1]
    result: Floats = state.balance.reshape(shape) - np.maximum(heat, 0.0) ** (
        1.0 / state.problem.power
    )
    return result


def _best_swaps(state: _State, hot: Ints, cold: Ints, left: Ints) -> _Best:
    """Best exchange between the hottest rank and the cold ones, by gain per copy."""
    problem, rows = state.problem, state.rows
    mine, theirs = state.table[rows, hot], state.table[rows[:, None], cold]  # [A,S] [A,C,S]
    pad = rows[:, None]
    diff = state.unit[pad, mine][:, :, None, None] - state.unit[pad[:, None], theirs][:, None]
    new_hot = (
        state.levels[rows, hot][:, None, None, None]
        - diff / problem.speeds[hot, None, None, None, None]
    )
    new_cold = (
        state.levels[pad, cold][:, None, :, None]
        + diff / problem.speeds[cold][:, None, :, None, None]
    )
    heat = raised(new_hot, problem.power)
    heat += raised(new_cold, problem.power)
    before = state.heat[rows, hot][:, None] + state.heat[pad, cold]
    delta = heat @ problem.weights - before[:, None, :, None]  # [A, S, C, S]
    gain = _gain(state, delta)
    if state.meetings is not None:
        gain = gain + _swap_meetings(state, state.meetings, hot, cold, mine, theirs)
    copies = 1 + (theirs >= 0)[:, None].astype(np.int64)
    blocked = state.held[pad[:, None], mine[:, :, None], cold[:, None]][..., None]
    blocked = blocked | state.held[pad[:, None], theirs, hot[:, None, None]][:, None]
    blocked = blocked | state.locked[rows, hot][:, :, None, None] | (mine < 0)[:, :, None, None]
    blocked = blocked | state.locked[pad, cold][:, None] | (cold == hot[:, None])[:, None, :, None]
    blocked = blocked | (copies > left[:, None, None, None])
    score = np.where(blocked, -np.inf, gain / copies)
    flat = score.reshape(len(rows), -1)
    at = flat.argmax(1)
    i, c, j = np.unravel_index(at, score.shape[1:])
    other = cold[rows, c]
    return _Best(
        gain_per_copy=flat[rows, at],
        first=np.stack([other, j, mine[rows, i]], axis=1),
        second=np.stack([hot, i, theirs[rows, c, j]], axis=1),
    )


def _swap_meetings(
    state: _State, meetings: _Meetings, hot: Ints, cold: Ints, mine: Ints, theirs: Ints
) -> Floats:
    """What swaps [A, S, C, S] bring in shared nodes; 0 inside a node."""
    pad = state.rows[:, None]
    home, away = state.problem.nodes[hot], state.problem.nodes[cold]
    goes = (
        meetings.arrive[pad[:, None], mine[..., None], away[:, None]]
        - meetings.leave[pad, mine, home[:, None]][..., None]
    )
    comes = (
        meetings.arrive[pad[:, None], theirs, home[:, None, None]]
        - meetings.leave[pad[:, None], theirs, away[..., None]]
    )
    both = meetings.pairs[pad[:, None, None], mine[:, :, None, None], theirs[:, None]]
    gain = goes[..., None] + comes[:, None] - 2.0 * both
    result: Floats = np.where((away == home[:, None])[:, None, :, None], 0.0, gain)
    return result


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Victims:
    """Slots [A, M] of the cold ranks that may take a copy, and what their expert leaving does.

    rise: load per copy gained on the expert's other ranks, [A, M, K]. harm: what that adds to the
    summed heat, to first order; inf where the expert has no other copy. level: of the slot's rank.
    """

    experts: Ints
    ranks: Ints
    slots: Ints
    rise: Floats
    harm: Floats
    level: Floats


def _victims(state: _State, cold: Ints) -> _Victims:
    problem, pad = state.problem, state.rows[:, None]
    width = state.table.shape[2]
    experts = state.table[pad, cold].reshape(len(state.rows), -1)
    ranks = np.repeat(cold, width, axis=1)
    slots = np.tile(np.arange(width), cold.shape[1])[None].repeat(len(state.rows), 0)
    allowed = (state.counts[pad, experts] > 1) | (experts < 0)
    allowed &= ~state.locked[pad, ranks, slots]
    fewer = state.padded[pad, experts] / np.maximum(state.counts[pad, experts] - 1, 1)[..., None]
    rise = fewer - state.unit[pad, experts]
    # d heat / d level, with a floor that keeps empty ranks finite
    slope = raised(state.levels, problem.power) / np.maximum(state.levels, 1e-12)
    slope *= problem.power * problem.weights
    others = (state.held[pad, experts] / problem.speeds) @ slope
    harm = (rise * others).sum(-1) - state.heat[pad, ranks]
    return _Victims(
        experts=experts,
        ranks=ranks,
        slots=slots,
        rise=rise,
        harm=np.where(allowed, harm, np.inf),
        level=state.levels[pad, ranks]
        - state.unit[pad, experts] / problem.speeds[ranks][..., None],
    )


def _best_copies(state: _State, expert: Ints, victims: _Victims) -> _Best:
    """Best slot of the cold ranks for one more copy of one expert per layer.

    All slots are ranked to first order (the victim's other ranks change by little); the best few
    are then computed exactly.
    """
    problem, rows, pad = state.problem, state.rows, state.rows[:, None]
    share = state.padded[rows, expert] / (state.counts[rows, expert] + 1)[:, None]  # [A, K]
    after = victims.level + share[:, None] / problem.speeds[victims.ranks][..., None]
    estimate = victims.harm + raised(after, problem.power) @ problem.weights
    taken = state.held[pad, expert[:, None], victims.ranks]
    estimate[taken | (expert < 0)[:, None]] = np.inf
    few = min(_EXACT_VICTIMS, estimate.shape[1])
    top = np.argpartition(estimate, few - 1, axis=1)[:, :few]
    ranks, others = victims.ranks[pad, top], victims.experts[pad, top]
    delta = _exact_copies(state, expert, share, others, ranks, victims.rise[pad, top])
    gain = _gain(state, delta)
    if state.meetings is not None:
        node = problem.nodes[ranks]
        gain = gain + state.meetings.arrive[pad, expert[:, None], node]
        gain = gain - state.meetings.leave[pad, others, node]
    gain = np.where(np.isfinite(estimate[pad, top]), gain, -np.inf)
    at = gain.argmax(1)
    return _Best(
        gain_per_copy=gain[rows, at],
        first=np.stack([ranks[rows, at], victims.slots[rows, top[rows, at]], expert], axis=1),
        second=np.full((len(rows), 3), -1),
    )


def _exact_copies(
    state: _State, expert: Ints, share: Floats, victims: Ints, ranks: Ints, rise: Floats
) -> Floats:
    """Change of the summed heat when ``expert`` takes a victim's slot: [A, M]."""
    problem, rows, pad = state.problem, state.rows, state.rows[:, None]
    relief = (share - state.unit[rows, expert])[:, None] * state.held[rows, expert][..., None]
    change = relief[:, None] + rise[:, :, None] * state.held[pad, victims][..., None]
    column = np.arange(victims.shape[1])
    change[pad, column, ranks] = share[:, None] - state.unit[pad, victims]
    levels = state.levels[:, None] + change / problem.speeds[:, None]
    heat = raised(levels, problem.power) @ problem.weights
    result: Floats = heat.sum(-1) - state.heat.sum(1)[:, None]
    return result


def _apply(state: _State, best: _Best, goes: NDArray[np.bool_]) -> Ints:
    """Writes the steps of the layers that go; experts copied by layer."""
    copies = np.zeros(len(state.rows), np.int64)
    layers = np.flatnonzero(goes)
    rank, slot, comes = best.first[layers].T
    leaves = state.table[layers, rank, slot]  # no other expert's loads change
    change = -state.carried(layers, comes) - state.carried(layers, leaves)
    pairs = [(best.first, layers), (best.second, layers[best.second[layers, 0] >= 0])]
    for writes, rows in pairs:  # first all that leaves, then all that comes
        rank, slot, _ = writes[rows].T
        old = state.table[rows, rank, slot]
        np.subtract.at(state.counts, (rows[old >= 0], old[old >= 0]), 1)
        state.held[rows, old, rank] = False
    for writes, rows in pairs:
        rank, slot, new = writes[rows].T
        state.table[rows, rank, slot] = new
        real = new >= 0
        np.add.at(state.counts, (rows[real], new[real]), 1)
        state.held[rows[real], new[real], rank[real]] = True
        copies[rows] += real
        if state.freeze:
            state.locked[rows, rank, slot] = True
    for experts in (comes, leaves):
        each = state.padded[layers, experts] / state.counts[layers, experts, None]
        state.unit[layers, experts] = each
        change += state.carried(layers, experts)
    state.levels[layers] += change / state.problem.speeds[:, None]
    power, weights = state.problem.power, state.problem.weights
    state.heat[layers] = raised(state.levels[layers], power) @ weights
    state.refresh()
    return copies
