"""Who decides on rank 0: watches the load, asks the planner, weighs its plan, orders the moves.

It is asked once per step what it has to say and never waits; one order at a time. Whatever goes
wrong ends in the audit log with a reason, and the placement in force stays.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from moeserve.control import news
from moeserve.control.audit import AuditLog, Entry, Layers, sentences
from moeserve.control.judge import CostModel, Window
from moeserve.control.pins import Pin, without_pinned
from moeserve.control.proposals import Ask, Proposal
from moeserve.control.report import LoadReport
from moeserve.control.splitting import split_from
from moeserve.control.targets import moves_between
from moeserve.experts.orders import Order, order_from_moves
from moeserve.experts.store import ExpertStore
from moeserve_placement import PLANNERS, Move, Placement

logger = logging.getLogger(__name__)

_POLL_S = 0.05  # while the planner thinks and no request is there


class Planner(Protocol):
    """Who makes plans, without ever making its caller wait: see ``PlannerClient``."""

    @property
    def is_free(self) -> bool:
        """Whether a question may be asked now."""
        ...

    def observe(self, counts: np.ndarray) -> None:
        """Takes a window of counts, int64 [num_layers, num_experts]."""
        ...

    def ask(self, ask: Ask) -> None:
        """Takes a question."""
        ...

    def poll(self) -> Proposal | None:
        """The answer, once; None: not yet."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Policy:
    """When the manager acts by itself.

    is_active: whether it does at all. planner: its name. window_tokens: tokens of a window of load.
    interval_s: least seconds between two plans. min_balancedness: the load is good enough from
    here. minute_bytes: what may be moved in a minute, None: any. is_dry_run: plans, but moves
    nothing. split: who picks among copies: "local" each rank for itself, "batch" all ranks together
    for each step, "auto" the latter for steps that are large enough. top_k: experts per token.
    costs: what a plan must be worth.
    """

    is_active: bool
    planner: str
    window_tokens: int
    interval_s: float
    min_balancedness: float
    minute_bytes: int | None
    is_dry_run: bool
    split: str
    top_k: int
    costs: CostModel


