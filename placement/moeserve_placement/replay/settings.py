"""What a replay is told: windows, batches, when to plan, with what budget, in which order."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from moeserve_placement.placement import PlacementError
from moeserve_placement.planners.base import Budget, Planner, get_planner

DEFAULT_BATCH = 2048
"""Tokens of a batch, and the least tokens of a window, unless given."""
ORDERS = ("recorded", "arrival", "shuffle", "domains", "drift", "holdout")
SEEDED_ORDERS = ("shuffle", "domains", "drift", "holdout")
STARTS = ("planned", "linear")
_MANY = 1 << 40
_RANGES = (
    ("interval", 0, _MANY),
    ("history", 1, _MANY),
    ("max_solved", 1, _MANY),
    ("token_bytes", 1, 1 << 30),  # times tokens and layers it stays within 64 bits
    ("seed", 0, 1 << 128),
    ("warmup", 1, _MANY),
    ("window", 1, _MANY),
)
"""(setting, least, most); a setting that is None has no value to check."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannerSpec:
    """A planner by name, with options. label: how it is called in results."""

    name: str
    options: Mapping[str, Any] = field(default_factory=dict)

    @property
    def label(self) -> str:
        """The name with its options, for instance 'scenario:split=batch'."""
        return ":".join([self.name, *(f"{key}={value}" for key, value in self.options.items())])

    def make(self) -> Planner:
        """A new planner.

        Raises:
            PlacementError: no such planner, or an option that it does not take.
        """
        return get_planner(self.name, **self.options)


@dataclass(frozen=True, slots=True, kw_only=True)
class BudgetSpec:
    """A budget per plan. label: how it is called in results."""

    label: str = "none"
    budget: Budget = field(default_factory=Budget)


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplaySettings:
    """How a trace is played.

    batch_sizes: tokens that run together in one step; every size is scored on the same windows.
    window: tokens between two observations of the load; None: the smallest multiple of the largest
    batch size with 2,048 tokens or more. Not used for traces of counts, which have windows.
    interval: windows between two plans; 0: plan once, after the warm-up.
    warmup: windows that are only observed; None: ``interval``, at least 1.
    history: recent windows that planners with one load vector average over.
    order: 'recorded'; 'arrival' (by arrival time); 'shuffle' (sequences in random order); 'domains'
    (one domain after the other); 'drift' (domains take turns gradually); 'holdout' (plan once on
    the first half of each domain, score on the second halves).
    seed: of the order. leave_out: a domain that 'holdout' keeps out of planning.
    start: 'planned' (the first plan starts from nothing, its copies are not counted) or 'linear'.
    batch_split: whether to score also with the shares solved for each batch.
    max_solved: batches per window and size that are solved for; more are sampled evenly.
    token_bytes: bytes of one token's hidden state on the wire.

    Raises:
        PlacementError: a value is out of range or does not go with another.
    """

    batch_sizes: tuple[int, ...] = (DEFAULT_BATCH,)
    window: int | None = None
    interval: int = 1
    warmup: int | None = None
    history: int = 16
    order: str = "recorded"
    seed: int = 0
    leave_out: str | None = None
    start: str = "planned"
    batch_split: bool = True
    max_solved: int = 32
    token_bytes: int = 4096

    def __post_init__(self) -> None:
        if not self.batch_sizes or min(self.batch_sizes) < 1:
            raise PlacementError(f"batch = {self.batch_sizes}: must be one or more sizes above 0")
        self._check_ranges()
        for name, known in (("order", ORDERS), ("start", STARTS)):
            if getattr(self, name) not in known:
                raise PlacementError(
                    f"{name} = {getattr(self, name)!r}: must be one of {', '.join(known)}"
                )
        if self.leave_out is not None and self.order != "holdout":
            raise PlacementError(
                f"leave_out = {self.leave_out!r}: goes with order = 'holdout' only"
            )
        for size in self.batch_sizes:
            if self.window_tokens % size:
                raise PlacementError(
                    f"batch = {size}: must divide the window, {self.window_tokens} tokens"
                )

    def _check_ranges(self) -> None:
        for name, least, most in _RANGES:
            value = getattr(self, name)
            if value is not None and value < least:
                raise PlacementError(f"{name} = {value}: must be at least {least}")
            if value is not None and value > most:
                raise PlacementError(f"{name} = {value}: must be at most {most}")

    @property
    def window_tokens(self) -> int:
        """Tokens of a window."""
        largest = max(self.batch_sizes)
        return self.window or largest * -(-DEFAULT_BATCH // largest)

    @property
    def main_batch(self) -> int:
        """The batch size that headlines and pictures show: 2,048 if there, else the largest."""
        return DEFAULT_BATCH if DEFAULT_BATCH in self.batch_sizes else max(self.batch_sizes)

    @property
    def warmup_windows(self) -> int:
        """Windows that are only observed (where the order does not say itself)."""
        return self.warmup if self.warmup is not None else max(self.interval, 1)


def check_seeds(seeds: tuple[int, ...], order: str) -> None:
    """Raises PlacementError where several seeds would all give the same result."""
    if not seeds or len(set(seeds)) != len(seeds):
        raise PlacementError(f"seeds = {seeds}: must be one or more, each once")
    if len(seeds) > 1 and order not in SEEDED_ORDERS:
        raise PlacementError(
            f"seeds = {seeds}: order = {order!r} is the same for every seed; "
            f"choose one of {', '.join(SEEDED_ORDERS)}"
        )
