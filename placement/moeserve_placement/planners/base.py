"""What every planner is: a name and ``plan``; and how a planner is found by name."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from moeserve_placement.checks import check_integer
from moeserve_placement.load import LoadHistory
from moeserve_placement.moves import layer_moves, num_copies
from moeserve_placement.objective import Objective
from moeserve_placement.placement import Placement, PlacementError
from moeserve_placement.plan import Move, Plan
from moeserve_placement.planners.repair import repaired
from moeserve_placement.slot_table import (
    FREE,
    Ints,
    aligned,
    copy_counts,
    is_complete,
    slot_table,
    surviving,
    to_placement,
)
from moeserve_placement.topology import Topology


@dataclass(frozen=True, slots=True, kw_only=True)
class Budget:
    """What a plan may copy, over all layers.

    max_bytes: bytes. max_copies: experts. None: no limit. Outside the budget are the copies that
    bring experts back whose last copy went with a rank: one for each of them.

    Raises:
        PlacementError: a limit is not an integer of at least 0.
    """

    max_bytes: int | None = None
    max_copies: int | None = None

    def __post_init__(self) -> None:
        for name in ("max_bytes", "max_copies"):
            if getattr(self, name) is not None:
                check_integer(name, getattr(self, name), low=0)

    def copies(self, topology: Topology) -> float:
        """Experts that may be copied: a whole number, or infinity."""
        limits = [float("inf")]
        if self.max_copies is not None:
            limits.append(self.max_copies)
        if self.max_bytes is not None:
            limits.append(self.max_bytes // topology.bytes_per_expert)
        return min(limits)


UNLIMITED = Budget()


class Planner(Protocol):
    """Proposes placements."""

    @property
    def name(self) -> str:
        """How it was asked for."""
        ...

    def plan(
        self,
        history: LoadHistory,
        topology: Topology,
        *,
        current: Placement | None = None,
        budget: Budget = UNLIMITED,
    ) -> Plan:
        """A plan for the load seen so far.

        current: what is in place; None for a cold start. What was on a rank that is gone counts as
        lost. budget: limit for copies, binding only when there is a ``current`` to stay with.

        Raises:
            PlacementError: the experts do not fit, or ``current`` does not fit the topology.
        """
        ...


PLANNERS: dict[str, Callable[..., Planner]] = {}
"""Planner name -> factory; its keyword arguments are the planner's options."""


def register(name: str) -> Callable[[Callable[..., Planner]], Callable[..., Planner]]:
    """Decorator that makes a planner class known under ``name``."""

    def add(factory: Callable[..., Planner]) -> Callable[..., Planner]:
        PLANNERS[name] = factory
        return factory

    return add


def get_planner(name: str, **options: Any) -> Planner:
    """The planner of that name.

    Raises:
        PlacementError: no such planner, or it does not take one of the options or its value.
    """
    if name not in PLANNERS:
        raise PlacementError(f"planner = {name!r}: must be one of {', '.join(sorted(PLANNERS))}")
    known = inspect.signature(PLANNERS[name]).parameters
    unknown = sorted(set(options) - set(known))
    if unknown:
        choice = ", ".join(known) or "none"
        raise PlacementError(f"planner {name!r}: no option {unknown[0]!r}, it takes {choice}")
    return PLANNERS[name](**options)


def current_table(
    current: Placement | None, history: LoadHistory, topology: Topology
) -> Ints | None:
    """The current table, with what ranks that are gone held; None for a cold start.

    Raises:
        PlacementError: it is of another number of experts, or does not fit the topology.
    """
    if current is None:
        return None
    if current.num_experts != history.num_experts:
        raise PlacementError(
            f"current placement: has {current.num_experts} experts, the history has "
            f"{history.num_experts}"
        )
    return slot_table(current, history.layer_ids, topology=topology)


