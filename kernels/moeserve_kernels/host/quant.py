"""Quantisation in torch; what is done to expert weights runs on any device."""

from __future__ import annotations

import torch
from torch.nn import functional

from moeserve_kernels.weights import GROUP, ExpertWeights

LARGEST = {torch.float8_e4m3fn: 448.0, torch.int8: 127.0}
SMALLEST_SCALE = 2.0**-126  # the least normal float32: a GPU may take smaller ones as zero
_DTYPES = {
    "fp8_channel": torch.float8_e4m3fn,
    "fp8_block": torch.float8_e4m3fn,
    "int8": torch.int8,
}


def quant_rows(
    x: torch.Tensor,
    *,
    dtype: torch.dtype = torch.float8_e4m3fn,
    group_size: int | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """See ``operations.quant.quant_rows``."""
    num_tokens, width = x.shape
    size = width if group_size is None else group_size
    num_groups = -(-width // size) if size > 0 else 1
    padded = functional.pad(x.float(), (0, num_groups * size - width))
    groups = padded.view(num_tokens, num_groups, size)
    scales = _scale(_amax(groups, (2,)), LARGEST[dtype])
    # A NaN or an infinity would be rounded to anything; its scale says what happened.
    scales = torch.where(scales < torch.inf, scales, torch.nan)
    values = torch.where(scales.isnan()[..., None], 0.0, groups * (1 / scales)[..., None])
    q = _round(values, dtype).reshape(num_tokens, num_groups * size)[:, :width].contiguous()
    return q, scales[:, 0] if group_size is None else scales


def quantize_experts(
    weights: torch.Tensor, format: str, bias: torch.Tensor | None = None
) -> ExpertWeights:
    """See ``operations.quant.quantize_experts``."""
    if format == "plain":
        return ExpertWeights(format, weights, None, bias)
    pairs = [_quantize(_finite(weights[slot], slot), format) for slot in range(weights.shape[0])]
    if not pairs:
        data, scales = _quantize(weights.new_zeros(weights.shape[1:]).float(), format)
        return ExpertWeights(
            format, data.new_empty(0, *data.shape), scales.new_empty(0, *scales.shape), bias
        )
    data, scales = (torch.stack(parts) for parts in zip(*pairs, strict=True))
    return ExpertWeights(format, data, scales, bias)


def dequantize_experts(weights: ExpertWeights, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """See ``operations.quant.dequantize_experts``."""
    if weights.scales is None:
        return weights.data.to(dtype)
    shape = (weights.num_slots, weights.num_outputs, weights.num_inputs)
    matrices = torch.empty(shape, dtype=dtype, device=weights.data.device)
    for slot, (data, scales) in enumerate(zip(weights.data, weights.scales, strict=True)):
        values = unpack_int4(data) if weights.format == "int4" else data.float()
        matrices[slot] = values * _spread(scales, weights.format, shape[1:])
    return matrices


def scales_shape(weights: ExpertWeights) -> tuple[int, ...] | None:
    """The shape that the scales must have; None: a format without scales."""
    slots, outputs, inputs = weights.num_slots, weights.num_outputs, weights.num_inputs
    if weights.format == "plain":
        return None
    if weights.format == "fp8_block":
        return slots, -(-outputs // GROUP), -(-inputs // GROUP)
    return (slots, outputs, inputs // GROUP) if weights.format == "int4" else (slots, outputs)


def pack_int4(values: torch.Tensor) -> torch.Tensor:
    """Whole values -8..7 [..., K] -> uint8 [..., K / 2], halves of a group of 128 side by side."""
    num_groups = values.shape[-1] // GROUP
    codes = (values + 8).to(torch.uint8)
    codes = codes.reshape(*values.shape[:-1], num_groups, 2, GROUP // 2)
    return (codes[..., 0, :] | codes[..., 1, :] << 4).flatten(-2)


def unpack_int4(data: torch.Tensor) -> torch.Tensor:
    """Undoes ``pack_int4``: uint8 [..., K / 2] -> float32 [..., K]."""
    data = data.reshape(*data.shape[:-1], data.shape[-1] // (GROUP // 2), GROUP // 2)
    codes = torch.stack([data & 15, data >> 4], dim=-2)
    return codes.flatten(-3).float() - 8


def _quantize(weight: torch.Tensor, format: str) -> tuple[torch.Tensor, torch.Tensor]:
    """One matrix float32 [N, K] -> data and scales."""
    outputs, inputs = weight.shape
    if format == "int4":
        groups = weight.reshape(outputs, inputs // GROUP, GROUP)
        scales = _scale(_amax(groups, (2,)), 7.0)
        values = (groups / scales[..., None]).round().clamp(-8, 7)
        return pack_int4(values.flatten(1)), scales
    dtype = _DTYPES[format]
    if format == "fp8_block":
        padded = functional.pad(weight, (0, -inputs % GROUP, 0, -outputs % GROUP))
        rows, columns = (size // GROUP for size in padded.shape)
        blocks = padded.reshape(rows, GROUP, columns, GROUP)
        scales = _scale(_amax(blocks, (1, 3)), LARGEST[dtype])
    else:
        scales = _scale(_amax(weight, (1,)), LARGEST[dtype])
    return _round(weight / _spread(scales, format, (outputs, inputs)), dtype), scales


def _spread(scales: torch.Tensor, format: str, shape: tuple[int, ...]) -> torch.Tensor:
    """The scale of each value of a matrix [N, K]; [N, 1] where a row has one."""
    if format == "fp8_block":
        scales = scales.repeat_interleave(GROUP, 0)[: shape[0]]
        return scales.repeat_interleave(GROUP, 1)[:, : shape[1]]
    return scales.repeat_interleave(GROUP, 1) if format == "int4" else scales[:, None]


def _amax(x: torch.Tensor, dims: tuple[int, ...]) -> torch.Tensor:
    """Largest magnitude over ``dims``, 0 over none; a NaN is the largest."""
    if x.numel() == 0:
        return x.abs().sum(dims)
    return x.abs().amax(dims)


def _scale(amax: torch.Tensor, largest: float) -> torch.Tensor:
    return (amax / largest).clamp(min=SMALLEST_SCALE)


def _round(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """To the nearest value of ``dtype``, ties to even, held to its range."""
    x = x.clamp(-LARGEST[dtype], LARGEST[dtype])
    return (x.round() if dtype == torch.int8 else x).to(dtype)


def _finite(weight: torch.Tensor, slot: int) -> torch.Tensor:
    """The matrix in float32.

    Raises:
        ValueError: it holds a NaN or an infinity.
    """
    weight = weight.float()
    if not bool(weight.isfinite().all()):
        raise ValueError(f"weights: slot {slot} holds a NaN or an infinity")
    return weight
