"""Plain npz files of routing arrays or counts, as researchers save them (read only).

Routing: every integer array ``<name>`` [num_tokens, num_layers, top_k] that has a partner
``<name>_seqlen`` [num_sequences] becomes the sequences of label ``<name>``, in file order. A file
of one set may instead use ``ids`` and ``seqlen``, with optional ``probs`` (weights) and ``cat``
(a label per sequence). Counts: integer arrays [num_layers, num_experts], one window each.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np

from moeserve_placement.text_files import open_regular
from moeserve_placement.traces.files import reading
from moeserve_placement.traces.options import ReadOptions
from moeserve_placement.traces.safe_npz import SafeNpz, read_npy
from moeserve_placement.traces.trace import Array, CountTrace, RoutingTrace, TraceError


def read_raw(path: Path, options: ReadOptions | None = None) -> RoutingTrace | CountTrace:
    """The trace in an npz of plain arrays, or in a .npy of ids [tokens, layers, top_k].

    Options: num_experts (else the highest id plus one), select (arrays whose name starts so),
    first_layer, max_bytes.

    Raises:
        TraceError: no arrays of the layouts above, arrays that do not fit together, or damage.
    """
    options = options or ReadOptions()
    with reading(path):
        with open_regular(path) as stream:
            is_npy = stream.read(6) == b"\x93NUMPY"
        if is_npy:
            return ids_trace(read_npy(path, max_bytes=options.max_bytes), options)
        with SafeNpz(path, max_bytes=options.max_bytes) as npz:
            return _from_npz(npz, options)


def ids_trace(ids: Array, options: ReadOptions) -> RoutingTrace:
    """The trace of an array of ids [tokens, layers, top_k]: one sequence; see ``read_raw``."""
    lengths = np.array(ids.shape[:1], dtype=np.int64)
    return _routing({"ids": ids}, {"ids": lengths}, options, names=False)


def is_raw(npz: SafeNpz) -> bool:
    """Whether an npz has arrays of one of the layouts above."""
    return bool(_routing_names(npz, None)) or bool(_count_names(npz, None))


def _from_npz(npz: SafeNpz, options: ReadOptions) -> RoutingTrace | CountTrace:
    if "ids" in npz and "seqlen" in npz:
        return _one_set(npz, options)
    names = _routing_names(npz, options.select)
    if names:
        ids = {name: npz.read(name) for name in names}
        lengths = {name: npz.read(f"{name}_seqlen") for name in names}
        return _routing(ids, lengths, options)
    names = _count_names(npz, options.select)
    if names:
        return _counts({name: npz.read(name) for name in names}, options)
    wanted = f" whose name starts with {options.select!r}" if options.select else ""
    raise TraceError(
        f"has no routing arrays NAME and NAME_seqlen and no counts [layers, experts]{wanted}"
    )


def _routing_names(npz: SafeNpz, select: str | None) -> list[str]:
    if "ids" in npz and "seqlen" in npz:
        return ["ids"]
    return [
        name
        for name, header in npz.headers.items()
        if len(header.shape) == 3
        and header.dtype.kind in "iu"
        and f"{name}_seqlen" in npz
        and name.startswith(select or "")
    ]


def _count_names(npz: SafeNpz, select: str | None) -> list[str]:
    return [
        name
        for name, header in npz.headers.items()
        if len(header.shape) == 2 and header.dtype.kind in "iu" and name.startswith(select or "")
    ]


def _one_set(npz: SafeNpz, options: ReadOptions) -> RoutingTrace:
    labels = None
    if "cat" in npz:
        names = npz.read("cat")
        if names.dtype.kind != "U" or names.ndim != 1:
            raise TraceError("cat: must be one label per sequence")
        labels = tuple(str(name) for name in names.tolist())
    ids, lengths = npz.read("ids"), npz.read("seqlen")
    weights = npz.read("probs") if "probs" in npz else None
    return _build(ids, lengths, options, labels=labels, weights=weights)


def _routing(
    ids: dict[str, Array], lengths: dict[str, Array], options: ReadOptions, *, names: bool = True
) -> RoutingTrace:
    first = next(iter(ids))
    for name, array in ids.items():
        if array.ndim != 3 or array.dtype.kind not in "iu":
            raise TraceError(f"array {name!r}: must be integers [tokens, layers, top_k]")
        if array.shape[1:] != ids[first].shape[1:]:
            raise TraceError(
                f"array {name!r}: has [layers, top_k] = {list(array.shape[1:])}, but {first!r} has "
                f"{list(ids[first].shape[1:])}; choose arrays with select"
            )
        if lengths[name].ndim != 1 or int(lengths[name].sum()) != array.shape[0]:
            raise TraceError(f"array '{name}_seqlen': must sum to {array.shape[0]} tokens")
    labels = tuple(name for name in ids for _ in range(lengths[name].shape[0])) if names else None
    joined = np.concatenate(list(ids.values()))
    return _build(joined, np.concatenate(list(lengths.values())), options, labels=labels)


def _build(
    ids: Array,
    lengths: Array,
    options: ReadOptions,
    *,
    labels: tuple[str, ...] | None,
    weights: Array | None = None,
) -> RoutingTrace:
    if ids.ndim != 3 or ids.dtype.kind not in "iu" or not ids.size:
        raise TraceError("ids: must be integers [tokens, layers, top_k], not empty")
    return RoutingTrace(
        topk_ids=ids,
        num_experts=options.experts_of(int(ids.max())),
        layer_ids=options.layer_ids(ids.shape[1]),
        sequence_lengths=lengths,
        topk_weights=weights,
        labels=labels,
        metadata={"source_format": "raw"},
    )


def _counts(arrays: dict[str, Array], options: ReadOptions) -> CountTrace:
    shapes = {array.shape for array in arrays.values()}
    if len(shapes) > 1:
        prefixes = sorted({name.split("_")[0] for name in arrays})
        raise TraceError(
            f"has counts of different shapes: choose some with select ({', '.join(prefixes[:8])})"
        )
    counts = np.stack(list(arrays.values()))
    return CountTrace(
        counts=counts,
        layer_ids=options.layer_ids(counts.shape[1]),
        metadata={"source_format": "raw", "windows": ",".join(arrays)},
    )
