"""Traces of expert routing: types, our format, the formats of others, statistics and synthesis."""

from moeserve_placement.traces.detect import FORMATS, detect, open_any, open_trace
from moeserve_placement.traces.format import read_trace, write_trace
from moeserve_placement.traces.options import ReadOptions
from moeserve_placement.traces.trace import CountTrace, RoutingTrace, TraceError
from moeserve_placement.traces.windows import (
    by_arrival,
    count_windows,
    iter_windows,
    stream_windows,
)

__all__ = [
    "FORMATS",
    "CountTrace",
    "ReadOptions",
    "RoutingTrace",
    "TraceError",
    "by_arrival",
    "count_windows",
    "detect",
    "iter_windows",
    "open_any",
    "open_trace",
    "read_trace",
    "stream_windows",
    "write_trace",
]
