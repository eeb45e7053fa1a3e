"""A drift stream without invented popularity: real sequences under a real arrival clock.

Every arrival draws one sequence of a recorded trace. Which domain (label) it comes from follows a
cycle, so the mix of domains drifts while each sequence keeps its own routing.
"""

from __future__ import annotations

import csv
import datetime
import io
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from moeserve_placement.traces.files import one_line, parse_json, read_text, reading
from moeserve_placement.traces.info import imbalance
from moeserve_placement.traces.trace import Array, RoutingTrace, TraceError

MAX_REQUESTS = 1 << 22
_MAX_CHOICES = 1 << 30
"""Expert ids of a drawn trace."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MixSpec:
    """How domains follow each other.

    cycle_s: seconds in which every domain has its turn. None: all domains equally likely always.
    focus: 0 to 1, how much of the traffic is on the domain whose turn it is; the rest is spread
        over all domains. The turn passes from one domain to the next gradually.
    tolerance: allowed relative distance, in every layer, between the imbalance (max / mean of the
        experts) of the drawn trace and that of the expected one.
    """

    cycle_s: float | None = None
    focus: float = 0.8
    tolerance: float = 0.15
    seed: int = 0

    def __post_init__(self) -> None:
        if self.cycle_s is not None and not self.cycle_s > 0:
            raise TraceError(f"cycle_s = {self.cycle_s}: must be more than 0")
        if not 0 <= self.focus <= 1:
            raise TraceError(f"focus = {self.focus}: must be in [0, 1]")
        if not 0 < self.tolerance < 1:
            raise TraceError(f"tolerance = {self.tolerance}: must be more than 0 and less than 1")
        if self.seed < 0:
            raise TraceError(f"seed = {self.seed}: must be 0 or more")


def mix_under_clock(
    trace: RoutingTrace, arrival_times_s: Array, *, spec: MixSpec | None = None
) -> RoutingTrace:
    """One real sequence per arrival, in order of arrival, with labels kept.

    arrival_times_s: [num_requests], seconds. The metadata states the imbalance expected from the
    mix and the one realised.

    Raises:
        TraceError: a trace without labels, no arrivals, or a realised imbalance outside the
            tolerance (too few requests for the mix to show).
    """
    spec = spec or MixSpec()
    times = np.sort(np.asarray(arrival_times_s, dtype=np.float64))
    if not times.size or not np.isfinite(times).all():
        raise TraceError("arrival_times_s: must be one or more finite numbers")
    if trace.labels is None:
        raise TraceError("labels: mixing needs a trace whose sequences have labels (domains)")
    names = sorted(set(trace.labels))
    members = [np.flatnonzero(np.array(trace.labels, dtype=object) == name) for name in names]
    chances = domain_chances(times - times[0], len(names), spec=spec)
    rng = np.random.default_rng(spec.seed)
    domains = (rng.random((times.size, 1)) > np.cumsum(chances, axis=1)[:, :-1]).sum(axis=1)
    drawn = np.array([rng.choice(members[domain]) for domain in domains])
    num_choices = int(trace.sequence_lengths[drawn].sum()) * trace.num_layers * trace.top_k
    if num_choices > _MAX_CHOICES:
        raise TraceError(
            f"num_requests = {times.size}: their sequences have {num_choices:,} expert ids in all, "
            f"must be at most {_MAX_CHOICES:,}"
        )
    mixed = trace.sequences(drawn)
    stated = _expected_imbalance(trace, members, chances)
    realised = np.array([imbalance(load) for load in mixed.counts()])
    _check(stated, realised, spec, times.size)
    facts = {
        "synth_kind": "mix",
        "synth_seed": str(spec.seed),
        "synth_tolerance": f"{spec.tolerance:g}",
        "synth_imbalance": f"{stated.min():.4f} to {stated.max():.4f} over layers (expected)",
        "synth_imbalance_realised": f"{realised.min():.4f} to {realised.max():.4f} over layers",
    }
    return replace(mixed, arrival_times_s=times, metadata={**trace.metadata, **facts})


def domain_chances(times_s: Array, num_domains: int, *, spec: MixSpec) -> Array:
    """Chance of each domain at each time: [num_requests, num_domains], rows sum to 1."""
    even = np.full((times_s.size, num_domains), 1 / num_domains)
    if spec.cycle_s is None:
        return even
    turn = times_s / spec.cycle_s * num_domains
    current = np.floor(turn).astype(np.int64)
    passed = turn - current
    rows = np.arange(times_s.size)
    focused = np.zeros_like(even)
    np.add.at(focused, (rows, current % num_domains), 1 - passed)
    np.add.at(focused, (rows, (current + 1) % num_domains), passed)
    return np.asarray((1 - spec.focus) * even + spec.focus * focused)


def poisson_clock(num_requests: int, requests_per_s: float, *, seed: int = 0) -> Array:
    """Arrival times of a Poisson process, seconds: float64 [num_requests].

    Raises:
        TraceError: a number is out of range.
    """
    _check_requests(num_requests)
    if not 0 < requests_per_s < np.inf:
        raise TraceError(f"requests_per_s = {requests_per_s}: must be more than 0, and finite")
    rng = np.random.default_rng(seed)
    return np.cumsum(rng.exponential(1 / requests_per_s, num_requests))


def read_clock(path: Path, *, limit: int | None = None) -> Array:
    """Arrival times of a request trace, seconds from its first: float64 [num_requests].

    Reads CSV with a column TIMESTAMP (ISO dates, as in the Azure LLM inference traces, or seconds)
    and JSON lines with a key timestamp in milliseconds (as in Mooncake's traces).
    limit: only the first so many requests.

    Raises:
        TraceError: neither layout, a time that can not be read, no requests, or a limit out of
            range.
    """
    if limit is not None:
        _check_requests(limit)
    with reading(path):
        text = read_text(path)
        if text.lstrip().startswith("{"):
            lines = [line for line in text.splitlines() if line.strip()][:limit]
            times = [_json_time(line, i) for i, line in enumerate(lines)]
        else:
            times = _csv_times(text, limit)
        if not times:
            raise TraceError("has no requests")
        clock = np.sort(np.array(times, dtype=np.float64))
        if not np.isfinite(clock).all():
            raise TraceError("has a time that is not a finite number")
        return np.asarray(clock - clock[0])


def _check_requests(number: int) -> None:
    if not 1 <= number <= MAX_REQUESTS:
        raise TraceError(f"num_requests = {number}: must be in [1, {MAX_REQUESTS}]")


def _csv_times(text: str, limit: int | None) -> list[float]:
    try:
        rows = csv.DictReader(io.StringIO(text))
        if "TIMESTAMP" not in (rows.fieldnames or ()):
            raise TraceError("has neither a TIMESTAMP column nor JSON lines with a timestamp")
        return [_csv_time(row["TIMESTAMP"], i) for i, row in enumerate(islice(rows, limit))]
    except csv.Error as error:
        raise TraceError(f"is not CSV: {one_line(error)}") from error


def _json_time(line: str, index: int) -> float:
    request: Any = parse_json(line, what=f"line {index + 1}")
    value = request.get("timestamp") if isinstance(request, dict) else None
    if not isinstance(value, (int, float)) or isinstance(value, bool):
        raise TraceError(f"line {index + 1}: timestamp must be a number of milliseconds")
    return float(value) / 1000


def _csv_time(value: Any, index: int) -> float:
    text = str(value).strip()
    try:
        return float(text)
    except ValueError:
        pass
    # The Azure traces have seven decimals, one more than datetime reads.
    whole, _, fraction = text.partition(".")
    try:
        moment = datetime.datetime.fromisoformat(whole).replace(tzinfo=datetime.UTC)
        return moment.timestamp() + (float(f"0.{fraction}") if fraction else 0.0)
    except ValueError as error:
        raise TraceError(f"row {index + 1}: TIMESTAMP {text[:40]!r} is not a time") from error


def _expected_imbalance(trace: RoutingTrace, members: list[Array], chances: Array) -> Array:
    """Imbalance of each layer of the expected load: the mean sequence of each domain, weighted."""
    expected = np.zeros((trace.num_layers, trace.num_experts))
    for sequences, weight in zip(members, chances.sum(axis=0), strict=True):
        expected += weight / len(sequences) * trace.sequences(sequences).counts()
    return np.array([imbalance(load) for load in expected])


def _check(stated: Array, realised: Array, spec: MixSpec, num_requests: int) -> None:
    off = np.abs(realised - stated) / stated
    worst = int(np.argmax(off))
    if off[worst] > spec.tolerance:
        raise TraceError(
            f"imbalance = {stated[worst]:.3g} expected, {realised[worst]:.3g} realised in layer "
            f"{worst}, outside tolerance = {spec.tolerance}: {num_requests} requests are too few "
            "for the mix to show; ask for more requests or a wider tolerance"
        )
