"""From snapshots of /experts/load to numbers: how even the load was, and what unevenness cost.

Ranks answer between steps, each for itself, so snapshots of two ranks may be a step apart; whatever
is compared between ranks is therefore taken per step of each rank.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from moeserve.model.layers.forced_router import ForcedRouting
from moeserve_placement.traces.synth import linear_ranks

_MIN_STEPS = 6  # of a window: a step more or less on one rank must not matter much


class SkewError(RuntimeError):
    """The load was not what was asked for, so the figures mean nothing; the text says how far."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Sample:
    """A snapshot. counts: [num_layers, num_experts], choices by logical expert; pairs: [num_ranks,
    num_layers], computed by each rank; routed: [num_ranks], pairs that its own requests caused;
    compute_s, steps: [num_ranks]. All since the server started."""

    time_s: float
    counts: np.ndarray
    pairs: np.ndarray
    routed: np.ndarray
    compute_s: np.ndarray
    steps: np.ndarray

    @classmethod
    def parse(cls, time_s: float, answer: dict[str, Any]) -> Sample:
        """From what GET /experts/load answers."""
        ranks = answer["ranks"]
        return cls(
            time_s=time_s,
            counts=np.array(list(answer["layers"].values())),
            pairs=np.array([rank["pairs"] for rank in ranks]),
            routed=np.array([rank["routed"] for rank in ranks]),
            compute_s=np.array([rank["compute_s"] for rank in ranks]),
            steps=np.array([rank["steps"] for rank in ranks]),
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class Window:
    """What happened between two snapshots; fields as in ``Sample``, pairs and compute_s scaled to
    the same number of steps on every rank. first, last: the steps before it and at its end."""

    time_s: float
    first: int
    last: int
    steps: float
    counts: np.ndarray
    pairs: np.ndarray
    routed: np.ndarray
    compute_s: np.ndarray

    @property
    def lost_s(self) -> float:
        """Seconds that the mean rank waited for the slowest one's experts. A lower bound: within
        the window ranks may have taken turns at being slow."""
        return float(self.compute_s.max() - self.compute_s.mean())


def windows(samples: Sequence[Sample]) -> list[Window]:
    """Windows between successive snapshots, those without enough steps joined to the next."""
    found = []
    start = samples[0]
    for sample in samples[1:]:
        if (sample.steps - start.steps).min() >= _MIN_STEPS:
            found.append(_between(start, sample))
            start = sample
    return found


def _between(start: Sample, end: Sample) -> Window:
    steps = end.steps - start.steps
    scale = steps.mean() / steps
    return Window(
        time_s=end.time_s,
        first=int(start.steps.min()),
        last=int(end.steps.max()),
        steps=float(steps.mean()),
        counts=end.counts - start.counts,
        pairs=(end.pairs - start.pairs) * scale[:, None],
        routed=(end.routed - start.routed) * scale,
        compute_s=(end.compute_s - start.compute_s) * scale,
    )


def balancedness(load: np.ndarray) -> float:
    """1 / mean over layers of largest / mean; load: [num_layers, parts]. 1.0 without any load."""
    means = load.mean(-1)
    busy = means > 0
    return float(1 / (load.max(-1)[busy] / means[busy]).mean()) if busy.any() else 1.0


def computed_balancedness(found: Sequence[Window]) -> float:
    """Of the pairs as the ranks computed them, mean over windows by their steps."""
    weights = [window.steps for window in found]
    values = [1 / balancedness(window.pairs.T) for window in found]
    return float(1 / np.average(values, weights=weights))


@dataclass(frozen=True, kw_only=True, slots=True)
class Balance:
    """Balancedness of ranks of the linear placement and of experts, and of ranks as computed.

    choices: choices of a layer that this was measured on.
    """

    ranks: float
    experts: float
    computed: float
    choices: float = math.inf


def asked(routing: ForcedRouting) -> list[Balance]:
    """What the workload promises, by phase, before anything has moved."""
    found = []
    for chances in routing.chances:
        ranks = _by_rank(chances, routing.num_ranks)
        even = balancedness(ranks)
        found.append(Balance(ranks=even, experts=balancedness(chances), computed=even))
    return found


def measured(routing: ForcedRouting, found: Sequence[Window]) -> dict[int, Balance]:
    """What the windows show, by phase; phases that are alike count as the first of them.

    Windows with a change of phase inside do not count.
    """
    span = routing.phase_steps if len(routing.chances) > 1 else 1 << 62
    kinds = [chances.tobytes() for chances in routing.chances]
    by_phase: dict[int, list[Window]] = {}
    for window in found:
        if window.first // span == (window.last - 1) // span:
            phase = kinds.index(kinds[routing.phase(window.first)])
            by_phase.setdefault(phase, []).append(window)
    result = {}
    for phase, parts in by_phase.items():
        counts = np.sum([window.counts for window in parts], axis=0)
        pairs = np.sum([window.pairs for window in parts], axis=0)
        result[phase] = Balance(
            ranks=balancedness(_by_rank(counts, routing.num_ranks)),
            experts=balancedness(counts),
            computed=balancedness(pairs.T),
            choices=float(counts.sum(-1).mean()),
        )
    return result


def check(
    routing: ForcedRouting, found: Sequence[Window], *, tolerance: float, is_static: bool
) -> None:
    """Compares what the windows show with what was asked.

    tolerance: allowed relative distance. is_static: experts never moved, so that the ranks must
    have computed what the linear placement makes of the workload.

    Raises:
        SkewError: they differ, or no window lies within one phase.
    """
    shown = measured(routing, found)
    if not shown:
        raise SkewError(
            f"{routing.workload}: no snapshot lies within a span of {routing.phase_steps} steps: "
            "give more steps to a span or poll more often"
        )
    wanted = asked(routing)
    for phase, balance in sorted(shown.items()):
        parts = {"ranks": routing.num_ranks, "experts": routing.chances.shape[-1]}
        if is_static:
            parts["computed"] = routing.num_ranks
        for name, num_parts in parts.items():
            # Each rank's walk through its table may be a row or two ahead for one of the parts.
            rows = 2 * routing.num_ranks * num_parts / balance.choices
            _compare(
                f"{routing.workload}, phase {phase}, balancedness of {name}",
                getattr(balance, name),
                getattr(wanted[phase], name),
                tolerance + rows,
            )


def check_sources(found: Sequence[Window], wanted: float, *, tolerance: float) -> None:
    """Compares how evenly requests were spread over ranks with what was asked.

    Raises:
        SkewError: they differ by more than the tolerance.
    """
    shown = balancedness(np.sum([window.routed for window in found], axis=0)[None])
    _compare("ragged sources, balancedness of requests", shown, wanted, tolerance)


def _compare(what: str, shown: float, wanted: float, tolerance: float) -> None:
    if abs(shown - wanted) > tolerance * wanted:
        raise SkewError(
            f"{what}: asked for {wanted:.3f}, measured {shown:.3f}, which is more than "
            f"{tolerance:.0%} off: the figures of this run mean nothing"
        )


def _by_rank(counts: np.ndarray, num_ranks: int) -> np.ndarray:
    """[num_layers, num_experts] -> [num_layers, num_ranks] under the linear placement."""
    return counts @ np.eye(num_ranks)[linear_ranks(counts.shape[-1], num_ranks)]


@dataclass(frozen=True, kw_only=True, slots=True)
class Cost:
    """What unevenness cost one run: steps; seconds lost, over the run; wall time."""

    steps: float
    lost_s: float
    wall_s: float

    @classmethod
    def of(cls, found: Sequence[Window], wall_s: float) -> Cost:
        """Of the windows of a run."""
        return cls(
            steps=sum(window.steps for window in found),
            lost_s=sum(window.lost_s for window in found),
            wall_s=wall_s,
        )

    @property
    def floor_factor(self) -> float:
        """By how much perfect balance would raise the rate: the same work without the waiting."""
        return self.wall_s / max(self.wall_s - self.lost_s, 1e-9)


def moved(history: dict[str, Any], since_s: float = 0.0) -> dict[str, Any]:
    """Plans carried out, experts copied and bytes moved according to /experts/history.

    since_s: only entries from that time on (seconds since the epoch).
    """
    entries = [entry for entry in history["entries"] if entry["time"] >= since_s]
    shares = [
        entry["num_groups_done"] / entry["num_groups"] if entry["num_groups"] else 0.0
        for entry in entries
    ]
    return {
        "plans": sum(entry["state"] == "done" and entry["num_groups"] > 0 for entry in entries),
        "declined": sum(entry["state"] == "declined" for entry in entries),
        "failed": sum(entry["state"] == "failed" for entry in entries),
        "experts": round(sum(e["num_copies"] * s for e, s in zip(entries, shares, strict=True))),
        "bytes": round(sum(e["num_bytes"] * s for e, s in zip(entries, shares, strict=True))),
    }
