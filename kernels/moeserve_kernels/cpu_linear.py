"""``x @ weight.T`` in the fastest way torch has for the number of rows and this CPU.

Measured on two cores (milliseconds, weight 512 x 1024, torch 2.13, AVX2 without bfloat16):

    rows                                 1      2      4      8     32
    F.linear, float32                 0.05   0.11   0.23   0.26   0.38
    mm(weight, x.T), float32          0.05   0.08   0.08   0.17   0.25
    F.linear, bfloat16                0.06   0.11   0.20   0.40    -
    widen the weight, mm, float32     0.11   0.15   0.14   0.22   0.30

So: few rows go in as the right-hand side. A CPU that can not multiply bfloat16 (torch then falls
back to plain loops, 3 to 30 times slower) reads the weight as bfloat16, where bytes count, and
widens it to float32, tile by tile within the cache, as soon as there are rows to pay for that.
"""

from __future__ import annotations

import functools

import torch
from torch.nn import functional

_NARROW_ROWS = 1  # up to here reading bfloat16 directly wins over widening it
_TRANSPOSE_ROWS = 128  # up to here mm(weight, x.T) wins
_TILE_ELEMENTS = 1 << 19  # of a widened weight tile: 2 MiB of float32 stay in the cache


@functools.cache
def has_bfloat16() -> bool:
    """Whether torch multiplies bfloat16 matrices natively on this CPU (AVX512 or better)."""
    return torch._C._has_mkldnn and bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())


def compute_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which matrix products of ``dtype`` are fast here: itself or float32."""
    return torch.float32 if dtype == torch.bfloat16 and not has_bfloat16() else dtype


class CpuLinear:
    """``x [T, K] @ weight [N, K].T`` -> [T, N]; T may be 0.

    Where bfloat16 weights were widened the result is float32, else in the dtype of x; it may be a
    transposed view. The object owns the memory that weights are widened in, so that it stays in
    the cache; two threads must not share it.
    """

    def __init__(self) -> None:
        self._memory = torch.empty(_TILE_ELEMENTS)

    def __call__(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """The product."""
        num_rows = x.shape[0]
        if num_rows > _NARROW_ROWS and compute_dtype(weight.dtype) != weight.dtype:
            return self._widened(x.float(), weight)
        if 1 < num_rows <= _TRANSPOSE_ROWS and x.dtype == torch.float32:
            return torch.mm(weight, x.T).T
        return functional.linear(x, weight)

    def _widened(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        num_outputs, num_inputs = weight.shape
        step = max(_TILE_ELEMENTS // num_inputs, 1)
        if num_outputs <= step:  # an expert's: every call saved counts
            return torch.mm(self._widen(weight), x.T).T
        product = torch.empty(num_outputs, x.shape[0])
        for start in range(0, num_outputs, step):
            part = self._widen(weight[start : start + step])
            torch.mm(part, x.T, out=product[start : start + step])
        return product.T

    def _widen(self, weight: torch.Tensor) -> torch.Tensor:
        """``weight`` in float32, valid until the next call."""
        if weight.numel() > self._memory.numel():
            self._memory = torch.empty(weight.numel())
        return self._memory[: weight.numel()].view(weight.shape).copy_(weight)
