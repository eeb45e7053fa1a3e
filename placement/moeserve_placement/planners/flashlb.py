"""FlashLB-style planning: mean over time stages of max/mean, copies and placement chosen together.

Written from the public description of FlashLB (vllm-ascend): the recent windows are stages; several
divisions of the spare slots are tried; each is placed by list scheduling over all stages at once;
layers that are balanced well enough are left alone. Even split.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from moeserve_placement.checks import check_integer, check_number
from moeserve_placement.load import LoadHistory
from moeserve_placement.placement import Placement
from moeserve_placement.plan import Plan
from moeserve_placement.planners.base import (
    UNLIMITED,
    Budget,
    current_table,
    finished_plan,
    keep_idle_layers,
    register,
)
from moeserve_placement.planners.eplb import heaviest_first, replica_counts
from moeserve_placement.slot_table import (
    FREE,
    Floats,
    Ints,
    imbalance,
    is_complete,
    rank_loads,
    surviving,
)
from moeserve_placement.topology import Topology


@register("flashlb")
@dataclass(frozen=True, slots=True, kw_only=True)
class FlashLbPlanner:
    """Multi-stage planner.

    stages: time stages that the recent windows are summed into. divisions: ways to divide the spare
    slots between hot experts and the rest that are tried. gate: a layer is planned anew only if its
    mean max/mean is above this.

    Raises:
        PlacementError: an option is out of range.
    """

    stages: int = 8
    divisions: int = 9
    gate: float = 1.15

    def __post_init__(self) -> None:
        check_integer("stages", self.stages, low=1)
        check_integer("divisions", self.divisions, low=1)
        check_number("gate", self.gate, low=1)

    @property
    def name(self) -> str:
        """The name it is registered under."""
        return "flashlb"

    def plan(
        self,
        history: LoadHistory,
        topology: Topology,
        *,
        current: Placement | None = None,
        budget: Budget = UNLIMITED,
    ) -> Plan:
        """The plan for the stages; layers below the gate or without load stay."""
        topology.check_fits(history.num_experts)
        loads = _stages(history, self.stages)
        target = flashlb_table(loads, topology, divisions=self.divisions)
        target = keep_idle_layers(target, history, topology, current=current)
        now = current_table(current, history, topology)
        if now is not None:
            here = surviving(now, topology)
            for row in range(len(here)):
                part = here[row : row + 1]
                if is_complete(part, history.num_experts):
                    value = _score(loads[:, row : row + 1], part, topology)[0]
                    target[row] = here[row] if value <= self.gate else target[row]
        return finished_plan(
            self.name,
            target,
            history,
            topology,
            current=current,
            budget=budget,
            reason=f"flashlb: packed for {len(loads)} time stages",
        )


def flashlb_table(loads: Floats, topology: Topology, *, divisions: int) -> Ints:
    """Tables [num_layers, num_ranks, max_slots] for stages [num_stages, num_layers, num_experts].

    The best of several divisions of the spare slots by the mean over stages of max/mean.
    """
    total = loads.sum(0)
    alive = np.flatnonzero(topology.alive)
    room = topology.usable_slots[alive]
    spare = int(room.sum()) - total.shape[1]
    best = np.zeros((len(total), topology.num_ranks, topology.max_slots), np.int64)
    value = np.full(len(total), np.inf)
    tried = min(divisions, spare + 1)  # there are no more
    for hot in np.unique(np.linspace(0, spare, tried).round().astype(int)):
        counts = _divided(total, hot, spare - hot, most=int((room > 0).sum()))
        placed = _place_stages(loads, counts, room)
        table = np.full_like(best, FREE)
        table[:, alive, : placed.shape[2]] = placed
        found = _score(loads, table, topology)
        better = found < value
        best[better], value[better] = table[better], found[better]
    return best


def _stages(history: LoadHistory, stages: int) -> Floats:
    """Recent windows summed into consecutive stages: [<= stages, num_layers, num_experts]."""
    recent = history.recent
    if not len(recent):
        return np.zeros((1, *history.shape))
    parts = np.array_split(recent, min(stages, len(recent)))
    return np.stack([part.sum(0) for part in parts])


def _score(loads: Floats, table: Ints, topology: Topology) -> Floats:
    alive = np.flatnonzero(topology.alive)
    result: Floats = imbalance(rank_loads(loads, table)[..., alive]).mean(0)
    return result


def _divided(total: Floats, hot: int, rest: int, *, most: int) -> Ints:
    """Copies: ``hot`` spare slots to the largest load per copy, then one each to single experts."""
    experts = total.shape[1]
    counts = replica_counts(total, experts + hot, most=most)
    singles = np.where(counts == 1, total, -1.0)
    order = np.argsort(-singles, axis=1, kind="stable")
    for row in range(len(total)):
        chosen = order[row, : min(rest, int((counts[row] == 1).sum()))]
        if most > 1:
            counts[row, chosen] += 1
    return counts


def _place_stages(loads: Floats, counts: Ints, room: Ints) -> Ints:
    """Heaviest copy first to the rank that keeps the sum over stages of the largest load least."""
    stages, layers, experts = loads.shape
    mean = np.maximum(loads.mean(-1, keepdims=True), 1e-300)
    unit = np.moveaxis(loads / mean, 0, -1) / np.maximum(counts, 1)[..., None]  # [L, E, T]
    table = np.full((layers, len(room), int(room.max())), FREE, dtype=np.int64)
    levels = np.zeros((layers, len(room), stages))
    used = np.zeros((layers, len(room)), np.int64)
    held = np.zeros((layers, experts, len(room)), np.bool_)
    rows = np.arange(layers)
    for expert in heaviest_first(unit.sum(-1), counts).T:
        row, item = rows[expert >= 0], expert[expert >= 0]
        after = levels[row] + unit[row, item][:, None]
        top = np.maximum(after, levels[row].max(1, keepdims=True)).sum(-1)
        cost = top + 1e-6 * after.sum(-1)  # of ranks that keep the maximum, the emptiest
        blocked = (used[row] >= room) | held[row, item]
        rank = np.where(blocked, np.inf, cost).argmin(1)
        fits = ~blocked[np.arange(len(row)), rank]
        row, item, rank = row[fits], item[fits], rank[fits]
        table[row, rank, used[row, rank]] = item
        used[row, rank] += 1
        levels[row, rank] += unit[row, item]
        held[row, item, rank] = True
    return table
