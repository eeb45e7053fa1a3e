"""Quantisation as its formula: value by value nearest of ``x / scale``."""

from __future__ import annotations

import torch

from moeserve_kernels.weights import ExpertWeights


def quant_rows(
    x: torch.Tensor,
    *,
    dtype: torch.dtype = torch.float8_e4m3fn,
    group_size: int | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """See ``operations.quant.quant_rows``; quotients are in the dtype of ``x``, at least float32.

    In float64 the nearest value may be the next one where float32 rounds a quotient onto a tie.
    """
    x = x.to(torch.promote_types(x.dtype, torch.float32))
    most = 127.0 if dtype == torch.int8 else 448.0
    q = torch.empty(x.shape, dtype=dtype, device=x.device)
    scales = []
    for start in range(0, max(x.shape[1], 1), group_size or max(x.shape[1], 1)):
        group = x[:, start : start + (group_size or x.shape[1])]
        largest = torch.cat([group.abs(), group.new_zeros(x.shape[0], 1)], 1).max(1).values
        scale = torch.clamp(largest / most, min=2.0**-126)
        broken = ~torch.isfinite(largest)
        quotient = torch.where(broken[:, None], 0, group * (1 / scale[:, None])).clamp(-most, most)
        q[:, start : start + group.shape[1]] = (
            quotient.round().to(dtype) if dtype == torch.int8 else quotient.to(dtype)
        )
        scales.append(torch.where(broken, torch.nan, scale).float())
    return q, scales[0] if group_size is None else torch.stack(scales, 1)


def dequantize_experts(weights: ExpertWeights, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    """See ``operations.quant.dequantize_experts``, by index: value (n, k) times its scale."""
    if weights.scales is None:
        return weights.data.to(dtype)
    n = torch.arange(weights.num_outputs)[:, None]
    k = torch.arange(weights.num_inputs)[None, :]
    scales = weights.scales.to(dtype)
    if weights.format == "int4":
        byte = weights.data[:, n, k // 128 * 64 + k % 64].long()
        value = torch.where(k % 128 < 64, byte % 16, byte // 16) - 8
        return value.to(dtype) * scales[:, n, k // 128]
    if weights.format == "fp8_block":
        return weights.data.to(dtype) * scales[:, n // 128, k // 128]
    return weights.data.to(dtype) * scales[:, n]
