"""Ordering (token, expert) pairs for the grouped products."""

from __future__ import annotations

import torch

from moeserve_kernels import backend, check
from moeserve_kernels.alignment import Alignment, max_rows

MAX_SLOTS = 1024  # the width of a histogram tile


def align(
    topk_ids: torch.Tensor,
    num_slots: int,
    block_m: int,
    *,
    expert_map: torch.Tensor | None = None,
) -> Alignment:
    """Return the pairs sorted by slot, each slot's run padded to whole blocks of ``block_m`` rows.

    topk_ids: [T, k], int32 or int64: slots, or with ``expert_map`` experts; any strides. A negative
        id is a pair that is not here.
    expert_map: int32 [E], the slot of each expert on this rank, -1 for one of another rank.

    Within a slot pairs stand in the order of ``p = token * k + choice``: equal inputs give equal
    bits. Nothing waits for the device; sizes are the bounds ``alignment.max_rows`` gives. With
    ``4 * T * k <= num_slots`` nothing is sorted (``is_identity``), and ``block_slots`` may be a
    view of ``topk_ids``, whose negative ids need not be -1.

    Raises ValueError for a wrong shape or dtype, more than 1024 slots, or 2^30 rows. An id or slot
    out of range is reported within ``check.debug()`` only; otherwise its pair is dropped, or with
    the identity undefined.
    """
    check.dtype("topk_ids", topk_ids, torch.int32, torch.int64)
    check.shape("topk_ids", topk_ids, ("T", "k"))
    check.at_least("num_slots", num_slots, 1)
    check.at_least("block_m", block_m, 1)
    if num_slots > MAX_SLOTS:
        raise ValueError(f"num_slots = {num_slots}: must be at most {MAX_SLOTS}")
    if max_rows(topk_ids.numel(), num_slots, block_m) >= 2**30:
        raise ValueError(f"topk_ids: {topk_ids.numel()} pairs need 2^30 rows or more")
    if expert_map is not None:
        check.dtype("expert_map", expert_map, torch.int32)
        check.shape("expert_map", expert_map, ("E",))
        check.rows_contiguous("expert_map", expert_map)
        check.same_device(topk_ids=topk_ids, expert_map=expert_map)
        check.values("expert_map", expert_map, -1, num_slots)
    limit = num_slots if expert_map is None else expert_map.shape[0]
    check.values("topk_ids", topk_ids, -(2**31), limit)
    family = backend.implementation("align", topk_ids)
    alignment: Alignment = family.align(topk_ids, num_slots, block_m, expert_map=expert_map)
    return alignment
