"""The metrics of one HTTP process, in Prometheus text, under vLLM's names.

Nothing here raises and nothing here waits: requests add to plain lists of numbers, ranks leave
their latest snapshot, and the text is made when somebody scrapes. Counters never fall: a rank that
restarts at zero adds to what it had.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from typing import Protocol

from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector

CONTENT_TYPE = CONTENT_TYPE_LATEST

_SHORT = (0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3)
_TTFT = (0.001, *_SHORT, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0, 160.0, 640.0)
_ITL = (0.0005, 0.001, 0.0025, *_SHORT, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 10.0, 40.0, 80.0)
_E2E = (*_SHORT, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0)
_E2E_LONG = (*_E2E, 120.0, 240.0, 480.0, 960.0, 1920.0, 7680.0)
_COUNTS = tuple(float(m * 10**e) for e in range(6) for m in (1, 2, 5))
_SAMPLES = (1.0, 2.0, 5.0, 10.0, 20.0, 50.0)

_HISTOGRAMS: Mapping[str, tuple[str, Sequence[float]]] = {
    "time_to_first_token_seconds": ("Arrival to first token.", _TTFT),
    "inter_token_latency_seconds": ("Time between two tokens of a sequence.", _ITL),
    "request_time_per_output_token_seconds": ("Mean time per token after the first.", _ITL),
    "e2e_request_latency_seconds": ("Arrival to last token.", _E2E_LONG),
    "request_queue_time_seconds": ("Waiting for the first step, on the rank.", _E2E_LONG),
    "request_prefill_time_seconds": ("First step to first token.", _E2E_LONG),
    "request_decode_time_seconds": ("First token to last token.", _E2E_LONG),
    "request_inference_time_seconds": ("First step to last token.", _E2E_LONG),
    "request_prompt_tokens": ("Prompt tokens of a request.", _COUNTS),
    "request_generation_tokens": ("Tokens generated for a sequence.", _COUNTS),
    "request_params_n": ("Parameter n of a request.", _SAMPLES),
    "request_params_max_tokens": ("Parameter max_tokens of a request.", _COUNTS),
}
_COUNTERS: Mapping[str, str] = {
    "prompt_tokens": "Prompt tokens, once per request whatever its n.",
    "prompt_tokens_cached": "Prompt tokens found in the prefix cache.",
    "generation_tokens": "Tokens generated.",
}
_RANK_GAUGES: Mapping[str, tuple[str, str]] = {
    "num_requests_running": ("num_running", "Sequences in the running batch."),
    "num_requests_waiting": ("num_waiting", "Sequences waiting to run."),
    "kv_cache_usage_perc": ("kv_usage", "Share of KV blocks in use, 0 to 1."),
}
_RANK_COUNTERS: Mapping[str, tuple[str, str]] = {
    "num_preemptions": ("num_preemptions", "Sequences preempted."),
    "prefix_cache_queries": ("prefix_cache_queries", "Prefix cache queries, in tokens."),
    "prefix_cache_hits": ("prefix_cache_hits", "Prefix cache hits, in tokens."),
    "iteration_scheduled_tokens": ("iteration_tokens", "Tokens scheduled over all steps."),
    "moe_rank_tokens": ("rank_tokens", "Rows computed by this rank's experts."),
}


class RankSnapshot(Protocol):
    """What a rank says about itself; also the numbers that the tables above name, by field."""

    @property
    def rank(self) -> int:
        """Which rank."""
        ...

    @property
    def dispatches(self) -> Mapping[str, int]:
        """Steps by dispatcher."""
        ...


class Histogram:
    """Counts of observations by bucket; ``observe`` costs one search and two additions."""

    __slots__ = ("bounds", "counts", "total")

    def __init__(self, bounds: Sequence[float]) -> None:
        self.bounds = tuple(bounds)
        self.counts = [0] * (len(self.bounds) + 1)
        self.total = 0.0

    def observe(self, value: float, times: int = 1) -> None:
        """Adds ``value``, ``times`` times."""
        self.counts[bisect_left(self.bounds, value)] += times
        self.total += value * times

    def buckets(self) -> list[tuple[str, float]]:
        """Prometheus' cumulative buckets."""
        running, buckets = 0, []
        labels = [*map(str, self.bounds), "+Inf"]
        for label, count in zip(labels, self.counts, strict=True):
            running += count
            buckets.append((label, float(running)))
        return buckets


