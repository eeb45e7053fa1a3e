"""Placements as arrays: int64 [num_layers, num_ranks, max_slots], -1 where a slot is free.

Planning and replay work on these tables; ``Placement`` is the validated form at the edges.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from moeserve_placement.placement import Placement, PlacementError
from moeserve_placement.topology import Topology

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]

FREE = -1


def slot_table(
    placement: Placement, layer_ids: Sequence[int], *, topology: Topology | None = None
) -> Ints:
    """The placement's layers as int64 [num_layers, num_ranks, max_slots], -1 where free.

    With a topology the table has its width. What a rank that is gone held is still in it, see
    ``surviving``.

    Raises:
        PlacementError: a layer is missing, or the placement does not fit the topology.
    """
    missing = [layer for layer in layer_ids if layer not in placement.layers]
    if missing:
        raise PlacementError(f"placement: has no layer {missing[0]}")
    width = topology.max_slots if topology else placement.max_slots
    if topology:
        _check_shape(placement, layer_ids, topology)
    values = [
        [
            [FREE if e is None else e for e in slots] + [FREE] * (width - len(slots))
            for slots in placement.layers[layer]
        ]
        for layer in layer_ids
    ]
    return np.array(values, dtype=np.int64).reshape(len(values), placement.num_ranks, width)


def surviving(table: Ints, topology: Topology) -> Ints:
    """The table without what ranks that are gone held."""
    return np.where(np.asarray(topology.alive)[None, :, None], table, FREE)


def is_complete(table: Ints, num_experts: int) -> bool:
    """Whether every layer holds every expert."""
    return bool((copy_counts(table, num_experts) > 0).all())


def _check_shape(placement: Placement, layer_ids: Sequence[int], topology: Topology) -> None:
    if placement.num_ranks != topology.num_ranks:
        raise PlacementError(
            f"placement: has {placement.num_ranks} ranks, the topology has {topology.num_ranks}"
        )
    for layer in layer_ids:
        for rank, slots in enumerate(placement.layers[layer]):
            if len(slots) > topology.slots_per_rank[rank]:
                raise PlacementError(
                    f"layer {layer}, rank {rank}: the placement has {len(slots)} slots, "
                    f"the topology has {topology.slots_per_rank[rank]}"
                )


def to_placement(
    table: Ints, layer_ids: Sequence[int], *, num_experts: int, topology: Topology
) -> Placement:
    """The validated placement of a table; each rank has the topology's slots.

    Raises:
        PlacementError: an expert is nowhere, or twice on one rank.
    """
    values = table.tolist()
    if (table < 0).any():
        values = [[[e if e >= 0 else None for e in held] for held in ranks] for ranks in values]
    sizes = topology.slots_per_rank
    layers = {
        int(layer): tuple(tuple(held[:n]) for held, n in zip(values[row], sizes, strict=True))
        for row, layer in enumerate(layer_ids)
    }
    return Placement(num_experts=num_experts, layers=layers)


def copy_counts(table: Ints, num_experts: int) -> Ints:
    """Copies of each expert: int64 [num_layers, num_experts]."""
    layers = len(table)
    keys = np.arange(layers)[:, None, None] * (num_experts + 1) + table + 1
    counts = np.bincount(keys.ravel(), minlength=layers * (num_experts + 1))
    return counts.reshape(layers, num_experts + 1)[:, 1:].astype(np.int64)


def holds(table: Ints, num_experts: int) -> NDArray[np.bool_]:
    """Whether a rank holds an expert: bool [num_layers, num_experts, num_ranks]."""
    layers, ranks, _ = table.shape
    held = np.zeros((layers, num_experts + 1, ranks), dtype=np.bool_)
    layer = np.arange(layers)[:, None, None]
    held[layer, table, np.arange(ranks)[None, :, None]] = True  # -1 writes the extra row
    return held[:, :num_experts]


def even_shares(table: Ints, num_experts: int) -> Floats:
    """Equal share of its expert for every slot: float64, shaped as the table, 0 where free."""
    counts = copy_counts(table, num_experts)
    padded = np.concatenate([np.maximum(counts, 1), np.ones((len(table), 1), np.int64)], axis=1)
    taken = padded[np.arange(len(table))[:, None, None], table]
    return np.where(table >= 0, 1.0 / taken, 0.0)


def rank_loads(loads: Floats, table: Ints, *, shares: Floats | None = None) -> Floats:
    """Load of each rank for one load vector per layer.

    loads: [..., num_layers, num_experts]. shares: as the table, default an even split.
    Returns float64 [..., num_layers, num_ranks].
    """
    num_experts = loads.shape[-1]
    if shares is None:
        shares = even_shares(table, num_experts)
    layer = np.arange(len(table))[:, None, None]
    taken = loads[..., layer, np.maximum(table, 0)]
    result: Floats = (taken * shares).sum(-1)
    return result


def imbalance(loads: Floats) -> Floats:
    """Largest over mean rank load, along the last axis; 1 where there is no load at all."""
    mean = loads.mean(-1)
    ratio: Floats = np.where(mean > 0, loads.max(-1) / np.where(mean > 0, mean, 1.0), 1.0)
    return ratio


def aligned(target: Ints, current: Ints, *, topology: Topology) -> Ints:
    """``target`` with its experts re-ordered inside each rank to sit where ``current`` has them.

    Which expert is on which rank does not change, only the slot: [num_layers, ranks, slots].
    """
    result = np.full_like(target, FREE)
    stays = (target[..., :, None] == current[..., None, :]) & (target[..., :, None] >= 0)
    layer, rank, wanted, at = np.nonzero(stays)
    result[layer, rank, at] = target[layer, rank, wanted]
    incoming = (target >= 0) & ~stays.any(-1)
    for row, g in zip(*np.nonzero(incoming.any(-1)), strict=True):
        new = target[row, g][incoming[row, g]]
        slots = topology.slots_per_rank[g]
        room = _room(result[row, g, :slots], current[row, g, :slots])
        result[row, g, room[: len(new)]] = new
    return result


def _room(result: Ints, current: Ints) -> Ints:
    """Slots not yet taken: free ones first, then those whose expert leaves."""
    open_slots = np.flatnonzero(result < 0)
    order = np.argsort(current[open_slots] >= 0, kind="stable")
    return open_slots[order]
