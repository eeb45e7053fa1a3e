"""Ordering pairs by slot, as loops over Python lists."""

from __future__ import annotations

import torch

from moeserve_kernels.alignment import Alignment


def align(
    topk_ids: torch.Tensor,
    num_slots: int,
    block_m: int,
    *,
    expert_map: torch.Tensor | None = None,
) -> Alignment:
    """See ``operations.align.align``."""
    num_pairs, top_k = topk_ids.numel(), topk_ids.shape[1]
    slots = [_slot(int(one), num_slots, expert_map) for one in topk_ids.flatten().tolist()]
    if 4 * num_pairs <= num_slots:
        block_slots = _int32(slots, topk_ids)
        return Alignment(None, block_slots, None, None, num_pairs, top_k, block_m, True)
    rows: list[int] = []
    blocks: list[int] = []
    counts: list[int] = []
    for slot in range(num_slots):
        run = [pair for pair in range(num_pairs) if slots[pair] == slot]
        counts.append(len(run))
        while len(run) % block_m != 0:
            run.append(num_pairs)
        rows += run
        blocks += [slot] * (len(run) // block_m)
    in_use = len(rows)
    most = num_pairs + min(num_pairs, num_slots) * (block_m - 1)
    while len(rows) < most:
        rows += [num_pairs] * block_m
        blocks.append(-1)
    sorted_pairs, block_slots = _int32(rows, topk_ids), _int32(blocks, topk_ids)
    padded = _int32([in_use], topk_ids)
    return Alignment(
        sorted_pairs, block_slots, _int32(counts, topk_ids), padded, num_pairs, top_k, block_m
    )


def _slot(one: int, num_slots: int, expert_map: torch.Tensor | None) -> int:
    """The slot of an id, -1 when the pair is not here."""
    if expert_map is not None:
        one = int(expert_map[one]) if 0 <= one < expert_map.shape[0] else -1
    return one if 0 <= one < num_slots else -1


def _int32(values: list[int], like: torch.Tensor) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32, device=like.device)
