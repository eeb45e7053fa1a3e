"""SGLang's expert-distribution recorder files and its JSON of initial expert locations.

The recorder (``--expert-distribution-recorder-mode``) writes ``expert_distribution_recorder_*.pt``:

* ``stat``: {rank, logical_count int32 [steps, layers, logical experts],
  average_utilization_rate_over_window}; one step per forward pass, summed over ranks.
* ``per_pass`` and ``per_token``, one file per rank: {records: [{forward_pass_id, rank,
  gatherer_key, global_physical_count [layers, physical experts], and for per_token also input_ids,
  positions, extend_seq_lens, forward_mode, topk_ids_of_layer [layers, tokens, 8], misc_objects}],
  last_physical_to_logical_map [layers, physical experts]}. Ids are physical; -1 means none.

The layer axis counts all layers of the model: layers without a token (dense ones) are left out on
reading and come back empty on writing. Fields as in SGLang's eplb/expert_distribution.py.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np

from moeserve_placement.traces.files import MAX_BYTES, reading
from moeserve_placement.traces.options import ReadOptions, to_logical
from moeserve_placement.traces.torch_file import load_torch_file, save_torch_file
from moeserve_placement.traces.trace import (
    MAX_LAYERS,
    Array,
    CountTrace,
    RoutingTrace,
    TraceError,
)

_MIN_COLUMNS = 8
"""Columns of topk_ids_of_layer: SGLang always stores this many."""
_DECODE = 2
"""ForwardMode.DECODE: each token of the pass belongs to another request."""
_EXTEND = 1


def read_sglang(path: Path, options: ReadOptions | None = None) -> RoutingTrace | CountTrace:
    """The trace of a recorder file: counts for stat and per_pass, routing for per_token.

    per_token: a prefill pass gives one sequence per entry of extend_seq_lens, a decode pass one
    sequence per token, since the recorder does not say which request a token belongs to. Tokens
    that have no expert in some MoE layer (padding) are dropped and counted in the metadata.

    Raises:
        TraceError: torch is missing, the file is damaged, or not of one of these layouts.
    """
    options = options or ReadOptions()
    loaded = load_torch_file(path, max_bytes=options.max_bytes)
    with reading(path):
        return parse_sglang(loaded, options)


def parse_sglang(loaded: Any, options: ReadOptions) -> RoutingTrace | CountTrace:
    """The trace of a loaded recorder object, tensors as numpy arrays; see ``read_sglang``."""
    if not isinstance(loaded, dict):
        raise TraceError("must hold a dict, as SGLang's recorder writes it")
    if "logical_count" in loaded:
        if not isinstance(loaded["logical_count"], np.ndarray):
            raise TraceError("logical_count: must be a tensor")
        return counts_trace(loaded["logical_count"], options, mode="stat")
    records = loaded.get("records")
    if not isinstance(records, list) or not records:
        raise TraceError("has neither logical_count nor records: not from SGLang's recorder")
    if not all(isinstance(record, dict) for record in records):
        raise TraceError("records: must be a list of dicts")
    slots = _array(loaded, "last_physical_to_logical_map", num_dims=2)
    records = sorted(records, key=_pass_id)
    if all("topk_ids_of_layer" in record for record in records):
        return _routing(records, slots, options)
    counts = np.stack([_array(record, "global_physical_count", num_dims=2) for record in records])
    return counts_trace(
        to_logical(counts, slots, num_experts=options.num_experts), options, mode="per_pass"
    )


def counts_trace(logical_count: Array, options: ReadOptions, *, mode: str) -> CountTrace:
    """Counts [steps, layers, experts] (or one step [layers, experts]) without the empty layers."""
    counts = logical_count[None] if logical_count.ndim == 2 else logical_count
    if counts.ndim != 3 or counts.dtype.kind not in "iu":
        raise TraceError("logical_count: must be integers [steps, layers, experts]")
    layers = np.flatnonzero(counts.any(axis=(0, 2)))
    if not layers.size:
        raise TraceError("logical_count: has no tokens at all")
    if options.num_experts not in (None, counts.shape[2]):
        raise TraceError(
            f"num_experts = {options.num_experts}: the file has {counts.shape[2]} per layer"
        )
    return CountTrace(
        counts=counts[:, layers],
        layer_ids=tuple((layers + options.first_layer).tolist()),
        metadata={"source_format": "sglang", "recorder_mode": mode},
    )


def write_sglang(path: Path, trace: RoutingTrace | CountTrace) -> tuple[str, ...]:
    """Writes a recorder file: ``stat`` from counts, ``per_token`` from routing; says what is lost.

    Raises:
        TraceError: torch is missing, the file can not be written, or a layer index is so high that
            a row for every layer below it would be too much.
    """
    if isinstance(trace, CountTrace):
        save_torch_file(path, _stat(trace))
        lost = ["metadata"] if trace.metadata else []
        if trace.tokens_per_window is not None:
            lost.append("tokens_per_window")
        if not trace.counts.any(axis=(0, 2)).all():
            lost.append("layers without tokens: they read as dense layers")
        return tuple(lost)
    save_torch_file(path, _per_token(trace))
    lost = [
        name
        for name in ("topk_weights", "labels", "arrival_times_s")
        if getattr(trace, name) is not None
    ]
    return (*lost, *(["metadata"] if trace.metadata else []))


def _routing(records: list[dict[str, Any]], slots: Array, options: ReadOptions) -> RoutingTrace:
    blocks, lengths, labels = [], [], []
    for record in records:
        block = _array(record, "topk_ids_of_layer", num_dims=3)
        if block.shape[0] != slots.shape[0]:
            raise TraceError("topk_ids_of_layer: its layers differ from the physical map's")
        mode = record["forward_mode"] if type(record.get("forward_mode")) is int else None
        found = _lengths(record.get("extend_seq_lens"), mode, block.shape[1])
        blocks.append(block)
        lengths += found
        labels += ["decode" if mode == _DECODE else "extend"] * len(found)
    if len({block.shape[2] for block in blocks}) > 1:
        raise TraceError("topk_ids_of_layer: has another number of columns in some records")
    physical = np.concatenate(blocks, axis=1)
    layers, columns = _used(physical)
    ids = _to_logical_ids(physical[layers][:, :, columns], slots[layers])
    complete = (ids >= 0).all(axis=(0, 2))
    # A sequence that loses all its tokens vanishes.
    owner = np.repeat(np.arange(len(lengths)), lengths)[complete]
    kept, kept_lengths = np.unique(owner, return_counts=True)
    if not kept.size:
        raise TraceError("topk_ids_of_layer: no token has an expert in all MoE layers")
    ids = np.ascontiguousarray(ids[:, complete].transpose(1, 0, 2))
    return RoutingTrace(
        topk_ids=ids,
        num_experts=options.experts_of(int(slots.max())),
        layer_ids=tuple((layers + options.first_layer).tolist()),
        sequence_lengths=kept_lengths,
        labels=tuple(labels[i] for i in kept.tolist()),
        metadata={
            "source_format": "sglang",
            "recorder_mode": "per_token",
            "dropped_tokens": str(int((~complete).sum())),
        },
    )


def _used(physical: Array) -> tuple[Array, Array]:
    """Layers and columns of ids [layers, tokens, columns] that hold any id."""
    present = physical >= 0
    layers = np.flatnonzero(present.any(axis=(1, 2)))
    columns = np.flatnonzero(present.any(axis=(0, 1)))
    if not layers.size:
        raise TraceError("topk_ids_of_layer: has no expert id at all")
    return layers, columns


def _to_logical_ids(physical: Array, slots: Array) -> Array:
    if int(physical.min()) < -1 or int(physical.max()) >= slots.shape[1]:
        raise TraceError(f"topk_ids_of_layer: ids must be in [-1, {slots.shape[1]})")
    padded = np.concatenate([slots, np.full((slots.shape[0], 1), -1, slots.dtype)], axis=1)
    # Index -1 is the padding column, so "no expert" stays -1.
    flat = np.take_along_axis(padded, physical.reshape(physical.shape[0], -1).astype(np.int64), 1)
    return flat.reshape(physical.shape)


def _lengths(extend_seq_lens: Any, mode: Any, num_tokens: int) -> list[int]:
    if isinstance(extend_seq_lens, list) and all(type(n) is int and n > 0 for n in extend_seq_lens):
        rest = num_tokens - sum(extend_seq_lens)
        if rest >= 0:
            # Tokens beyond the requests are padding; they carry no experts and drop out later.
            return extend_seq_lens + ([rest] if rest else [])
    if mode == _DECODE:
        return [1] * num_tokens
    return [num_tokens] if num_tokens else []


def all_layers(layer_ids: Iterable[int], bytes_per_layer: int, *, max_bytes: int) -> int:
    """Layers of a model that has these ones, for files with a row for every layer of the model.

    Raises:
        TraceError: more than MAX_LAYERS, or so many that the file would have more than max_bytes.
    """
    highest = max(layer_ids)
    if highest >= MAX_LAYERS:
        raise TraceError(
            f"layer_ids: holds {highest}, must be below {MAX_LAYERS}: SGLang's files have a row "
            "for every layer of the model"
        )
    num_bytes = (highest + 1) * bytes_per_layer
    if num_bytes > max_bytes:
        raise TraceError(
            f"layer_ids: a row for every layer up to {highest} needs {num_bytes:,} bytes, must be "
            f"at most {max_bytes:,}"
        )
    return highest + 1


def _stat(trace: CountTrace) -> dict[str, Any]:
    row_bytes = 4 * trace.num_windows * trace.num_experts
    num_layers = all_layers(trace.layer_ids, row_bytes, max_bytes=MAX_BYTES)
    counts = np.zeros((trace.num_windows, num_layers, trace.num_experts), dtype=np.int32)
    if int(trace.counts.max()) > np.iinfo(np.int32).max:
        raise TraceError("counts: SGLang stores int32, a count is larger")
    counts[:, list(trace.layer_ids)] = trace.counts
    return {"rank": 0, "logical_count": counts, "average_utilization_rate_over_window": None}


def _per_token(trace: RoutingTrace) -> dict[str, Any]:
    columns = max(_MIN_COLUMNS, trace.top_k)
    row_bytes = 4 * (trace.num_tokens * columns + trace.num_sequences * trace.num_experts)
    num_layers = all_layers(trace.layer_ids, row_bytes, max_bytes=MAX_BYTES)
    slots = np.tile(np.arange(trace.num_experts, dtype=np.int64), (num_layers, 1))
    records = [
        _record(trace, i, int(start), num_layers) for i, start in enumerate(trace.sequence_starts)
    ]
    return {"records": records, "last_physical_to_logical_map": slots}


def _record(trace: RoutingTrace, index: int, start: int, num_layers: int) -> dict[str, Any]:
    length = int(trace.sequence_lengths[index])
    columns = max(_MIN_COLUMNS, trace.top_k)
    ids = np.full((num_layers, length, columns), -1, dtype=np.int32)
    tokens = trace.topk_ids[start : start + length].astype(np.int32)
    ids[list(trace.layer_ids), :, : trace.top_k] = tokens.transpose(1, 0, 2)
    counts = np.zeros((num_layers, trace.num_experts), dtype=np.int32)
    counts[list(trace.layer_ids)] = trace.counts(start, start + length)
    return {
        "forward_pass_id": index,
        "rank": 0,
        "gatherer_key": "primary",
        "input_ids": [0] * length,  # not known
        "positions": list(range(length)),
        "extend_seq_lens": [length],
        "forward_mode": _EXTEND,
        "topk_ids_of_layer": ids,
        "misc_objects": [],
        "global_physical_count": counts,
    }


def _pass_id(record: dict[str, Any]) -> int:
    pass_id = record.get("forward_pass_id")
    if not isinstance(pass_id, int):
        raise TraceError("records: forward_pass_id must be an integer")
    return pass_id


def _array(holder: dict[str, Any], name: str, *, num_dims: int) -> Array:
    value = holder.get(name)
    if not isinstance(value, np.ndarray) or value.ndim != num_dims or value.dtype.kind not in "iu":
        raise TraceError(f"{name}: must be an integer tensor of {num_dims} dimensions")
    if not value.size:
        raise TraceError(f"{name}: shape {value.shape} is empty")
    return value
