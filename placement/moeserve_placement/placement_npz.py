"""Placements as npz: slot tables of all layers, and planned shares if there are any.

Keys: ``format`` ("moeserve-placement"), ``version`` (1), ``num_experts``, ``layer_ids`` int64,
``slots`` int64 [layers, ranks, max_slots] with -1 for a free slot and -2 where a rank has no such
slot, and optionally ``shares`` float64 of the same shape: the fraction of its expert that a slot
takes. Read without pickle.
"""

from __future__ import annotations

import zipfile
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from moeserve_placement.placement import FORMAT, VERSION, Placement, PlacementError
from moeserve_placement.slot_table import Floats

_NO_SLOT = -2


def save_npz(path: Path, placement: Placement, *, shares: Floats | None = None) -> None:
    """Writes the placement; layers in ascending order, ``shares`` in that order too.

    Raises:
        PlacementError: the shares are of another shape.
    """
    layer_ids = sorted(placement.layers)
    shape = (len(layer_ids), placement.num_ranks, placement.max_slots)
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
    if shares is not None:
        if shares.shape != shape:
            raise PlacementError(f"shares: have shape {shares.shape}, must have {shape}")
        arrays["shares"] = shares
    with path.open("wb") as file:
        np.savez_compressed(file, **arrays)  # type: ignore[arg-type]


def load_npz(path: Path) -> tuple[Placement, Floats | None]:
    """The inverse of ``save_npz``: the placement and its shares, if any.

    Raises:
        PlacementError: it can not be read or is not valid; the text names the file.
    """
    try:
        with np.load(path, allow_pickle=False) as file:
            return _parsed(file)
    except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile) as error:
        reason = getattr(error, "strerror", None) or error
        raise PlacementError(f"placement file {path}: {reason}") from error


def _parsed(file: np.lib.npyio.NpzFile) -> tuple[Placement, Floats | None]:
    if not isinstance(file, np.lib.npyio.NpzFile):
        raise PlacementError("is not an npz archive")
    missing = {"format", "version", "num_experts", "layer_ids", "slots"} - set(file.files)
    if missing or str(file["format"]) != FORMAT:
        raise PlacementError(f"is not a placement: lacks {min(missing, default='the format name')}")
    if file["version"].shape or int(file["version"]) != VERSION:
        raise PlacementError(f"version = {file['version']}: must be {VERSION}")
    layer_ids, slots = file["layer_ids"], file["slots"]
    if slots.ndim != 3 or slots.dtype.kind != "i" or layer_ids.shape != slots.shape[:1]:
        raise PlacementError(f"slots: has shape {slots.shape} for {layer_ids.shape} layers")
    if layer_ids.dtype.kind != "i" or len(set(layer_ids.tolist())) != len(layer_ids):
        raise PlacementError("layer_ids: must be distinct integers")
    if slots.size and slots.min() < _NO_SLOT:
        raise PlacementError(f"slots: holds {slots.min()}, must be at least {_NO_SLOT}")
    layers = {
        int(layer): tuple(_rank_slots(rank) for rank in table)
        for layer, table in zip(layer_ids, slots, strict=True)
    }
    placement = Placement(num_experts=int(file["num_experts"]), layers=layers)
    return placement, _shares(file, slots) if "shares" in file.files else None


def _rank_slots(rank: NDArray[np.int64]) -> tuple[int | None, ...]:
    return tuple(None if slot < 0 else int(slot) for slot in rank if slot != _NO_SLOT)


def _shares(file: np.lib.npyio.NpzFile, slots: NDArray[np.int64]) -> Floats:
    shares = file["shares"]
    if shares.shape != slots.shape or shares.dtype != np.float64:
        raise PlacementError(f"shares: must be float64 of shape {slots.shape}")
    if not ((shares >= 0) & (shares <= 1 + 1e-9)).all() or shares[slots < 0].any():
        raise PlacementError("shares: must be in [0, 1], and 0 where a slot is free")
    result: Floats = shares
    return result