def keep_idle_layers(
    target: Ints, history: LoadHistory, topology: Topology, *, current: Placement | None
) -> Ints:
    """``target``, but as now (or linear) in layers without any load: there is nothing to plan for.

    What is in place is kept only where it is still complete.
    """
    idle = ~history.busy_layers
    now = current_table(current, history, topology)
    here = None if now is None else surviving(now, topology)
    result = target.copy()
    for row in np.flatnonzero(idle):
        if here is not None and is_complete(here[row : row + 1], history.num_experts):
            result[row] = here[row]
        elif here is None:
            result[row] = linear_table(history.num_experts, topology)
    return result


def linear_table(num_experts: int, topology: Topology) -> Ints:
    """Consecutive experts per rank, spread as evenly as the slots allow: [num_ranks, max_slots].

    Raises:
        PlacementError: the experts do not fit.
    """
    topology.check_fits(num_experts)
    usable = topology.usable_slots
    levels = range(1, topology.max_slots + 1)
    level = next(k for k in levels if usable.clip(max=k).sum() >= num_experts)
    take = usable.clip(max=level)
    for rank in np.flatnonzero(take == level)[::-1][: take.sum() - num_experts]:
        take[rank] -= 1  # the first ranks keep one more where it does not divide
    table = np.full((topology.num_ranks, topology.max_slots), FREE, dtype=np.int64)
    start = 0
    for rank, count in enumerate(take):
        table[rank, :count] = np.arange(start, start + count)
        start += int(count)
    return table


def finished_plan(
    name: str,
    target: Ints,
    history: LoadHistory,
    topology: Topology,
    *,
    current: Placement | None,
    budget: Budget,
    reason: str,
    objective: Objective | None = None,
) -> Plan:
    """The plan that leads to ``target``, or one that copies no more than it must.

    Used by planners that make whole placements. A budget they can not keep means no move at all,
    but for lost experts, which come back whatever the budget.
    """
    objective = objective or Objective()
    scenarios = None if history.is_empty else history.scenarios()
    now = current_table(current, history, topology)
    here, before = None, None
    moves: tuple[Move, ...] = ()
    if now is not None:
        here = surviving(now, topology)
        before = to_placement(
            now, history.layer_ids, num_experts=history.num_experts, topology=topology
        )
        target, reason = _within_budget(
            target, here, history, topology, budget=budget, reason=reason
        )
        moves = _ordered_moves(now, target, history, topology)
    return Plan(
        planner=name,
        layer_ids=history.layer_ids,
        placement=to_placement(
            target, history.layer_ids, num_experts=history.num_experts, topology=topology
        ),
        reason=reason,
        current=before,
        moves=moves,
        before=None if here is None else objective.forecast(here, scenarios, history, topology),
        after=objective.forecast(target, scenarios, history, topology),
    )


def _within_budget(
    target: Ints,
    here: Ints,
    history: LoadHistory,
    topology: Topology,
    *,
    budget: Budget,
    reason: str,
) -> tuple[Ints, str]:
    """``target`` aligned to what survives and its reason; or the least change, and why that."""
    target = aligned(target, here, topology=topology)
    least = repaired(here, history.mean, topology)
    lost = int(num_copies(here, least).sum())
    copies = int(num_copies(here, target).sum())
    allowed = budget.copies(topology)
    if copies - lost <= allowed:
        return target, reason
    too_many = f"the plan needs {copies} copies, the budget allows {allowed:.0f}"
    if not lost:
        return here, f"stay: {too_many}"
    return least, f"only lost experts come back, {lost} in all: {too_many} beside them"


def _ordered_moves(
    now: Ints, target: Ints, history: LoadHistory, topology: Topology
) -> tuple[Move, ...]:
    """The moves of all layers, those that lost an expert first."""
    lost = (copy_counts(surviving(now, topology), history.num_experts) == 0).any(1)
    return tuple(
        move
        for row in np.argsort(~lost, kind="stable")
        for move in layer_moves(history.layer_ids[row], now[row], target[row], topology=topology)
    )
