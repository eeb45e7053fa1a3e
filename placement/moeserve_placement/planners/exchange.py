"""Bounded exchange: what is in place stays, but for spare slots and a few swaps between rank pairs.

Written from the public description of SwiftBalancer (vllm-ascend): one copy of each expert keeps
its place, the spare slots are decided anew, then the fullest rank swaps one expert with an emptier
one while that helps by more than a threshold; each pair of ranks swaps at most once per plan, so
that no link carries more than one expert each way. One average load, even split.
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
    linear_table,
    register,
)
from moeserve_placement.planners.eplb import (
    Average,
    average_load,
    check_average,
    eplb_table,
    replica_counts,
)
from moeserve_placement.slot_table import FREE, Floats, Ints, is_complete, surviving
from moeserve_placement.topology import Topology


@register("exchange")
@dataclass(frozen=True, slots=True, kw_only=True)
class ExchangePlanner:
    """Bounded pairwise exchange from what is in place (from linear on a cold start).

    max_exchanges: swaps per layer and plan. threshold: least drop of the fullest rank, as a part of
    the mean rank load, for a swap to be done. average: as for ``eplb``.

    Raises:
        PlacementError: an option is out of range.
    """

    max_exchanges: int = 32
    threshold: float = 0.01
    average: Average = "recent"

    def __post_init__(self) -> None:
        check_integer("max_exchanges", self.max_exchanges, low=0)
        check_number("threshold", self.threshold, low=0)
        check_average(self.average)

    @property
    def name(self) -> str:
        """The name it is registered under."""
        return "exchange"

    def plan(
        self,
        history: LoadHistory,
        topology: Topology,
        *,
        current: Placement | None = None,
        budget: Budget = UNLIMITED,
    ) -> Plan:
        """The plan; layers that lost an expert are placed as by EPLB, layers without load stay."""
        load = average_load(history, self.average)
        topology.check_fits(history.num_experts)
        now = current_table(current, history, topology)
        base = np.repeat(linear_table(history.num_experts, topology)[None], len(load), 0)
        if now is not None:
            base = surviving(now, topology)
        target = base.copy()
        for row in range(len(load)):
            if not is_complete(base[row : row + 1], history.num_experts):
                target[row] = eplb_table(load[row : row + 1], topology)[0]
            elif history.busy_layers[row]:
                _respend(target[row], load[row], topology)
                _exchange(
                    target[row], load[row], topology, self.max_exchanges, threshold=self.threshold
                )
        return finished_plan(
            self.name,
            target,
            history,
            topology,
            current=current,
            budget=budget,
            reason=f"exchange: at most {self.max_exchanges} swaps a layer from what is in place",
        )


def _respend(table: Ints, load: Floats, topology: Topology) -> None:
    """Gives all slots but the first of each expert to the experts that need copies most."""
    usable = np.arange(table.shape[1]) < topology.usable_slots[:, None]
    cells = [(int(r), int(s)) for r, s in np.argwhere(usable)]
    seen: set[int] = set()
    spare = []
    for cell in cells:
        expert = int(table[cell])
        if expert < 0 or expert in seen:
            spare.append(cell)
        seen.add(expert)
    before = {cell: int(table[cell]) for cell in spare}
    for cell in spare:
        table[cell] = FREE
    counts = replica_counts(load[None], len(cells), most=int((topology.usable_slots > 0).sum()))[0]
    unit = np.append(load / counts, 0.0)
    for expert in np.argsort(-unit[:-1], kind="stable"):
        for _ in range(counts[expert] - 1):
            levels = unit[table].sum(1)
            options = [c for c in spare if table[c] < 0 and expert not in table[c[0]]]
            if not options:
                break
            cell = min(options, key=lambda c: (before[c] != expert, levels[c[0]]))
            table[cell] = expert


def _exchange(
    table: Ints, load: Floats, topology: Topology, limit: int, *, threshold: float
) -> None:
    """Swaps between the fullest rank and others, one per pair of ranks."""
    counts = np.bincount(table[table >= 0], minlength=len(load))
    unit = np.append(load / np.maximum(counts, 1), 0.0)
    alive = np.flatnonzero(topology.usable_slots)
    free_pair = np.zeros((len(table), len(table)), dtype=np.bool_)
    free_pair[np.ix_(alive, alive)] = True
    np.fill_diagonal(free_pair, False)
    held = np.zeros((len(load) + 1, len(table)), dtype=np.bool_)
    held[table, np.arange(len(table))[:, None]] = True
    held[-1] = False
    for _ in range(limit):
        levels = unit[table].sum(1)
        hot = int(alive[levels[alive].argmax()])
        diff = unit[table[hot]][:, None, None] - unit[table][None]  # [S, G, S]
        worst = np.maximum(levels[hot] - diff, levels[None, :, None] + diff)
        blocked = held[table[hot]][:, :, None] | held[table, hot][None]
        blocked = blocked | ~free_pair[hot][None, :, None] | (table[hot] < 0)[:, None, None]
        blocked = blocked | (table < 0)[None]
        worst = np.where(blocked, np.inf, worst)
        i, other, j = np.unravel_index(int(worst.argmin()), worst.shape)
        if levels[hot] - worst[i, other, j] <= threshold * levels[alive].mean():
            return
        mine, theirs = int(table[hot, i]), int(table[other, j])
        table[hot, i], table[other, j] = theirs, mine
        held[mine, hot] = held[theirs, other] = False
        held[mine, other] = held[theirs, hot] = True
        free_pair[hot, other] = free_pair[other, hot] = False
