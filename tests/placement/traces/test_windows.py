"""Windows: from memory and from a file alike, in bounded memory."""

from __future__ import annotations

import tempfile
import tracemalloc
from pathlib import Path

import numpy as np
import pytest
from helpers_traces import assert_same_routing, count_traces, routing_traces
from hypothesis import given, settings
from hypothesis import strategies as st

from moeserve_placement.traces import (
    CountTrace,
    RoutingTrace,
    TraceError,
    by_arrival,
    count_windows,
    iter_windows,
    stream_windows,
    write_trace,
)


@settings(max_examples=40)
@given(trace=routing_traces(), size=st.integers(1, 40), drop_last=st.booleans())
def test_a_streamed_file_gives_the_windows_of_the_trace(
    trace: RoutingTrace, size: int, drop_last: bool
) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.npz"
        write_trace(path, trace)
        streamed = list(stream_windows(path, size, drop_last=drop_last))
        held = list(iter_windows(trace, size, drop_last=drop_last))
        assert len(streamed) == len(held)
        for left, right in zip(streamed, held, strict=True):
            assert_same_routing(left, right)


@settings(max_examples=40)
@given(trace=routing_traces(), size=st.integers(1, 40))
def test_windows_cover_every_token_once(trace: RoutingTrace, size: int) -> None:
    windows = list(iter_windows(trace, size))
    np.testing.assert_array_equal(np.concatenate([w.topk_ids for w in windows]), trace.topk_ids)
    assert all(window.num_tokens == size for window in windows[:-1])
    counts = count_windows(trace, size)
    np.testing.assert_array_equal(counts.counts.sum(axis=0), trace.counts())
    assert counts.tokens_per_window is not None
    assert int(counts.tokens_per_window.sum()) == trace.num_tokens


@settings(max_examples=40)
@given(trace=routing_traces())
def test_arrival_order_is_sorted_and_stable(trace: RoutingTrace) -> None:
    if trace.arrival_times_s is None:
        with pytest.raises(TraceError, match="has none"):
            by_arrival(trace)
        return
    times = trace.arrival_times_s.tolist()
    expected = sorted(range(len(times)), key=lambda i: (times[i], i))
    assert_same_routing(by_arrival(trace), trace.sequences(expected))


def test_streaming_holds_a_window_and_not_the_file(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    num_tokens, size = 120_000, 512
    start = rng.integers(0, 56, (num_tokens, 8, 1), dtype=np.uint8)
    ids = (start + np.arange(8, dtype=np.uint8)).astype(np.uint8)
    trace = RoutingTrace(
        topk_ids=ids,
        num_experts=64,
        layer_ids=tuple(range(8)),
        sequence_lengths=np.full(num_tokens // 100, 100),
    )
    write_trace(tmp_path / "long.npz", trace)
    tracemalloc.start()
    tokens = sum(w.num_tokens for w in stream_windows(tmp_path / "long.npz", size))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert tokens == num_tokens
    # A window is 32 kB; the decompressor works in chunks of 1 MiB. The file holds 7.7 MB.
    assert peak < 4 << 20 < ids.nbytes


def test_a_damaged_window_shows_when_it_is_reached(tmp_path: Path) -> None:
    ids = np.zeros((100, 1, 1), dtype=np.uint8)
    ids[90] = 3
    header = b'{"format": "moeserve-trace", "version": 1, "kind": "routing", "num_experts": 3,'
    header += b'"layer_ids": [0], "metadata": {}}'
    path = tmp_path / "bad.npz"
    np.savez(
        path,
        header=np.frombuffer(header, np.uint8),
        topk_ids=ids,
        sequence_lengths=np.array([100]),
    )
    windows = stream_windows(path, 50)
    assert next(windows).num_tokens == 50
    with pytest.raises(TraceError, match="token 40, layer 0: expert 3"):
        next(windows)


@settings(max_examples=40)
@given(trace=count_traces())
def test_counts_can_not_be_streamed_by_token(trace: CountTrace) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.npz"
        write_trace(path, trace)
        with pytest.raises(TraceError, match="only routing traces"):
            next(stream_windows(path, 4))


@settings(max_examples=40)
@given(trace=routing_traces())
def test_windows_below_one_token_or_above_the_limit_are_refused(trace: RoutingTrace) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.npz"
        write_trace(path, trace)
        with pytest.raises(TraceError, match="at least 1"):
            next(stream_windows(path, 0))
        with pytest.raises(TraceError, match="at least 1"):
            count_windows(trace, 0)
        with pytest.raises(TraceError, match="max_bytes"):
            next(stream_windows(path, 4, max_bytes=0))
