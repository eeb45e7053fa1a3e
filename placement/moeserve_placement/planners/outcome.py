"""From the tables that the scenario planner chose to a plan: ordered moves, forecasts, a reason."""

from __future__ import annotations

import heapq

import numpy as np

from moeserve_placement.load import LoadHistory, Scenarios
from moeserve_placement.moves import layer_moves, slot_write
from moeserve_placement.objective import Objective
from moeserve_placement.placement import Placement
from moeserve_placement.plan import Forecast, Move, Plan
from moeserve_placement.planners.draft import Draft
from moeserve_placement.planners.problem import Step
from moeserve_placement.slot_table import Floats, Ints, surviving, to_placement
from moeserve_placement.topology import Topology


def ordered_moves(now: Ints, choice: Draft, history: LoadHistory, topology: Topology) -> list[Move]:
    """All moves: lost experts first, then by gain per byte, slots of ranks that are gone last.

    now: the table with what ranks that are gone held. A layer's moves keep their order.
    """
    queues = [
        _layer_queue(layer, row, now, choice, topology)
        for row, layer in enumerate(history.layer_ids)
    ]
    heap = [(_urgency(queue[0]), row, 0) for row, queue in enumerate(queues) if queue]
    heapq.heapify(heap)
    moves: list[Move] = []
    while heap:
        _, row, index = heapq.heappop(heap)
        moves.append(queues[row][index])
        if index + 1 < len(queues[row]):
            heapq.heappush(heap, (_urgency(queues[row][index + 1]), row, index + 1))
    return moves


def _urgency(move: Move) -> float:
    """Smaller goes first."""
    if move.gain is None:
        return -np.inf if move.num_copies else np.inf
    return -move.gain / max(move.num_bytes, 1)


def _layer_queue(layer: int, row: int, now: Ints, choice: Draft, topology: Topology) -> list[Move]:
    """One layer's moves in order."""
    table = now[row].copy()
    moves: list[Move] = []
    here = surviving(now[row : row + 1], topology)[0]
    if choice.jumps[row] is not None:
        cells = [(int(r), int(s)) for r, s in np.argwhere(choice.table[row] != here)]
        writes = tuple(slot_write(c, int(choice.table[row][c]), table, topology) for c in cells)
        # with an expert nowhere the layer had no value that a gain could be told from
        lost = bool((choice.base[row] != here).any())
        gain = None if lost else float(choice.before[row] - choice.value[row])
        moves.append(Move(layer=layer, writes=writes, gain=gain))
        for cell in cells:
            table[cell] = choice.table[row][cell]
    else:
        for cell in [(int(r), int(s)) for r, s in np.argwhere(choice.base[row] != here)]:
            write = slot_write(cell, int(choice.base[row][cell]), table, topology)
            moves.append(Move(layer=layer, writes=(write,)))
            table[cell] = choice.base[row][cell]
        moves.extend(_step_moves(layer, table, choice.steps[row], topology))
    if not all(topology.alive):
        gone = np.where(np.asarray(topology.alive)[:, None], table, -1)
        moves.extend(layer_moves(layer, table, gone, topology=topology))
    return moves


def _step_moves(layer: int, table: Ints, steps: list[Step], topology: Topology) -> list[Move]:
    moves = []
    for step in steps:
        writes = tuple(
            slot_write((rank, slot), expert, table, topology) for rank, slot, expert in step.writes
        )
        moves.append(Move(layer=layer, writes=writes, gain=step.gain))
        for rank, slot, expert in step.writes:
            table[rank, slot] = expert
    return moves


def cold_plan(
    name: str,
    table: Ints,
    sources: list[str],
    *,
    objective: Objective,
    scenarios: Scenarios,
    history: LoadHistory,
    topology: Topology,
) -> Plan:
    """The plan of a cold start; ``sources``: the candidate that each layer took."""
    after = objective.forecast(table, scenarios, history, topology)
    assert after is not None
    used = ", ".join(f"{sources.count(kind)} layers {kind}" for kind in sorted(set(sources)))
    return Plan(
        planner=name,
        layer_ids=history.layer_ids,
        placement=_placement(table, history, topology),
        reason=(
            f"cold start for {len(scenarios.names)} scenarios ({used}): predicted imbalance "
            f"{after.mean:.3f}, {after.worst:.3f} in the worst scenario"
        ),
        split=objective.split,
        shares=_shares(table, objective, scenarios, topology),
        after=after,
    )


def moving_plan(
    name: str,
    current: Placement | None,
    now: Ints,
    choice: Draft,
    *,
    objective: Objective,
    scenarios: Scenarios,
    history: LoadHistory,
    topology: Topology,
) -> Plan:
    """The plan that leads from ``current``, whose table is ``now``, to the chosen tables."""
    here = surviving(now, topology)
    before = objective.forecast(here, scenarios, history, topology)
    after = objective.forecast(choice.table, scenarios, history, topology)
    assert after is not None
    moves = tuple(ordered_moves(now, choice, history, topology))
    return Plan(
        planner=name,
        layer_ids=history.layer_ids,
        placement=_placement(choice.table, history, topology),
        reason=_reason(moves, before, after, choice),
        current=fitted(current, now, history, topology),
        moves=moves,
        split=objective.split,
        shares=_shares(choice.table, objective, scenarios, topology),
        before=before,
        after=after,
    )


def _reason(
    moves: tuple[Move, ...], before: Forecast | None, after: Forecast, choice: Draft
) -> str:
    number = sum(move.num_copies for move in moves)
    copies = _copies(number)
    if before is None:
        brings = "brings" if number == 1 else "bring"
        return (
            f"experts were lost with their ranks: {copies} {brings} every expert back, "
            f"predicted imbalance {after.mean:.3f}"
        )
    if not number:
        return (
            f"stay: {_why_stay(choice)}, at a predicted imbalance of {before.mean:.3f} "
            f"({before.worst:.3f} in the worst scenario)"
        )
    changed = len({move.layer for move in moves if move.num_copies})
    return (
        f"{copies} in {changed} of {len(choice.before)} layers: predicted imbalance "
        f"{before.mean:.3f} -> {after.mean:.3f}, in the worst scenario "
        f"{before.worst:.3f} -> {after.worst:.3f}"
    )


def _why_stay(choice: Draft) -> str:
    if np.isinf(choice.budget):
        return "no change of any layer gains more than its copies cost"
    budget = f"the budget of {_copies(choice.budget)}"
    if choice.is_bound:
        return f"there are changes that would pay, but {budget} allows none of them"
    return f"no change of any layer within {budget} gains more than its copies cost"


def _copies(number: float) -> str:
    return f"{number:.0f} {'copy' if number == 1 else 'copies'}"


def fitted(
    current: Placement | None, now: Ints, history: LoadHistory, topology: Topology
) -> Placement:
    """``current`` with the layers of the history and the slots of the topology."""
    if current is not None and tuple(current.layers) == history.layer_ids:
        sizes = {tuple(len(slots) for slots in ranks) for ranks in current.layers.values()}
        if sizes == {topology.slots_per_rank}:
            return current
    return _placement(now, history, topology)


def _placement(table: Ints, history: LoadHistory, topology: Topology) -> Placement:
    return to_placement(
        table, history.layer_ids, num_experts=history.num_experts, topology=topology
    )


def _shares(
    table: Ints, objective: Objective, scenarios: Scenarios, topology: Topology
) -> Floats | None:
    if objective.split != "planned":
        return None
    return objective.shares(table, scenarios, topology)
