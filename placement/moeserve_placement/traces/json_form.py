"""The JSON form of a trace, and the header object that it shares with the npz form.

A routing trace lists its sequences, each with its tokens as [tokens][layers][top_k] expert ids::

    {"format": "moeserve-trace", "version": 1, "kind": "routing", "num_experts": 4,
     "layer_ids": [1, 2], "metadata": {"model": "toy"},
     "sequences": [
       {"label": "law", "arrival_time_s": 0.5, "topk_ids": [[[0, 3], [1, 2]]]}]}

A count trace lists its windows::

    {"format": "moeserve-trace", "version": 1, "kind": "counts", "num_experts": 2,
     "layer_ids": [1], "metadata": {},
     "windows": [{"num_tokens": 5, "counts": [[3, 7]]}]}
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any

import numpy as np

from moeserve_placement.traces.trace import (
    Array,
    CountTrace,
    RoutingTrace,
    TraceError,
    check_num_experts,
)

FORMAT = "moeserve-trace"
VERSION = 1
KINDS = ("routing", "counts")

_COMMON = {"format", "version", "kind", "num_experts", "layer_ids", "metadata"}
_SEQUENCE_KEYS = {"topk_ids", "topk_weights", "label", "arrival_time_s"}
_WEIGHT_TYPES = {"float16": np.float16, "float32": np.float32, "float64": np.float64}


def is_trace_document(document: Any) -> bool:
    """Whether a JSON value says that it is a trace of ours, of any version."""
    return isinstance(document, dict) and document.get("format") == FORMAT


def check_document(document: Any, *, in_npz: bool = False) -> str:
    """The kind of trace that a header or JSON document announces.

    Raises:
        TraceError: another format or version, no such kind, an unknown or missing key, or fields
            of the wrong type.
    """
    if not is_trace_document(document):
        raise TraceError(f'trace: must be a JSON object with "format": "{FORMAT}"')
    if document.get("version") != VERSION or isinstance(document.get("version"), bool):
        raise TraceError(f"version = {str(document.get('version'))[:20]}: must be {VERSION}")
    kind = document.get("kind")
    if kind not in KINDS:
        raise TraceError(f"kind = {str(kind)[:20]!r}: must be one of {', '.join(KINDS)}")
    if in_npz:
        required, optional = _COMMON, {"labels"} if kind == "routing" else set()
    elif kind == "routing":
        required, optional = _COMMON | {"sequences"}, {"weights_dtype"}
    else:
        required, optional = _COMMON | {"windows"}, set()
    _check_keys("trace", document, required, optional)
    _check_fields(document)
    return str(kind)


def trace_fields(document: dict[str, Any]) -> dict[str, Any]:
    """layer_ids and metadata of a checked document, as constructor arguments."""
    return {"layer_ids": tuple(document["layer_ids"]), "metadata": dict(document["metadata"])}


def header_of(trace: RoutingTrace | CountTrace) -> dict[str, Any]:
    """The fields that both forms store as JSON."""
    return {
        "format": FORMAT,
        "version": VERSION,
        "kind": "routing" if isinstance(trace, RoutingTrace) else "counts",
        "num_experts": trace.num_experts,
        "layer_ids": list(trace.layer_ids),
        "metadata": dict(trace.metadata),
    }


def dump_json(trace: RoutingTrace | CountTrace) -> str:
    """The JSON form, one line per sequence or window. Reading it gives an equal trace."""
    document = header_of(trace)
    if isinstance(trace, CountTrace):
        return _dump(document, "windows", _window_lines(trace))
    if trace.topk_weights is not None:
        document["weights_dtype"] = _weights_name(trace.topk_weights)
    return _dump(document, "sequences", _sequence_lines(trace))


def parse_trace(document: Any) -> RoutingTrace | CountTrace:
    """The trace of a parsed JSON document.

    Raises:
        TraceError: not a valid trace; the text names the sequence or window at fault.
    """
    if check_document(document) == "counts":
        return _parse_counts(document)
    return _parse_routing(document)


def to_array(name: str, value: Any, dtype: Any) -> Array:
    """Nested lists of numbers as an array.

    Raises:
        TraceError: ragged, empty of numbers, or other values than numbers of that kind.
    """
    try:
        array = np.array(value)
    except (ValueError, OverflowError, TypeError, RecursionError) as error:
        raise TraceError(f"{name}: must be a full array of numbers") from error
    allowed = "iu" if np.dtype(dtype).kind in "iu" else "fiu"
    if array.dtype.kind not in allowed:
        raise TraceError(f"{name}: must be a full array of numbers, not {array.dtype}")
    if array.size and allowed == "iu":
        limits = np.iinfo(dtype)
        if int(array.min()) < limits.min or int(array.max()) > limits.max:
            raise TraceError(f"{name}: holds a number outside [{limits.min}, {limits.max}]")
    with np.errstate(over="ignore"):  # an overflow becomes infinite, which the trace refuses
        return array.astype(dtype)


def _parse_counts(document: dict[str, Any]) -> CountTrace:
    windows = _objects("windows", document["windows"])
    counts, tokens = [], []
    for i, window in enumerate(windows):
        _check_keys(f"window {i}", window, {"counts"}, {"num_tokens"})
        counts.append(to_array(f"window {i}: counts", window["counts"], np.int64))
        tokens.append(window.get("num_tokens"))
    if any(array.shape != counts[0].shape or array.ndim != 2 for array in counts):
        raise TraceError("counts: must be [layers][experts], of one shape in all windows")
    if counts[0].shape[1] != document["num_experts"]:
        raise TraceError(
            f"counts: have {counts[0].shape[1]} experts, must be {document['num_experts']}"
        )
    per_window = to_array("num_tokens", tokens, np.int64) if _all_or_none(tokens) else None
    return CountTrace(
        counts=np.stack(counts), tokens_per_window=per_window, **trace_fields(document)
    )


def _parse_routing(document: dict[str, Any]) -> RoutingTrace:
    sequences = _objects("sequences", document["sequences"])
    dtype = _WEIGHT_TYPES.get(document.get("weights_dtype", "float32"))
    if dtype is None:
        raise TraceError(f"weights_dtype: must be one of {', '.join(_WEIGHT_TYPES)}")
    ids, weights = [], []
    for i, sequence in enumerate(sequences):
        _check_keys(f"sequence {i}", sequence, {"topk_ids"}, _SEQUENCE_KEYS)
        ids.append(to_array(f"sequence {i}: topk_ids", sequence["topk_ids"], np.int64))
        if "topk_weights" in sequence:
            weights.append(to_array(f"sequence {i}: topk_weights", sequence["topk_weights"], dtype))
    if any(array.ndim != 3 or array.shape[1:] != ids[0].shape[1:] for array in ids):
        raise TraceError("topk_ids: must be [tokens][layers][top_k], alike in all sequences")
    labels = [sequence.get("label") for sequence in sequences]
    times = [sequence.get("arrival_time_s") for sequence in sequences]
    return RoutingTrace(
        topk_ids=np.concatenate(ids),
        num_experts=document["num_experts"],
        sequence_lengths=np.array([array.shape[0] for array in ids], dtype=np.int64),
        topk_weights=_join_weights(weights, ids),
        labels=tuple(labels) if _all_or_none(labels) else None,
        arrival_times_s=to_array("arrival_time_s", times, np.float64)
        if _all_or_none(times)
        else None,
        **trace_fields(document),
    )


def _join_weights(weights: list[Array], ids: list[Array]) -> Array | None:
    if not weights:
        return None
    if len(weights) != len(ids) or any(
        w.shape != i.shape for w, i in zip(weights, ids, strict=True)
    ):
        raise TraceError("topk_weights: must be as long as topk_ids, in all sequences or none")
    return np.concatenate(weights)


def _all_or_none(values: list[Any]) -> bool:
    """True: all are given; False: none is. Anything between is an error."""
    missing = sum(value is None for value in values)
    if missing not in (0, len(values)):
        raise TraceError("label, arrival_time_s, num_tokens: must be given everywhere or nowhere")
    return missing == 0


def _objects(name: str, value: Any) -> list[Any]:
    if not isinstance(value, list) or not value or not all(isinstance(v, dict) for v in value):
        raise TraceError(f"{name}: must be a list of one or more objects")
    return value


def _check_keys(
    what: str, value: dict[str, Any], required: set[str], optional: set[str] | None = None
) -> None:
    missing = required - set(value)
    if missing:
        raise TraceError(f"{what}: key {min(missing)!r} is missing")
    unknown = set(value) - required - (optional or set())
    if unknown:
        raise TraceError(f"{what}: unknown key {min(unknown)[:60]!r}")


def _check_fields(document: dict[str, Any]) -> None:
    num_experts = document["num_experts"]
    if isinstance(num_experts, bool):
        raise TraceError("num_experts: must be an integer")
    check_num_experts(num_experts)
    if not isinstance(document["layer_ids"], list):
        raise TraceError("layer_ids: must be a list of model layer indices")
    if not isinstance(document["metadata"], dict):
        raise TraceError("metadata: must be an object of strings")
    labels = document.get("labels", [])
    if not isinstance(labels, list) or not all(isinstance(label, str) for label in labels):
        raise TraceError("labels: must be a list of strings")


def _weights_name(weights: Array) -> str:
    name = str(weights.dtype.name)
    if name not in _WEIGHT_TYPES:
        raise TraceError(f"topk_weights: {name} can not be written as JSON")
    return name


def _dump(document: dict[str, Any], name: str, lines: Iterable[str]) -> str:
    head = json.dumps(document, allow_nan=False).removesuffix("}")
    body = ",\n".join(lines)
    return f'{head},\n "{name}": [\n{body}\n]}}\n'


def _window_lines(trace: CountTrace) -> Iterable[str]:
    for i, counts in enumerate(trace.counts):
        window: dict[str, Any] = {}
        if trace.tokens_per_window is not None:
            window["num_tokens"] = int(trace.tokens_per_window[i])
        window["counts"] = counts.tolist()
        yield json.dumps(window)


def _sequence_lines(trace: RoutingTrace) -> Iterable[str]:
    starts = trace.sequence_starts.tolist()
    for i, (start, length) in enumerate(zip(starts, trace.sequence_lengths.tolist(), strict=True)):
        sequence: dict[str, Any] = {}
        if trace.labels is not None:
            sequence["label"] = trace.labels[i]
        if trace.arrival_times_s is not None:
            sequence["arrival_time_s"] = float(trace.arrival_times_s[i])
        sequence["topk_ids"] = trace.topk_ids[start : start + length].tolist()
        if trace.topk_weights is not None:
            sequence["topk_weights"] = trace.topk_weights[start : start + length].tolist()
        yield json.dumps(sequence, allow_nan=False)
