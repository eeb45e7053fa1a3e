"""From a trace to the windows of a replay: their order, which are scored, which only observed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from moeserve_placement.placement import PlacementError
from moeserve_placement.replay.settings import ReplaySettings
from moeserve_placement.slot_table import Ints
from moeserve_placement.traces.trace import CountTrace, RoutingTrace, count_experts
from moeserve_placement.traces.windows import by_arrival

OTHER = "other"
"""The domain of sequences whose own domain is too small for a window in each half."""
UNLABELLED = "all"
_DRIFT_CYCLES = 2  # turns of every domain over a trace
_DRIFT_FOCUS = 0.8  # of a domain's sequences fall into its own turns


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Window:
    """Some tokens, or only their counts.

    counts: int64 [num_layers, num_experts]. topk_ids: [num_tokens, num_layers, top_k], None for a
    trace of counts. sequences: the sequence of each token, int64 [num_tokens], None likewise.
    label: the domain that most of its tokens are of, None if not known.
    """

    counts: Ints
    topk_ids: NDArray[np.integer] | None = None
    sequences: Ints | None = None
    label: str | None = None

    def batches(self, size: int) -> Ints:
        """Counts of consecutive batches: int64 [num_batches, num_layers, num_experts].

        A trace of counts has one batch, the window; so has a window shorter than ``size``.
        """
        if self.topk_ids is None or len(self.topk_ids) <= size:
            return self.counts[None]
        starts = range(0, len(self.topk_ids) - size + 1, size)
        experts = self.counts.shape[1]
        return np.stack([count_experts(self.topk_ids[s : s + size], experts) for s in starts])


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Schedule:
    """The windows in order; the first ``num_warmup`` are only observed. notes: what is left out."""

    windows: tuple[Window, ...]
    num_warmup: int
    layer_ids: tuple[int, ...]
    num_experts: int
    notes: tuple[str, ...] = ()

    @property
    def scored(self) -> tuple[Window, ...]:
        """The windows that are scored."""
        return self.windows[self.num_warmup :]


def make_schedule(trace: RoutingTrace | CountTrace, settings: ReplaySettings) -> Schedule:
    """The windows of a trace under these settings.

    Raises:
        PlacementError: too few windows, or an order that the trace has no labels or times for.
    """
    if isinstance(trace, CountTrace):
        return _count_schedule(trace, settings)
    if settings.order == "holdout":
        return _holdout(trace, settings)
    ordered = _ordered(trace, settings)
    windows = _windows(ordered, settings.window_tokens, whole_only=True)
    _check_number(len(windows), settings, f"{trace.num_tokens:,} tokens give")
    return _schedule(trace, windows, settings.warmup_windows)


def _schedule(
    trace: RoutingTrace | CountTrace,
    windows: Sequence[Window],
    num_warmup: int,
    notes: Sequence[str] = (),
) -> Schedule:
    return Schedule(
        windows=tuple(windows),
        num_warmup=num_warmup,
        layer_ids=trace.layer_ids,
        num_experts=trace.num_experts,
        notes=tuple(notes),
    )


def _check_number(found: int, settings: ReplaySettings, what: str) -> None:
    needed = settings.warmup_windows + 1
    if found < needed:
        raise PlacementError(
            f"trace: {what} {found} windows of {settings.window_tokens:,} tokens, must be at least "
            f"{needed} (warmup = {settings.warmup_windows} and one to score); "
            "choose a smaller window"
        )


def all_windows(
    trace: RoutingTrace | CountTrace, window_tokens: int, *, mixed: bool = False
) -> list[Window]:
    """Every token of a trace in windows, in recorded order; the last may be shorter.

    mixed: in a random order, the same every time: as a sample of what may come at any time.

    Raises:
        PlacementError: window_tokens is below 1.
    """
    if window_tokens < 1:
        raise PlacementError(f"window = {window_tokens}: must be at least 1")
    if isinstance(trace, CountTrace):
        windows = [Window(counts=counts) for counts in trace.counts]
    else:
        windows = _windows(trace, window_tokens, whole_only=False)
    if not mixed:
        return windows
    return [windows[index] for index in np.random.default_rng(0).permutation(len(windows))]


def _count_schedule(trace: CountTrace, settings: ReplaySettings) -> Schedule:
    if settings.order != "recorded":
        raise PlacementError(
            f"order = {settings.order!r}: a trace of counts has no sequences, must be 'recorded'"
        )
    windows = [Window(counts=counts) for counts in trace.counts]
    needed = settings.warmup_windows + 1
    if len(windows) < needed:
        raise PlacementError(
            f"trace: has {len(windows)} windows of counts, must have at least {needed} "
            f"(warmup = {settings.warmup_windows} and one to score)"
        )
    return _schedule(trace, windows, settings.warmup_windows)


def _ordered(trace: RoutingTrace, settings: ReplaySettings) -> RoutingTrace:
    if settings.order == "recorded":
        return trace
    if settings.order == "arrival":
        return by_arrival(trace)
    rng = np.random.default_rng(settings.seed)
    if settings.order == "shuffle":
        return trace.sequences(rng.permutation(trace.num_sequences))
    domain, _ = _domains(trace, settings.order)
    turn = rng.permutation(int(domain.max()) + 1)[domain]
    if settings.order == "domains":
        return trace.sequences(np.lexsort((rng.random(trace.num_sequences), turn)))
    return trace.sequences(np.argsort(_drift_times(turn, rng), kind="stable"))


def _domains(trace: RoutingTrace, order: str) -> tuple[Ints, list[str]]:
    """The domain of each sequence, int64 [num_sequences], and the names."""
    if trace.labels is None:
        raise PlacementError(f"order = {order!r}: needs a trace whose sequences have labels")
    names, domain = np.unique(np.array(trace.labels, dtype=object), return_inverse=True)
    return domain.astype(np.int64), [str(name) for name in names.tolist()]


def _drift_times(turn: Ints, rng: np.random.Generator) -> NDArray[np.float64]:
    """A time for each sequence: mostly near the turns of its domain, which come round again."""
    count = len(turn)
    num_turns = int(turn.max()) + 1
    spread = rng.triangular(-1, 0, 1, count)  # a turn fades in and out over its neighbours
    focused = (turn + 0.5 + spread) / num_turns % 1.0
    place = np.where(rng.random(count) < _DRIFT_FOCUS, focused, rng.random(count))
    return place + rng.integers(0, _DRIFT_CYCLES, count)


def _windows(trace: RoutingTrace, size: int, *, whole_only: bool) -> list[Window]:
    """Consecutive windows. whole_only: without a shorter one at the end."""
    owner = np.repeat(np.arange(trace.num_sequences), trace.sequence_lengths)
    names: list[str] = []
    domain = np.zeros(trace.num_sequences, dtype=np.int64)
    if trace.labels is not None:
        domain, names = _domains(trace, "recorded")
    windows = []
    for start in range(0, trace.num_tokens, size):
        stop = min(start + size, trace.num_tokens)
        if whole_only and stop - start < size:
            break
        label = None
        if names:
            label = names[int(np.bincount(domain[owner[start:stop]]).argmax())]
        windows.append(
            Window(
                counts=trace.counts(start, stop),
                topk_ids=trace.topk_ids[start:stop],
                sequences=owner[start:stop],
                label=label,
            )
        )
    return windows


def _holdout(trace: RoutingTrace, settings: ReplaySettings) -> Schedule:
    """First half of each domain to plan on, second halves to score, one domain after the other."""
    size = settings.window_tokens
    trace = _pooled(trace, size)
    domain, names = _domains(trace, "holdout")
    if settings.leave_out is not None and settings.leave_out not in names:
        raise PlacementError(
            f"leave_out = {settings.leave_out!r}: must be one of {', '.join(names)[:200]}"
        )
    rng = np.random.default_rng(settings.seed)
    planned: list[list[Window]] = []
    scored: list[Window] = []
    notes: list[str] = []
    for index, name in enumerate(names):
        members = np.flatnonzero(domain == index)
        if settings.seed:  # seed 0 halves the recorded order
            members = rng.permutation(members)
        first, second = _halves(members, trace.sequence_lengths)
        if name != settings.leave_out and len(first):
            planned.append(_windows(trace.sequences(first), size, whole_only=False))
        found = _windows(trace.sequences(second), size, whole_only=True) if len(second) else []
        if not found:
            notes.append(f"domain {name!r}: its second half has no whole window, it is not scored")
        scored += found
    if not planned or not scored:
        raise PlacementError(
            f"trace: no domain has {size:,} tokens in its second half, choose a smaller window"
        )
    dealt = _dealt(planned)
    return _schedule(trace, dealt + scored, len(dealt), notes)


def _dealt(piles: list[list[Window]]) -> list[Window]:
    """One window of each domain in turn, so that a planner sees that the domains come back."""
    most = max(len(pile) for pile in piles)
    return [pile[index] for index in range(most) for pile in piles if index < len(pile)]


def _halves(members: Ints, lengths: Ints) -> tuple[Ints, Ints]:
    """Sequences up to half of the tokens, and the rest."""
    ends = np.cumsum(lengths[members])
    half = int(np.searchsorted(ends, ends[-1] / 2, side="right"))
    return members[:half], members[half:]


def _pooled(trace: RoutingTrace, size: int) -> RoutingTrace:
    """The trace with domains too small for a window in each half put together as one."""
    if trace.labels is None:
        return replace(trace, labels=(UNLABELLED,) * trace.num_sequences)
    domain, names = _domains(trace, "holdout")
    tokens = np.bincount(domain, weights=trace.sequence_lengths)
    small = tokens < 2 * size
    pooled = tuple(OTHER if small[d] else names[d] for d in domain.tolist())
    return replace(trace, labels=pooled)