class EngineMetrics:
    """The histograms and counters of the requests that one rank serves."""

    def __init__(self) -> None:
        self.histograms = {name: Histogram(bounds) for name, (_, bounds) in _HISTOGRAMS.items()}
        self.counters = dict.fromkeys(_COUNTERS, 0)
        self.finished: dict[str, int] = {}
        self.inter_token = self.histograms["inter_token_latency_seconds"]

    def observe(self, name: str, value: float) -> None:
        """Adds to a histogram."""
        self.histograms[name].observe(value)

    def add(self, name: str, amount: int) -> None:
        """Adds to a counter."""
        self.counters[name] += amount

    def finish(self, reason: str) -> None:
        """Counts a finished sequence."""
        self.finished[reason] = self.finished.get(reason, 0) + 1


class Metrics(Collector):
    """All metrics of this process; ``render`` gives the text.

    Args:
        prefix: of the model metrics (``prefix:name``); http metrics have none, as in vLLM.
        model_name: value of the label ``model_name``.
    """

    def __init__(self, *, prefix: str, model_name: str) -> None:
        self._prefix = prefix
        self._model_name = model_name
        self._engines: dict[int, EngineMetrics] = {}
        self._snapshots: dict[int, RankSnapshot] = {}
        self._lost: dict[tuple[int, str], float] = {}  # counted by a rank before it restarted
        self._info: dict[str, str] = {}
        self._rejections: dict[str, int] = {}
        self._http_requests: dict[tuple[str, str, str], int] = {}
        self._http_seconds: dict[tuple[str, str], Histogram] = {}
        self.num_bad_frames = 0
        self.is_healthy = True
        self._registry = CollectorRegistry(auto_describe=False)
        self._registry.register(self)

    def engine(self, rank: int) -> EngineMetrics:
        """The request metrics of one rank."""
        if rank not in self._engines:
            self._engines[rank] = EngineMetrics()
        return self._engines[rank]

    def set_snapshot(self, snapshot: RankSnapshot) -> None:
        """Takes a rank's newest state."""
        previous = self._snapshots.get(snapshot.rank)
        if previous is not None:
            for field, _ in _RANK_COUNTERS.values():
                old, new = getattr(previous, field), getattr(snapshot, field)
                if new < old:
                    key = (snapshot.rank, field)
                    self._lost[key] = self._lost.get(key, 0.0) + old
        self._snapshots[snapshot.rank] = snapshot

    def set_cache_info(self, **labels: object) -> None:
        """Labels of ``cache_config_info``."""
        self._info = {name: str(value) for name, value in labels.items()}

    def reject(self, reason: str) -> None:
        """Counts a request that was not admitted."""
        self._rejections[reason] = self._rejections.get(reason, 0) + 1

    def observe_http(self, handler: str, method: str, status: int, seconds: float) -> None:
        """Counts one HTTP response. ``handler`` is a route's path, never the client's."""
        key = (handler, method, f"{status // 100}xx")
        self._http_requests[key] = self._http_requests.get(key, 0) + 1
        if (handler, method) not in self._http_seconds:
            self._http_seconds[handler, method] = Histogram(_E2E_LONG)
        self._http_seconds[handler, method].observe(seconds)

    def render(self) -> bytes:
        """Prometheus text, version 0.0.4."""
        return generate_latest(self._registry)

    def collect(self) -> Iterator[Metric]:
        """The metric families as of now (called by prometheus_client)."""
        yield from self._request_families()
        yield from self._rank_families()
        yield from self._process_families()
        yield from self._http_families()

    def _request_families(self) -> Iterator[Metric]:
        for name, (text, _) in _HISTOGRAMS.items():
            histogram = HistogramMetricFamily(self._name(name), text, labels=_LABELS)
            for rank, engine in self._engines.items():
                data = engine.histograms[name]
                histogram.add_metric(self._labels(rank), data.buckets(), data.total)
            yield histogram
        for name, text in _COUNTERS.items():
            counter = CounterMetricFamily(self._name(name), text, labels=_LABELS)
            for rank, engine in self._engines.items():
                counter.add_metric(self._labels(rank), engine.counters[name])
            yield counter
        success = CounterMetricFamily(
            self._name("request_success"),
            "Finished sequences (n per request).",
            labels=[*_LABELS, "finished_reason"],
        )
        for rank, engine in self._engines.items():
            for reason, count in sorted(engine.finished.items()):
                success.add_metric([*self._labels(rank), reason], count)
        yield success

    def _rank_families(self) -> Iterator[Metric]:
        for name, (field, text) in _RANK_GAUGES.items():
            gauge = GaugeMetricFamily(self._name(name), text, labels=_LABELS)
            for rank, snapshot in self._snapshots.items():
                gauge.add_metric(self._labels(rank), getattr(snapshot, field))
            yield gauge
        for name, (field, text) in _RANK_COUNTERS.items():
            counter = CounterMetricFamily(self._name(name), text, labels=_LABELS)
            for rank, snapshot in self._snapshots.items():
                value = getattr(snapshot, field) + self._lost.get((rank, field), 0.0)
                counter.add_metric(self._labels(rank), value)
            yield counter
        dispatches = CounterMetricFamily(
            self._name("moe_dispatches"),
            "Steps by dispatcher.",
            labels=[*_LABELS, "dispatcher"],
        )
        for rank, snapshot in self._snapshots.items():
            for dispatcher, count in sorted(snapshot.dispatches.items()):
                dispatches.add_metric([*self._labels(rank), dispatcher], count)
        yield dispatches
        loads = [getattr(snapshot, "rank_tokens", 0) for snapshot in self._snapshots.values()]
        gauge = GaugeMetricFamily(
            self._name("moe_balancedness"), "Mean rank load / largest.", labels=["model_name"]
        )
        gauge.add_metric([self._model_name], balancedness(loads))
        yield gauge

    def _process_families(self) -> Iterator[Metric]:
        healthy = GaugeMetricFamily(self._name("engine_healthy"), "1: serving.", labels=_LABELS)
        for rank in self._snapshots or (0,):
            healthy.add_metric(self._labels(rank), float(self.is_healthy))
        yield healthy
        if self._info:
            names = list(self._info)
            info = GaugeMetricFamily(self._name("cache_config_info"), "KV cache.", labels=names)
            info.add_metric([self._info[name] for name in names], 1.0)
            yield info
        rejections = CounterMetricFamily(
            self._name("admission_rejections"), "Requests not admitted.", labels=["reason"]
        )
        for reason, count in sorted(self._rejections.items()):
            rejections.add_metric([reason], count)
        yield rejections
        bad = CounterMetricFamily(self._name("bad_frames"), "Messages that could not be decoded.")
        bad.add_metric([], self.num_bad_frames)
        yield bad

    def _http_families(self) -> Iterator[Metric]:
        requests = CounterMetricFamily(
            "http_requests", "HTTP responses.", labels=["handler", "method", "status"]
        )
        for key, count in sorted(self._http_requests.items()):
            requests.add_metric(list(key), count)
        yield requests
        seconds = HistogramMetricFamily(
            "http_request_duration_seconds", "Time to answer.", labels=["handler", "method"]
        )
        for route, data in sorted(self._http_seconds.items()):
            seconds.add_metric(list(route), data.buckets(), data.total)
        yield seconds

    def _name(self, name: str) -> str:
        return f"{self._prefix}:{name}"

    def _labels(self, rank: int) -> list[str]:
        return [self._model_name, str(rank)]


_LABELS = ["model_name", "engine"]


def balancedness(loads: Sequence[float]) -> float:
    """Mean load / largest load of the ranks: 1.0 is even; no load at all counts as even."""
    largest = max(loads, default=0.0)
    return sum(loads) / len(loads) / largest if largest > 0 else 1.0
