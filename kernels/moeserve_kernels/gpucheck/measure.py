"""How long calls take on a GPU: replays of a CUDA graph, the median, inputs rotated past the L2."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch

_ROUND_S = 1e-3  # a replay takes at least this, so that what a replay itself costs vanishes
_MAX_CALLS = 400  # in one graph
_MIN_REPLAYS, _MAX_REPLAYS = 7, 100


@dataclass(frozen=True)
class Timing:
    """microseconds: median of one call. spread: (90 % - 10 %) / median. is_graph: by replays."""

    microseconds: float
    spread: float
    is_graph: bool


def time_calls(calls: Sequence[Callable[[], object]], *, seconds: float = 0.12) -> Timing:
    """The time of one of ``calls``, which do the same work on other inputs, one after the other.

    seconds: about how long to measure. On a CPU each is called once: only good for a dry run.
    """
    if not torch.cuda.is_available():
        start = time.perf_counter()
        for call in calls:
            call()
        return Timing(1e6 * (time.perf_counter() - start) / len(calls), 0.0, False)
    for call in calls:  # compiles
        call()
    torch.cuda.synchronize()
    estimate = _eager(calls)
    try:
        return _replays(calls, estimate, seconds)
    except RuntimeError:  # it waits for the device somewhere, which a graph does not allow
        torch.cuda.synchronize()
        times = [_eager(calls) for _ in range(_MIN_REPLAYS)]
        return _timing([1e6 * one / len(calls) for one in times], is_graph=False)


def num_sets(bytes_touched: float, *, most: int = 8) -> int:
    """How many sets of inputs to rotate, so that the L2 has forgotten one when it comes again."""
    if not torch.cuda.is_available():
        return 1
    l2 = torch.cuda.get_device_properties(0).L2_cache_size
    return max(1, min(most, math.ceil(4 * l2 / max(bytes_touched, 1.0))))


def _replays(calls: Sequence[Callable[[], object]], estimate: float, seconds: float) -> Timing:
    rounds = max(1, min(math.ceil(_ROUND_S / max(estimate, 1e-6)), _MAX_CALLS // len(calls)))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(rounds):
            for call in calls:
                call()
    graph.replay()
    replays = int(seconds / max(estimate * rounds, 1e-6))
    replays = max(_MIN_REPLAYS, min(replays, _MAX_REPLAYS))
    events = _events(replays + 1)
    events[0].record()
    for event in events[1:]:
        graph.replay()
        event.record()
    torch.cuda.synchronize()
    times = [
        1e3 * before.elapsed_time(after) / (rounds * len(calls))
        for before, after in pairwise(events)
    ]
    return _timing(times, is_graph=True)


def _eager(calls: Sequence[Callable[[], object]]) -> float:
    """Seconds of one round, launched one by one."""
    start, end = _events(2)
    start.record()
    for call in calls:
        call()
    end.record()
    torch.cuda.synchronize()
    milliseconds: float = start.elapsed_time(end)
    return milliseconds / 1e3


def _events(count: int) -> list[torch.cuda.Event]:
    return [torch.cuda.Event(enable_timing=True) for _ in range(count)]  # type: ignore[no-untyped-call]


def _timing(times: list[float], *, is_graph: bool) -> Timing:
    times = sorted(times)
    median = statistics.median(times)
    low, high = times[len(times) // 10], times[-1 - len(times) // 10]
    return Timing(median, (high - low) / median if median > 0 else 0.0, is_graph)
