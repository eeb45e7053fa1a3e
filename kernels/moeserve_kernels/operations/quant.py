"""Quantisation: rows of activations at run time, expert weights when a model is loaded."""

from __future__ import annotations

import torch

from moeserve_kernels import backend, check
from moeserve_kernels.host import quant as host
from moeserve_kernels.weights import FORMATS, GROUP, ExpertWeights

FLOATS = (torch.float32, torch.float16, torch.bfloat16, torch.float64)
ROW_DTYPES = (torch.float8_e4m3fn, torch.int8)


def quant_rows(
    x: torch.Tensor,
    *,
    dtype: torch.dtype = torch.float8_e4m3fn,
    group_size: int | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return ``(q, scales)`` with ``x`` nearly ``q * scales``, one scale a row or a group of it.

    x: [T, K], any float dtype; rows may have any stride.
    dtype: float8_e4m3fn (largest value 448) or int8 (127).
    group_size: inputs that share a scale; None: the whole row.
    q: [T, K] of ``dtype``: ``x * (1 / scale)`` in float32, rounded to the nearest, ties to even.
    scales: float32 [T], or [T, ceil(K / group_size)]: the largest magnitude divided by the largest
        value, at least 2^-126, so rows of zeros give zeros.

    A row or group with a NaN or an infinity gets values 0 and scale NaN: it stays visible in
    what is made of it, and does no harm to others.

    Raises ValueError for a wrong shape or dtype.
    """
    check.dtype("x", x, *FLOATS)
    check.shape("x", x, ("T", "K"))
    check.rows_contiguous("x", x)
    check.one_of("dtype", dtype, ROW_DTYPES)
    if group_size is not None:
        check.at_least("group_size", group_size, 1)
    family = backend.implementation("quant", x)
    result: tuple[torch.Tensor, torch.Tensor] = family.quant_rows(
        x, dtype=dtype, group_size=group_size
    )
    return result


def quantize_experts(
    weights: torch.Tensor, format: str, bias: torch.Tensor | None = None
) -> ExpertWeights:
    """Return the weights in one of ``weights.FORMATS``, which says how each is laid out.

    weights: [S, N, K], any float dtype. bias: [S, N] or None, kept as it is.
    Scales are symmetric: the largest magnitude of the channel, block or group divided by the
    largest value (448 for fp8, 127 for int8, 7 for int4). Meant for load time: torch on any device,
    one slot at a time, so that the float32 copy of a slot is all the memory it needs.

    Raises ValueError for a wrong shape or dtype, int4 with K not a multiple of 128, and a weight
    that is NaN or infinite.
    """
    check.one_of("format", format, FORMATS)
    check.shape("weights", weights, ("S", "N", "K"))
    check.dtype("weights", weights, *FLOATS)
    if bias is not None:
        check.shape("bias", bias, weights.shape[:2])
        check.same_device(weights=weights, bias=bias)
    if format == "int4" and weights.shape[2] % GROUP != 0:
        raise ValueError(
            f"weights: K = {weights.shape[2]}, must be a multiple of {GROUP} for int4 "
            "(pad with zeros, or take int8)"
        )
    return host.quantize_experts(weights, format, bias)


def dequantize_experts(weights: ExpertWeights, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Return the matrices [S, N, K] that ``weights`` stand for: ``data * scale``, without bias.

    The product is taken in float32, then rounded to ``dtype``. Torch on any device.

    Raises ValueError when data and scales do not have the shapes of the format.
    """
    check.one_of("format", weights.format, FORMATS)
    check.shape("data", weights.data, ("S", "N", "K"))
    expected = host.scales_shape(weights)
    if expected is None:
        return weights.data.to(dtype)
    if weights.scales is None:
        raise ValueError(f"scales: None, must be {list(expected)} for {weights.format}")
    check.shape("scales", weights.scales, expected)
    check.dtype("scales", weights.scales, torch.float32)
    return host.dequantize_experts(weights, dtype)
