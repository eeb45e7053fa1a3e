"""Placements as npz: slot tables of all layers, and planned shares if there are any.

Keys: ``format`` ("moeserve-placement"), ``version`` (1), ``num_experts``, ``layer_ids`` int64,
``slots`` int64 [layers, ranks, max_slots] with -1 for a free slot and -2 where a rank has no such
slot, and optionally ``shares`` float64 of the same shape: the fraction of its expert that a slot
takes.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from moeserve_placement.placement import FORMAT, VERSION, Placement, PlacementError
from moeserve_placement.slot_table import Floats
from moeserve_placement.traces.files import MAX_BYTES, reading
from moeserve_placement.traces.safe_npz import SafeNpz, write_npz
from moeserve_placement.traces.trace import Array, TraceError

_NO_SLOT = -2
_MAX_TABLE_BYTES = 256 << 20
"""Of ``slots``: 32 million slots. As Python objects they need four times as much and more."""
_REQUIRED = {"format", "version", "num_experts", "layer_ids", "slots"}


def save_npz(path: Path, placement: Placement, *, shares: Floats | None = None) -> None:
    """Writes the placement; layers in ascending order, ``shares`` in that order too.

    Raises:
        PlacementError: the shares are of another shape, or ranks of very different sizes would
            make the table too large.
        TraceError: the file can not be written.
    """
    layer_ids = sorted(placement.layers)
    shape = (len(layer_ids), placement.num_ranks, placement.max_slots)
    if shares is not None and shares.shape != shape:
        raise PlacementError(f"shares: have shape {shares.shape}, must have {shape}")
    num_bytes = 8 * shape[0] * shape[1] * shape[2]
    if num_bytes > _MAX_TABLE_BYTES:
        raise PlacementError(
            f"slots: a table of {shape[0]} layers, {shape[1]} ranks and {shape[2]} slots needs "
            f"{num_bytes:,} bytes, must be at most {_MAX_TABLE_BYTES:,}; write .json"
        )
    slots = np.full(shape, _NO_SLOT, dtype=np.int64)
    for row, layer in enumerate(layer_ids):
        for rank, held in enumerate(placement.layers[layer]):
            slots[row, rank, : len(held)] = [-1 if expert is None else expert for expert in held]
    arrays = {
        "format": np.array(FORMAT),
        "version": np.array(VERSION),
        "num_experts": np.array(placement.num_experts),
        "layer_ids": np.array(layer_ids, dtype=np.int64),
        "slots": slots,
    }
    write_npz(path, arrays if shares is None else arrays | {"shares": shares})


def load_npz(path: Path, *, max_bytes: int = MAX_BYTES) -> tuple[Placement, Floats | None]:
    """The inverse of ``save_npz``: the placement and its shares, if any.

    max_bytes: limit on one array in memory; never more than 256 MiB.

    Raises:
        TraceError: it can not be read, is too large or not valid; the text names the file.
    """
    with SafeNpz(path, max_bytes=min(max_bytes, _MAX_TABLE_BYTES)) as npz, reading(path):
        return _parsed(npz)


def is_placement(npz: SafeNpz) -> bool:
    """Whether an npz has the arrays of a placement."""
    return {"format", "layer_ids", "slots"} <= set(npz.headers)


def _parsed(npz: SafeNpz) -> tuple[Placement, Floats | None]:
    missing = _REQUIRED - set(npz.headers)
    if missing or _scalar(npz, "format", "U") != FORMAT:
        raise TraceError(f"is not a placement: lacks {min(missing, default='the format name')}")
    if (version := _scalar(npz, "version", "iu")) != VERSION:
        raise TraceError(f"version = {version}: must be {VERSION}")
    num_experts = _scalar(npz, "num_experts", "iu")
    layer_ids, slots = npz.read("layer_ids"), npz.read("slots")
    if slots.ndim != 3 or slots.dtype.kind != "i" or layer_ids.shape != slots.shape[:1]:
        raise TraceError(f"slots: has shape {slots.shape} for {layer_ids.shape} layers")
    if layer_ids.dtype.kind != "i" or len(set(layer_ids.tolist())) != len(layer_ids):
        raise TraceError("layer_ids: must be distinct integers")
    if slots.size and slots.min() < _NO_SLOT:
        raise TraceError(f"slots: holds {slots.min()}, must be at least {_NO_SLOT}")
    layers = {
        layer: tuple(_rank_slots(rank) for rank in table.tolist())
        for layer, table in zip(layer_ids.tolist(), slots, strict=True)
    }
    placement = Placement(num_experts=num_experts, layers=layers)
    return placement, _shares(npz.read("shares"), slots) if "shares" in npz else None


def _scalar(npz: SafeNpz, name: str, kinds: str) -> Any:
    """The one number or text of an array without dimensions."""
    header = npz.headers[name]
    if header.shape or header.dtype.kind not in kinds:
        what = "text" if kinds == "U" else "integer"
        raise TraceError(f"{name}: must be one {what}, not {header.dtype} of shape {header.shape}")
    return npz.read(name).item()


def _rank_slots(rank: list[int]) -> tuple[int | None, ...]:
    return tuple(None if slot < 0 else slot for slot in rank if slot != _NO_SLOT)


def _shares(shares: Array, slots: Array) -> Floats:
    if shares.shape != slots.shape or shares.dtype != np.float64:
        raise TraceError(f"shares: must be float64 of shape {slots.shape}")
    if not ((shares >= 0) & (shares <= 1 + 1e-9)).all() or shares[slots < 0].any():
        raise TraceError("shares: must be in [0, 1], and 0 where a slot is free")
    return shares
