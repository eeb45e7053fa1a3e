"""Ordering pairs by slot on a GPU: one launch for few pairs, three for many, or none."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
import triton

from moeserve_kernels import tables
from moeserve_kernels.alignment import Alignment, max_rows, takes_identity
from moeserve_kernels.device.kernels import align as kernels
from moeserve_kernels.device.launch import Launch
from moeserve_kernels.device.targets import Target, target_of


def align(
    topk_ids: torch.Tensor,
    num_slots: int,
    block_m: int,
    *,
    expert_map: torch.Tensor | None = None,
) -> Alignment:
    """See ``operations.align.align``."""
    target = target_of(topk_ids.device)
    alignment, launches = align_launches(
        topk_ids, num_slots, block_m, expert_map=expert_map, target=target
    )
    for launch in launches:
        launch.run()
    return alignment


def align_launches(
    topk_ids: torch.Tensor,
    num_slots: int,
    block_m: int,
    *,
    expert_map: torch.Tensor | None,
    target: Target,
    tile: Mapping[str, int] | None = None,
) -> tuple[Alignment, list[Launch]]:
    """The alignment with its tensors unwritten, and what writes them."""
    tile = tables.load("rows", target.name)["align"] if tile is None else tile
    num_pairs, top_k = topk_ids.numel(), topk_ids.shape[1]
    source = _source(topk_ids, num_slots, expert_map, tile["chunk"])
    if takes_identity(num_pairs, num_slots):
        block_slots, launches = _identity(topk_ids, expert_map, source, tile)
        return Alignment(None, block_slots, None, None, num_pairs, top_k, block_m, True), launches
    num_rows = max_rows(num_pairs, num_slots, block_m)
    sizes = (num_rows, num_rows // block_m, num_slots, 1)
    sorted_pairs, block_slots, counts, padded = (_int32(size, topk_ids) for size in sizes)
    alignment = Alignment(sorted_pairs, block_slots, counts, padded, num_pairs, top_k, block_m)
    return alignment, _sort_launches(alignment, source, tile)


def scan_launch(
    chunk_counts: torch.Tensor, totals: torch.Tensor, tile: Mapping[str, int]
) -> Launch:
    """Sums over the chunks of [chunks, columns], exclusive and in place; columns' sums apart."""
    num_chunks, num_columns = chunk_counts.shape
    return Launch(
        kernels.scan_chunks_kernel,
        (triton.cdiv(num_columns, tile["scan_columns"]),),
        {
            "chunk_counts_ptr": chunk_counts,
            "totals_ptr": totals,
            "num_chunks": num_chunks,
            "num_columns": num_columns,
        },
        {"BLOCK_CHUNKS": tile["scan_chunks"], "BLOCK_COLUMNS": tile["scan_columns"]},
        {"num_warps": tile["num_warps"]},
    )


def _source(
    topk_ids: torch.Tensor, num_slots: int, expert_map: torch.Tensor | None, chunk: int
) -> tuple[dict[str, Any], dict[str, Any]]:
    """The arguments and constants with which all kernels read the pairs."""
    args = {
        "ids_ptr": topk_ids,
        "map_ptr": topk_ids if expert_map is None else expert_map,
        "num_pairs": topk_ids.numel(),
        "top_k": topk_ids.shape[1],
        "num_ids": num_slots if expert_map is None else expert_map.shape[0],
        "num_slots": num_slots,
        "stride_t": topk_ids.stride(0),
        "stride_k": topk_ids.stride(1),
    }
    return args, {"HAS_MAP": expert_map is not None, "CHUNK": chunk}


def _sort_launches(
    alignment: Alignment,
    source: tuple[dict[str, Any], dict[str, Any]],
    tile: Mapping[str, int],
) -> list[Launch]:
    counts, block_slots, block_m = alignment.counts, alignment.block_slots, alignment.block_m
    assert counts is not None
    args, constants = source
    options = {"num_warps": tile["num_warps"]}
    block_s = triton.next_power_of_2(counts.shape[0] + 1)  # one more: pairs that are not here
    outputs = {
        "counts_ptr": counts,
        "sorted_ptr": alignment.sorted_pairs,
        "block_slots_ptr": block_slots,
        "num_padded_rows_ptr": alignment.num_padded_rows,
        "num_blocks": block_slots.shape[0],
        "block_m": block_m,
    }
    constants = constants | {"BLOCK_S": block_s}
    blocks = {"BLOCK_B": tile["fill_blocks"], "BLOCK_M": triton.next_power_of_2(block_m)}
    whole = constants | blocks
    if alignment.num_pairs <= tile["once_pairs"]:
        return [Launch(kernels.align_once_kernel, (1,), args | outputs, whole, options)]
    num_chunks = triton.cdiv(alignment.num_pairs, tile["chunk"])
    chunks = _int32(num_chunks * counts.shape[0], counts).view(num_chunks, -1)
    counting = args | {"chunk_counts_ptr": chunks}
    placing = args | outputs | {"chunk_offsets_ptr": chunks}
    return [
        Launch(kernels.count_chunks_kernel, (num_chunks,), counting, constants, options),
        scan_launch(chunks, counts, tile),
        Launch(kernels.place_pairs_kernel, (num_chunks,), placing, whole, options),
    ]


def _identity(
    topk_ids: torch.Tensor,
    expert_map: torch.Tensor | None,
    source: tuple[dict[str, Any], dict[str, Any]],
    tile: Mapping[str, int],
) -> tuple[torch.Tensor, list[Launch]]:
    """The slot of each pair; where the ids are that already, nothing is launched."""
    if expert_map is None and topk_ids.dtype == torch.int32 and topk_ids.is_contiguous():
        return topk_ids.view(-1), []
    args, constants = source
    block_slots = _int32(topk_ids.numel(), topk_ids)
    grid = (triton.cdiv(topk_ids.numel(), tile["chunk"]),)
    args = args | {"slots_ptr": block_slots}
    options = {"num_warps": tile["num_warps"]}
    return block_slots, [Launch(kernels.map_ids_kernel, grid, args, constants, options)]


def _int32(size: int, like: torch.Tensor) -> torch.Tensor:
    return torch.empty(size, dtype=torch.int32, device=like.device)


def aot_cases(target: Target) -> Iterator[tuple[str, Launch]]:
    """Every kernel at the shapes of models and both widths of ids, on the ``meta`` device."""
    shapes = [  # tokens, top_k, experts, slots, rows of a block
        (1, 8, 128, 128, 16),
        (16, 8, 128, 128, 16),
        (4096, 8, 128, 128, 128),
        (4096, 2, 8, 8, 64),
        (4096, 8, 256, 32, 128),
        (64, 8, 1024, 1024, 16),
    ]
    for tokens, top_k, experts, slots, block_m in shapes:
        for dtype, mapped in ((torch.int32, False), (torch.int64, True)):
            ids = torch.empty(tokens, top_k, dtype=dtype, device="meta")
            expert_map = torch.empty(experts, dtype=torch.int32, device="meta") if mapped else None
            _, launches = align_launches(ids, slots, block_m, expert_map=expert_map, target=target)
            label = f"T{tokens} k{top_k} E{experts} S{slots} BM{block_m} {ids.dtype}"
            for launch in launches:
                yield f"{launch.kernel.fn.__name__} {label}", launch
