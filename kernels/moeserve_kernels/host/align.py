"""Ordering pairs by slot on the CPU: one stable sort."""

from __future__ import annotations

import torch

from moeserve_kernels.alignment import Alignment, max_rows, takes_identity


def align(
    topk_ids: torch.Tensor,
    num_slots: int,
    block_m: int,
    *,
    expert_map: torch.Tensor | None = None,
) -> Alignment:
    """See ``operations.align.align``."""
    num_pairs, top_k = topk_ids.numel(), topk_ids.shape[1]
    slots = _slots(topk_ids, num_slots, expert_map)
    if takes_identity(num_pairs, num_slots):
        block_slots = slots.to(torch.int32)
        return Alignment(None, block_slots, None, None, num_pairs, top_k, block_m, True)
    # Pairs that are not here count as a slot after the last, whose run is cut off.
    slots = torch.where(slots < 0, num_slots, slots)
    ordered, pairs = torch.sort(slots, stable=True)
    counts = torch.bincount(slots, minlength=num_slots + 1)[:num_slots]
    num_blocks = (counts + block_m - 1) // block_m
    padding_before = num_blocks.cumsum(0) * block_m - counts.cumsum(0)  # of the slot and earlier
    padding_before -= num_blocks * block_m - counts
    here = int(counts.sum())
    num_rows = max_rows(num_pairs, num_slots, block_m)
    sorted_pairs = torch.full((num_rows,), num_pairs, dtype=torch.int32)
    rows = torch.arange(here) + padding_before[ordered[:here]]
    sorted_pairs[rows] = pairs[:here].to(torch.int32)
    block_slots = torch.full((num_rows // block_m,), -1, dtype=torch.int32)
    in_use = torch.repeat_interleave(torch.arange(num_slots, dtype=torch.int32), num_blocks)
    block_slots[: in_use.shape[0]] = in_use
    num_padded_rows = (num_blocks.sum(0, keepdim=True) * block_m).to(torch.int32)
    counts = counts.to(torch.int32)
    return Alignment(sorted_pairs, block_slots, counts, num_padded_rows, num_pairs, top_k, block_m)


def _slots(topk_ids: torch.Tensor, num_slots: int, expert_map: torch.Tensor | None) -> torch.Tensor:
    """int64 [T * k]: the slot of each pair, -1 when it is not here."""
    slots = topk_ids.reshape(-1).long()
    if expert_map is not None:
        known = (slots >= 0) & (slots < expert_map.shape[0])
        padded = torch.nn.functional.pad(expert_map.long(), (0, 1), value=-1)
        slots = padded[torch.where(known, slots, expert_map.shape[0])]
    return torch.where((slots >= 0) & (slots < num_slots), slots, -1)
