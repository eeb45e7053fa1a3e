"""Omni placements: a .npy array [ranks, layers, experts] of 0 and 1 (1: the rank holds the expert).

The array says nothing about slots: experts are read in id order, and the free slots and slot order
of a placement are lost on writing. Its layers are the MoE layers in order.
"""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np

from moeserve_placement.placement import Placement, PlacementError
from moeserve_placement.traces.files import MAX_BYTES, reading
from moeserve_placement.traces.options import ReadOptions
from moeserve_placement.traces.safe_npz import read_npy, write_npy
from moeserve_placement.traces.trace import MAX_EXPERTS, Array, TraceError


def read_omni(path: Path, options: ReadOptions | None = None) -> Placement:
    """The placement of a 0/1 array. Options: first_layer, max_bytes.

    Raises:
        TraceError: damaged, another shape, other values than 0 and 1, or an expert on no rank.
    """
    options = options or ReadOptions()
    array = read_npy(path, max_bytes=options.max_bytes)
    with reading(path):
        return omni_placement(array, options)


def omni_placement(array: Array, options: ReadOptions) -> Placement:
    """The placement of an array [ranks, layers, experts]; see ``read_omni``."""
    if array.ndim != 3 or not array.size or array.shape[2] > MAX_EXPERTS:
        raise TraceError(f"must be an array [ranks, layers, experts], not of shape {array.shape}")
    if not is_pattern(array):
        raise TraceError("must hold 0 and 1 only")
    held = array != 0
    layers = {
        layer: tuple(tuple(np.flatnonzero(held[rank, i]).tolist()) for rank in range(held.shape[0]))
        for i, layer in enumerate(options.layer_ids(held.shape[1]))
    }
    try:
        return Placement(num_experts=int(array.shape[2]), layers=layers)
    except PlacementError as error:
        raise TraceError(str(error)) from error


def is_pattern(array: Array) -> bool:
    """Whether an array holds only 0 and 1."""
    return array.dtype.kind in "biuf" and bool(np.isin(array, (0, 1)).all())


def write_omni(path: Path, placement: Placement) -> tuple[str, ...]:
    """Writes the 0/1 array as int32, layers in order of their index; says what is lost.

    Raises:
        TraceError: the file can not be written, or the array would be too large.
    """
    layers = sorted(placement.layers)
    shape = (placement.num_ranks, len(layers), placement.num_experts)
    if 4 * math.prod(shape) > MAX_BYTES:
        raise TraceError(
            f"an array [ranks, layers, experts] of {list(shape)} needs {4 * math.prod(shape):,} "
            f"bytes, must be at most {MAX_BYTES:,}"
        )
    array = np.zeros(shape, dtype=np.int32)
    in_order = True
    for i, layer in enumerate(layers):
        for rank, slots in enumerate(placement.layers[layer]):
            held = [expert for expert in slots if expert is not None]
            array[rank, i, held] = 1
            in_order &= list(slots) == sorted(held)
    write_npy(path, array)
    lost = [] if in_order else ["the order of slots and free slots"]
    if layers != list(range(len(layers))):
        lost.append("layer indices: Omni numbers MoE layers from 0")
    return tuple(lost)
