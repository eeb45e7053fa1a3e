"""Playing a trace in windows of tokens, from memory or straight from a file.

A window is itself a ``RoutingTrace``; a sequence that crosses its end appears in both windows.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np

from moeserve_placement.traces.files import MAX_BYTES, reading
from moeserve_placement.traces.format import read_header, read_sequences
from moeserve_placement.traces.json_form import trace_fields
from moeserve_placement.traces.safe_npz import SafeNpz
from moeserve_placement.traces.trace import (
    Array,
    CountTrace,
    RoutingTrace,
    TraceError,
    cut_sequences,
)


def iter_windows(
    trace: RoutingTrace, tokens_per_window: int, *, drop_last: bool = False
) -> Iterator[RoutingTrace]:
    """Consecutive windows of ``tokens_per_window`` tokens; arrays are views of the trace.

    The last window is shorter where the trace does not divide; drop_last leaves it out.

    Raises:
        TraceError: tokens_per_window is below 1.
    """
    _check_size(tokens_per_window)
    for start in range(0, trace.num_tokens, tokens_per_window):
        stop = min(start + tokens_per_window, trace.num_tokens)
        if not drop_last or stop - start == tokens_per_window:
            yield trace.tokens(start, stop)


def count_windows(
    trace: RoutingTrace, tokens_per_window: int, *, drop_last: bool = False
) -> CountTrace:
    """The trace as counts of consecutive windows.

    Raises:
        TraceError: tokens_per_window is below 1, or drop_last leaves no window.
    """
    counts, tokens = [], []
    for window in iter_windows(trace, tokens_per_window, drop_last=drop_last):
        counts.append(window.counts())
        tokens.append(window.num_tokens)
    if not counts:
        raise TraceError(
            f"tokens_per_window = {tokens_per_window}: must be at most {trace.num_tokens}, the "
            "tokens of the trace"
        )
    return CountTrace(
        counts=np.stack(counts),
        layer_ids=trace.layer_ids,
        tokens_per_window=np.array(tokens, dtype=np.int64),
        metadata=dict(trace.metadata),
    )


def by_arrival(trace: RoutingTrace) -> RoutingTrace:
    """The trace with its sequences in order of arrival; equal times keep their order.

    Raises:
        TraceError: the trace has no arrival times.
    """
    if trace.arrival_times_s is None:
        raise TraceError("arrival_times_s: this trace has none, so its order of arrival is unknown")
    return trace.sequences(np.argsort(trace.arrival_times_s, kind="stable"))


def stream_windows(
    path: Path, tokens_per_window: int, *, drop_last: bool = False, max_bytes: int = MAX_BYTES
) -> Iterator[RoutingTrace]:
    """The windows of a routing trace in our npz format, read as they are asked for.

    Equal to ``iter_windows(read_trace(path), ...)``, but only one window, a decompressor chunk of
    1 MiB per array and the table of sequences (8 to 20 bytes each) are in memory at a time. An
    error in the data shows when its window is reached; the checksum of the file shows at its end.

    max_bytes: limit on one window and on the table of sequences, not on the file.

    Raises:
        TraceError: not a routing trace in our npz format, damaged, or a window above max_bytes.
    """
    _check_size(tokens_per_window)
    with reading(path):
        npz = SafeNpz(path, max_bytes=max_bytes)
    with npz:
        with reading(path):
            document = read_header(npz)
            if document["kind"] != "routing":
                raise TraceError("kind = 'counts': only routing traces can be played by token")
            shape = _check_stream(npz, tokens_per_window, max_bytes)
            sequences = read_sequences(npz, document)
            lengths = _check_lengths(sequences["sequence_lengths"], shape[0])
        fields = trace_fields(document) | {"num_experts": document["num_experts"]}
        ids = npz.blocks("topk_ids", tokens_per_window)
        weights = npz.blocks("topk_weights", tokens_per_window) if "topk_weights" in npz else None
        start = 0
        for block in ids:
            stop = start + block.shape[0]
            first, last, inside = cut_sequences(lengths, start, stop)
            labels, times = sequences["labels"], sequences["arrival_times_s"]
            with reading(path):
                window = RoutingTrace(
                    topk_ids=block,
                    topk_weights=None if weights is None else next(weights),
                    sequence_lengths=inside,
                    labels=None if labels is None else labels[first:last],
                    arrival_times_s=None if times is None else times[first:last],
                    **fields,
                )
            if not drop_last or block.shape[0] == tokens_per_window:
                yield window
            start = stop


def _check_size(tokens_per_window: int) -> None:
    if tokens_per_window < 1:
        raise TraceError(f"tokens_per_window = {tokens_per_window}: must be at least 1")


def _check_stream(npz: SafeNpz, tokens_per_window: int, max_bytes: int) -> tuple[int, ...]:
    header = npz.headers.get("topk_ids")
    if header is None or len(header.shape) != 3 or min(header.shape) < 1:
        raise TraceError("topk_ids: must be an array [num_tokens, num_layers, top_k], not empty")
    weights = npz.headers.get("topk_weights")
    if weights is not None and weights.shape != header.shape:
        raise TraceError(f"topk_weights: shape {weights.shape}, but topk_ids has {header.shape}")
    for part in (header, weights):
        if part is not None:
            window_bytes = part.num_bytes // header.shape[0] * tokens_per_window
            if min(window_bytes, part.num_bytes) > max_bytes:
                raise TraceError(
                    f"tokens_per_window = {tokens_per_window}: one window needs {window_bytes:,} "
                    f"bytes, more than {max_bytes:,} (max_bytes)"
                )
    return header.shape


def _check_lengths(lengths: Array, num_tokens: int) -> Array:
    is_integer = lengths.dtype.kind in "iu" and lengths.ndim == 1 and lengths.size > 0
    if not is_integer or int(lengths.min()) < 1 or int(lengths.max()) > num_tokens:
        raise TraceError(f"sequence_lengths: must be integers in [1, {num_tokens}]")
    lengths = lengths.astype(np.int64)
    if int(lengths.sum()) != num_tokens:
        raise TraceError(f"sequence_lengths: must sum to {num_tokens}, the number of tokens")
    return lengths
