"""Quantisation of rows on a GPU: one launch, each row read once when it fits the registers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
import triton

from moeserve_kernels import tables
from moeserve_kernels.device.kernels import quant as kernels
from moeserve_kernels.device.launch import Launch
from moeserve_kernels.device.targets import Target, target_of

LARGEST = {torch.float8_e4m3fn: 448.0, torch.int8: 127.0}


def quant_rows(
    x: torch.Tensor,
    *,
    dtype: torch.dtype = torch.float8_e4m3fn,
    group_size: int | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """See ``operations.quant.quant_rows``."""
    num_tokens, width = x.shape
    q = torch.empty(num_tokens, width, dtype=dtype, device=x.device)
    num_groups = 1 if group_size is None else triton.cdiv(width, group_size)
    scales = torch.empty(num_tokens, num_groups, dtype=torch.float32, device=x.device)
    target = target_of(x.device)
    quant_rows_launch(x, q, scales, group_size=group_size, target=target).run()
    return q, scales[:, 0] if group_size is None else scales


def quant_rows_launch(
    x: torch.Tensor,
    q: torch.Tensor,
    scales: torch.Tensor,
    *,
    group_size: int | None,
    target: Target,
    source_rows: torch.Tensor | None = None,
    tile: Mapping[str, int] | None = None,
) -> Launch:
    """What writes ``q`` [R, K] and ``scales`` [R, groups] from rows of ``x``.

    source_rows: int32 [R], the row of x for each row of q, negative: unwritten; None: the same.
    """
    tile = tables.load("rows", target.name)["quant_rows"] if tile is None else tile
    num_rows, width = q.shape
    size = max(1, width if group_size is None else min(group_size, width))
    num_groups = scales.shape[1]
    block_k = min(triton.next_power_of_2(size), tile["elements"])
    block_u = max(
        1, min(tile["elements"] // block_k, triton.next_power_of_2(num_rows * num_groups))
    )
    # NVIDIA's chips with fp8 convert as needed, from float32 at once; others may round twice.
    by_bits = target.kind != "cuda" or not target.fp8
    is_int8 = q.dtype == torch.int8
    args = {
        "x_ptr": x,
        "source_rows_ptr": x if source_rows is None else source_rows,
        "q_ptr": q.view(torch.uint8) if by_bits and not is_int8 else q,
        "scales_ptr": scales,
        "num_units": num_rows * num_groups,
        "num_groups": num_groups,
        "group_size": size,
        "width": width,
        "stride_x": x.stride(0),
        "stride_q": q.stride(0),
    }
    constants = {
        "HAS_SOURCE_ROWS": source_rows is not None,
        "LARGEST": LARGEST[q.dtype],
        "ROUND": "int8" if is_int8 else "fp8_bits" if by_bits else "fp8",
        "ONE_TILE": size <= block_k,
        "IS_RAGGED": width % size != 0,
        "BLOCK_U": block_u,
        "BLOCK_K": block_k,
    }
    grid = (triton.cdiv(num_rows * num_groups, block_u),)
    return Launch(
        kernels.quant_rows_kernel, grid, args, constants, {"num_warps": tile["num_warps"]}
    )


def aot_cases(target: Target) -> Iterator[tuple[str, Launch]]:
    """Both dtypes at the widths of models, whole rows and groups, on the ``meta`` device."""
    shapes = [(2048, None), (4096, None), (7168, None), (14336, None), (7168, 128), (768, 128)]
    for width, group_size in shapes:
        for q_dtype in LARGEST:
            for dtype in (torch.float32, torch.bfloat16):
                x = torch.empty(4096, width, dtype=dtype, device="meta")
                q = torch.empty(4096, width, dtype=q_dtype, device="meta")
                groups = 1 if group_size is None else triton.cdiv(width, group_size)
                scales = torch.empty(4096, groups, dtype=torch.float32, device="meta")
                launch = quant_rows_launch(x, q, scales, group_size=group_size, target=target)
                yield f"quant_rows_kernel K{width} group {group_size} {dtype} {q_dtype}", launch
