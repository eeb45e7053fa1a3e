"""Root-mean-square norm on a GPU: one launch, each row read once when it fits the registers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
import triton

from moeserve_kernels import tables
from moeserve_kernels.device.kernels.norm import rms_norm_kernel
from moeserve_kernels.device.launch import Launch
from moeserve_kernels.device.targets import Target, target_of


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """See ``operations.norm.rms_norm``."""
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    target = target_of(x.device)
    rms_norm_launch(_three_dims(x), None, weight, eps, out, None, target=target).run()
    return out


def add_rms_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """See ``operations.norm.add_rms_norm``."""
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    total = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    inputs = (_three_dims(x), _three_dims(residual))
    rms_norm_launch(*inputs, weight, eps, out, total, target=target_of(x.device)).run()
    return out, total


def rms_norm_launch(
    x: torch.Tensor,
    residual: torch.Tensor | None,
    weight: torch.Tensor,
    eps: float,
    out: torch.Tensor,
    total: torch.Tensor | None,
    *,
    target: Target,
    tile: Mapping[str, int] | None = None,
) -> Launch:
    """Writes ``out`` and, given a residual, ``total``: contiguous, as many values as x [.., .., H].

    Raises ValueError for float64, which kernels do not compute.
    """
    if x.dtype == torch.float64:
        raise ValueError("x: dtype is float64, must be float32, float16 or bfloat16 in kernels")
    tile = tables.load("attention", target.name)["rms_norm"] if tile is None else tile
    num_outer, num_inner, width = x.shape
    num_rows = num_outer * num_inner
    block_h = max(1, min(triton.next_power_of_2(width), tile["elements"]))
    block_r = max(1, min(tile["elements"] // block_h, triton.next_power_of_2(num_rows)))
    args = {
        "x_ptr": x,
        "residual_ptr": x if residual is None else residual,
        "weight_ptr": weight,
        "out_ptr": out,
        "sum_ptr": out if total is None else total,
        "num_rows": num_rows,
        "num_inner": num_inner,
        "width": width,
        "eps": float(eps),
        "stride_xo": x.stride(0),
        "stride_xi": x.stride(1),
        "stride_ro": 0 if residual is None else residual.stride(0),
        "stride_ri": 0 if residual is None else residual.stride(1),
    }
    constants = {
        "RESIDUAL": residual is not None,
        "ONE_TILE": width <= block_h,
        "BLOCK_R": block_r,
        "BLOCK_H": block_h,
    }
    grid = (triton.cdiv(num_rows, block_r),)
    return Launch(rms_norm_kernel, grid, args, constants, {"num_warps": tile["num_warps"]})


def aot_cases(target: Target) -> Iterator[tuple[str, Launch]]:
    """Hidden sizes and head sizes of models, with and without a residual, on ``meta``."""
    for shape in ((4096, 1, 2048), (4096, 1, 7168), (4096, 1, 20480), (4096, 32, 128)):
        x = torch.empty(shape, dtype=torch.bfloat16, device="meta")
        weight = torch.empty(shape[2], dtype=torch.bfloat16, device="meta")
        label = f"{shape[1]} x {shape[2]}"
        yield f"norm {label}", rms_norm_launch(x, None, weight, 1e-6, x, None, target=target)
        yield f"add, norm {label}", rms_norm_launch(x, x, weight, 1e-6, x, x, target=target)


def _three_dims(x: torch.Tensor) -> torch.Tensor:
    """As [outer, inner, H]; a view where strides allow, as for heads cut out of a wider row."""
    if x.dim() == 1:
        return x[None, None]
    if x.dim() == 2:
        return x[:, None]
    return x if x.dim() == 3 else x.reshape(-1, *x.shape[-2:])
