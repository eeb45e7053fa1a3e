"""Our own trace format, version 1: npz for size, JSON for reading by eye (see FORMATS.md).

npz: ``header`` is the UTF-8 text of a JSON object, as uint8; the other arrays are plain numbers.
Labels are an index per sequence into the header's list of different labels, so that no array of
text or objects is needed.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from moeserve_placement.text_files import open_regular
from moeserve_placement.traces.files import MAX_BYTES, parse_json, read_text, reading, write_text
from moeserve_placement.traces.json_form import (
    check_document,
    dump_json,
    header_of,
    parse_trace,
    trace_fields,
)
from moeserve_placement.traces.safe_npz import SafeNpz, write_npz
from moeserve_placement.traces.trace import Array, CountTrace, RoutingTrace, TraceError

_ROUTING_ARRAYS = {
    "topk_ids",
    "sequence_lengths",
    "topk_weights",
    "label_ids",
    "arrival_times_s",
}
_COUNT_ARRAYS = {"counts", "tokens_per_window"}
_MAX_HEADER_BYTES = 16 << 20


def write_trace(path: Path, trace: RoutingTrace | CountTrace) -> None:
    """Writes a trace as npz, or as JSON where the name ends in .json; whole or not at all.

    Expert ids are stored in the narrowest unsigned type that holds num_experts.

    Raises:
        TraceError: the file can not be written, or the name ends in neither.
    """
    if path.suffix == ".json":
        write_text(path, dump_json(trace))
    elif path.suffix == ".npz":
        write_npz(path, _arrays(trace))
    else:
        raise TraceError(f"{path}: the name of a trace must end in .npz or .json")


def read_trace(path: Path, *, max_bytes: int = MAX_BYTES) -> RoutingTrace | CountTrace:
    """Reads a file that ``write_trace`` wrote; which of both forms it is shows in its content.

    max_bytes: limit on the size of one array in memory.

    Raises:
        TraceError: it can not be read, is damaged, too large, or not a valid trace.
    """
    with reading(path):
        with open_regular(path) as stream:
            is_zip = stream.read(2) == b"PK"
        if not is_zip:
            return parse_trace(parse_json(read_text(path), what="trace"))
        with SafeNpz(path, max_bytes=max_bytes) as npz:
            return _from_npz(npz)


def read_header(npz: SafeNpz) -> dict[str, Any]:
    """The checked header object of an npz trace.

    Raises:
        TraceError: there is none, or its format, version, kind or keys are not ours; arrays that
            the version does not know.
    """
    header = npz.headers.get("header")
    if header is None:
        raise TraceError("has no header array: not a trace of ours")
    if header.dtype != np.uint8 or len(header.shape) != 1 or header.num_bytes > _MAX_HEADER_BYTES:
        raise TraceError(f"header: must be uint8 text of at most {_MAX_HEADER_BYTES:,} bytes")
    document = parse_json(npz.read("header").tobytes().decode("utf-8"), what="header")
    kind = check_document(document, in_npz=True)
    known = _ROUTING_ARRAYS if kind == "routing" else _COUNT_ARRAYS
    unknown = set(npz.headers) - known - {"header"}
    if unknown:
        raise TraceError(f"array {min(unknown)[:60]!r}: version 1 has no such array")
    return dict(document)


def read_sequences(npz: SafeNpz, document: Mapping[str, Any]) -> dict[str, Any]:
    """The per-sequence fields of a routing trace in npz: lengths, labels and arrival times."""
    lengths = npz.read("sequence_lengths")
    labels = None
    if "labels" in document:
        labels = _labels(npz.read("label_ids"), document["labels"], lengths.shape)
    times = npz.read("arrival_times_s") if "arrival_times_s" in npz else None
    return {"sequence_lengths": lengths, "labels": labels, "arrival_times_s": times}


def narrow_ids(topk_ids: Array, num_experts: int) -> Array:
    """Ids in the narrowest unsigned type that holds num_experts different ones."""
    return topk_ids.astype(np.uint8 if num_experts <= 1 << 8 else np.uint16)


def _from_npz(npz: SafeNpz) -> RoutingTrace | CountTrace:
    document = read_header(npz)
    common = trace_fields(document)
    if document["kind"] == "counts":
        tokens = npz.read("tokens_per_window") if "tokens_per_window" in npz else None
        return CountTrace(counts=npz.read("counts"), tokens_per_window=tokens, **common)
    return RoutingTrace(
        topk_ids=npz.read("topk_ids"),
        topk_weights=npz.read("topk_weights") if "topk_weights" in npz else None,
        num_experts=document["num_experts"],
        **read_sequences(npz, document),
        **common,
    )


def _labels(label_ids: Array, names: list[str], shape: tuple[int, ...]) -> tuple[str, ...]:
    if label_ids.dtype.kind not in "iu" or label_ids.shape != shape:
        raise TraceError("label_ids: must be one integer per sequence")
    if label_ids.size and (int(label_ids.min()) < 0 or int(label_ids.max()) >= len(names)):
        raise TraceError(f"label_ids: must be in [0, {len(names)}), the labels of the header")
    return tuple(names[i] for i in label_ids.tolist())


def _arrays(trace: RoutingTrace | CountTrace) -> dict[str, Array]:
    document = header_of(trace)
    if isinstance(trace, CountTrace):
        arrays = {"counts": trace.counts}
        if trace.tokens_per_window is not None:
            arrays["tokens_per_window"] = trace.tokens_per_window
    else:
        arrays = {
            "topk_ids": narrow_ids(trace.topk_ids, trace.num_experts),
            "sequence_lengths": trace.sequence_lengths,
        }
        if trace.topk_weights is not None:
            arrays["topk_weights"] = trace.topk_weights
        if trace.arrival_times_s is not None:
            arrays["arrival_times_s"] = trace.arrival_times_s
        if trace.labels is not None:
            names = sorted(set(trace.labels))
            index = {name: i for i, name in enumerate(names)}
            document["labels"] = names
            arrays["label_ids"] = np.array([index[label] for label in trace.labels], np.int32)
    text = dump_header(document)
    # The header goes first: a reader of the stream knows what follows.
    return {"header": np.frombuffer(text, np.uint8), **arrays}


def dump_header(document: Mapping[str, Any]) -> bytes:
    """The bytes of an npz header."""
    return json.dumps(document, ensure_ascii=True, allow_nan=False).encode("ascii")