class Manager:
    """The placement manager.

    Args:
        policy: when it acts.
        store: rank 0's slots: where experts are, and how large they are.
        planner: who makes plans.
        clock: seconds, monotonic.
    """

    def __init__(
        self,
        policy: Policy,
        store: ExpertStore,
        planner: Planner,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.policy = policy
        self.log = AuditLog()
        self.is_frozen = False
        self.pins: set[Pin] = set()
        self.window: Window | None = None
        """The last whole window of load; None before the first."""
        self.num_bad_windows = 0
        self._store = store
        self._planner = planner
        self._clock = clock
        self._queue: deque[tuple[Entry, Sequence[Move]]] = deque()
        self._entry: Entry | None = None  # what is being planned or moved
        self._is_moving = False
        self._is_dry_run = False  # of the entry that is being planned
        self._cancels = False
        self._tokens = 0
        self._reported: LoadReport | None = None
        self._reported_s = clock()
        self._planned_s = -float("inf")
        self._judged: Entry | None = None  # done, and waiting for the window that tells
        self.split_from: int | None = 0 if policy.split == "batch" else None
        """Tokens of a step from which all ranks split it together; None: never."""
        self._split_said: int | None = None
        self._spent: deque[tuple[float, int]] = deque()  # bytes ordered in the last minute

    # What the controller asks and tells.

    @property
    def poll_s(self) -> float | None:
        """See ``Decider``."""
        return _POLL_S if self._entry is not None or self._queue else None

    def next_news(self) -> news.News | None:
        """See ``Decider``."""
        if self._cancels and self._is_moving:
            self._cancels = False
            return news.Cancel()
        if self._is_moving:
            return None
        if self._tokens >= self.policy.window_tokens:
            self._tokens = 0
            return news.CollectLoad()
        if self.split_from != self._split_said:
            self._split_said = self.split_from
            return news.SplitFrom(self.split_from)
        if self._entry is not None:
            proposal = self._planner.poll()
            return None if proposal is None else self._take(self._entry, proposal)
        if self._queue:
            entry, moves = self._queue.popleft()
            return self._order(entry, moves)
        if self._is_due():
            self._ask("load", self.policy.planner, is_dry_run=self.policy.is_dry_run)
        return None

    def took_step(self, num_tokens: int) -> None:
        """See ``Decider``."""
        self._tokens += num_tokens

    def took_load(self, load: LoadReport) -> None:
        """See ``Decider``. A window that can not be is dropped and counted."""
        now = self._clock()
        earlier, self._reported = self._reported, load
        seconds, self._reported_s = now - self._reported_s, now
        try:
            window = load.since(earlier)
        except ValueError as error:
            self.num_bad_windows += 1
            logger.warning("load window dropped: %s", error)
            return
        if not window.by_expert.any():
            return
        share = float(window.compute_s.max()) / seconds if seconds > 0 else 0.0
        self.window = Window(
            counts=window.by_expert, imbalance=window.imbalance, expert_share=min(share, 1.0)
        )
        self._planner.observe(window.by_expert)
        if self.policy.split == "auto":
            self._weigh_split(window)
        if self._judged is not None:
            self._judged.imbalance_measured = window.imbalance
            self._judged = None

    def flipped(self, num_groups: int, is_done: bool) -> None:
        """See ``Decider``."""
        if self._entry is None:
            return
        self._entry.num_groups_done += num_groups
        if is_done:
            self.log.close(self._entry, "done")
            logger.info("placement %d: done, %s", self._entry.id, self._entry.reason)
            self._judged = self._entry
            self._end()

    def failed(self, reason: str) -> None:
        """See ``Decider``. What took effect before is valid and stays."""
        if self._entry is not None and self._is_moving:
            self.log.close(self._entry, "failed", reason)
            logger.warning("placement %d: failed, %s", self._entry.id, reason)
            self._end()

    # What people ask for.

    def rebalance(self, planner: str | None = None, *, is_dry_run: bool = False) -> Entry:
        """Asks for a plan now; the entry tells how it goes.

        Raises:
            ValueError: another plan is in progress, or there is no such planner.
        """
        self._check_free()
        name = planner or self.policy.planner
        if name not in PLANNERS:
            known = ", ".join(sorted(PLANNERS))
            raise ValueError(f"planner = {name[:40]!r}: must be one of {known}")
        return self._ask("request", name, is_dry_run=is_dry_run)

    def place(self, placement: Placement, *, trigger: str = "request") -> Entry:
        """Moves everything to where ``placement`` has it.

        Raises:
            ValueError: another plan is in progress, or the placement does not fit the slots.
        """
        self._check_free()
        moves = moves_between(self._store.slot_map, placement, self._store.expert_bytes)
        entry = self._open(trigger, "none")
        entry.reason = f"{trigger}: the placement that was asked for"
        self._queue.append((entry, without_pinned(moves, self.pins, self._layers)))
        return entry

    def rollback(self, entry_id: int | None = None) -> Entry:
        """Goes back to the placement that was in force before an entry, by default the last one.

        Raises:
            ValueError: there is no such entry, or another plan is in progress.
        """
        done = [entry.id for entry in self.log if entry.num_groups_done]
        wanted = entry_id if entry_id is not None else next(iter(done), None)
        layers = None if wanted is None else self.log.placement(wanted)
        if layers is None:
            raise ValueError(f"id = {wanted}: there is no placement before that to go back to")
        placement = Placement(num_experts=self._store.slot_map.num_experts, layers=layers)
        entry = self.place(placement, trigger="rollback")
        entry.reason = f"rollback: what was in force before {wanted}"
        return entry

    def pin(self, layer: int, expert: int) -> None:
        """From now on no plan moves, adds or removes a copy of this expert.

        Raises:
            ValueError: there is no such layer or expert.
        """
        slot_map = self._store.slot_map
        if layer not in slot_map.layers:
            raise ValueError(f"layer = {layer}: must be one of {list(slot_map.layers)}")
        if not 0 <= expert < slot_map.num_experts:
            raise ValueError(f"expert = {expert}: must be in [0, {slot_map.num_experts})")
        self.pins.add((layer, expert))

    def unpin(self, layer: int, expert: int) -> None:
        """Undoes ``pin``; an expert that is not pinned is left as it is."""
        self.pins.discard((layer, expert))

    def cancel(self) -> None:
        """Stops the order in progress where it is."""
        self._cancels = self._is_moving

    # Inside.

    @property
    def _layers(self) -> Layers:
        return self._store.slot_map.layers

    def _weigh_split(self, window: LoadReport) -> None:
        """A new batch size for splitting, where it differs clearly from the one in force."""
        new, old = split_from(window, self._store.slot_map, self.policy.top_k), self.split_from
        if new is None or old is None or not old / 1.5 < new < 1.5 * old:
            self.split_from = new

    def _check_free(self) -> None:
        if self._entry is not None or self._queue:
            raise ValueError("another plan is in progress: wait for it or cancel it")

    def _is_due(self) -> bool:
        """Whether the manager wants a plan of its own accord."""
        policy = self.policy
        if not policy.is_active or self.is_frozen or self.window is None:
            return False
        if not self._planner.is_free or self._judged is not None:
            return False
        waited = self._clock() - self._planned_s >= policy.interval_s
        return waited and self.window.balancedness < policy.min_balancedness

    def _open(self, trigger: str, planner: str) -> Entry:
        entry = self.log.open(
            time=time.time(), trigger=trigger, planner=planner, layers=self._layers
        )
        if self.window is not None:
            entry.imbalance_before = self.window.imbalance
        return entry

    def _ask(self, trigger: str, planner: str, *, is_dry_run: bool) -> Entry:
        entry = self._entry = self._open(trigger, planner)
        self._planned_s = self._clock()
        self._is_dry_run = is_dry_run
        self._planner.ask(Ask(entry.id, planner, dict(self._layers), self._bytes_left()))
        return entry

    def _bytes_left(self) -> int | None:
        """What may still be moved in this minute."""
        if self.policy.minute_bytes is None:
            return None
        while self._spent and self._spent[0][0] < self._clock() - 60.0:
            self._spent.popleft()
        return max(0, self.policy.minute_bytes - sum(count for _, count in self._spent))

    def _take(self, entry: Entry, proposal: Proposal) -> news.News | None:
        """The planner's answer: an order, or the end of the entry."""
        if proposal.error is not None:
            logger.warning("placement %d: no plan, %s", entry.id, proposal.error)
            self._close(entry, "failed", proposal.error)
            return None
        moves = without_pinned(proposal.moves, self.pins, self._layers)
        entry.reason = proposal.reason
        entry.imbalance_predicted = proposal.after
        self._describe(entry, moves)
        if not moves:
            self._close(entry, "declined")
            return None
        if self.window is not None and entry.trigger == "load":
            verdict = self.policy.costs.judge(
                before=proposal.before,
                after=proposal.after,
                window=self.window,
                num_bytes=entry.num_bytes,
                num_groups=len(moves),
            )
            entry.seconds_saved = verdict.seconds_saved
            entry.seconds_spent = verdict.seconds_spent
            if verdict.reason is not None:
                self._close(entry, "declined", f"{proposal.reason}; {verdict.reason}")
                return None
        if self._is_dry_run:
            self._close(entry, "dry run")
            return None
        return self._order(entry, moves)

    def _describe(self, entry: Entry, moves: Sequence[Move]) -> None:
        entry.moves = sentences(moves)
        entry.num_groups = len(moves)
        entry.num_copies = sum(move.num_copies for move in moves)
        entry.num_bytes = entry.num_copies * self._store.expert_bytes

    def _order(self, entry: Entry, moves: Sequence[Move]) -> news.News | None:
        self._entry = entry
        self._describe(entry, moves)
        if not moves:
            self._close(entry, "done")
            return None
        try:
            order: Order = order_from_moves(entry.id, moves, self._store.slot_map)
        except ValueError as error:
            self._close(entry, "failed", str(error))
            return None
        entry.state = "moving"
        self._is_moving = True
        self._spent.append((self._clock(), entry.num_bytes))
        return news.Begin(order)

    def _close(self, entry: Entry, state: str, reason: str = "") -> None:
        self.log.close(entry, state, reason)
        self._end()

    def _end(self) -> None:
        self._entry = None
        self._is_moving = False
        self._cancels = False
