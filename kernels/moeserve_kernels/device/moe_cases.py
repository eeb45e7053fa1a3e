"""What the compiler checks without a GPU: each shipped tile, at shapes of models in use."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from moeserve_kernels.alignment import Alignment, max_rows
from moeserve_kernels.device import tiles
from moeserve_kernels.device.launch import Launch
from moeserve_kernels.device.moe_launch import combine_launch, moe_down_launch, moe_up_launch
from moeserve_kernels.device.targets import Target
from moeserve_kernels.weights import GROUP, STORED_DTYPES, ExpertWeights


@dataclass(frozen=True)
class Shape:
    """An expert FFN: S slots of I intermediate columns, k of them for a token of H values."""

    name: str
    num_slots: int
    hidden_size: int
    intermediate_size: int
    top_k: int


QWEN3_30B = Shape("qwen3-30b", 128, 2048, 768, 8)
MIXTRAL = Shape("mixtral", 8, 4096, 14336, 2)
DEEPSEEK_EP8 = Shape("deepseek-ep8", 32, 7168, 2048, 8)
GPT_OSS = Shape("gpt-oss", 32, 2880, 2880, 4)  # has biases; 2880 is no multiple of 128


def aot_cases(target: Target) -> Iterator[tuple[str, Launch]]:
    """Every tile of the target's table, with the label ``<product> <format> <block_m> <shape>``."""
    table = tiles.load(target.name)
    for format in ("plain", "int8", "fp8_channel", "fp8_block", "int4"):
        if format not in table.formats:
            continue
        # Channel scales cost the same whatever the weights: fp8 needs only the conversion checked.
        some = table.formats[format][-1:] if format == "fp8_channel" else table.formats[format]
        shapes = [QWEN3_30B, MIXTRAL, DEEPSEEK_EP8, QWEN3_30B][: len(some)]
        if format in ("int8", "fp8_channel", "fp8_block"):
            shapes[-1] = GPT_OSS  # a bias and a masked last step need the most registers
        for tile, shape in zip(some, shapes, strict=True):
            yield from _products(target, format, tile, shape)
    for tile in table.formats["float32"]:
        yield from _products(target, "plain", tile, QWEN3_30B, dtype=torch.float32)
    smallest = table.formats["plain"][0]
    yield from _products(target, "plain", smallest, QWEN3_30B, num_tokens=1)
    for tile in (smallest, table.formats["plain"][-1]):
        yield from _products(target, "plain", tile, GPT_OSS)
    yield "combine qwen3-30b", _combine(table, QWEN3_30B)


def _products(
    target: Target,
    format: str,
    tile: tiles.MoeTile,
    shape: Shape,
    *,
    num_tokens: int = 4096,
    dtype: torch.dtype = torch.bfloat16,
) -> Iterator[tuple[str, Launch]]:
    """Both products of ``num_tokens`` tokens; few of them take the identity alignment."""
    hidden, inner, slots = shape.hidden_size, shape.intermediate_size, shape.num_slots
    with_bias = shape is GPT_OSS
    alignment = _alignment(shape, num_tokens, tile.block_m)
    kind = "float32" if dtype == torch.float32 else format
    label = f"{kind} {tile.block_m}{' identity' if alignment.is_identity else ''} {shape.name}"
    x, h = _empty(num_tokens, hidden, dtype=dtype), _empty(alignment.num_rows, inner, dtype=dtype)
    up = moe_up_launch(
        x,
        _weights(format, slots, 2 * inner, hidden, dtype, with_bias),
        alignment,
        h,
        activation="swiglu_clamped" if with_bias else "silu",
        alpha=1.702,
        limit=7.0,
        tile=tile,
    )
    yield f"up {label}", up
    down = moe_down_launch(
        h,
        _weights(format, slots, hidden, inner, dtype, with_bias),
        alignment,
        _empty(num_tokens, shape.top_k, hidden, dtype=dtype),
        topk_weights=_empty(num_tokens, shape.top_k, dtype=torch.float32),
        tile=tile,
        target=target,
    )
    yield f"down {label}", down


def _combine(table: tiles.Table, shape: Shape) -> Launch:
    num_tokens, hidden = 64, shape.hidden_size
    return combine_launch(
        _empty(num_tokens, shape.top_k, hidden),
        _empty(num_tokens, hidden),
        topk_weights=_empty(num_tokens, shape.top_k, dtype=torch.float32),
        topk_ids=_empty(num_tokens, shape.top_k, dtype=torch.int32),
        expert_map=_empty(2 * shape.num_slots, dtype=torch.int32),
        shared=_empty(num_tokens, hidden),
        residual=_empty(num_tokens, hidden),
        block=table.combine_block,
        num_warps=table.combine_warps,
    )


def _alignment(shape: Shape, num_tokens: int, block_m: int) -> Alignment:
    pairs, top_k = num_tokens * shape.top_k, shape.top_k
    if num_tokens == 1:
        slots = _empty(pairs, dtype=torch.int32)
        return Alignment(None, slots, None, None, pairs, top_k, block_m, is_identity=True)
    rows = max_rows(pairs, shape.num_slots, block_m)
    return Alignment(
        _empty(rows, dtype=torch.int32),
        _empty(rows // block_m, dtype=torch.int32),
        _empty(shape.num_slots, dtype=torch.int32),
        _empty(1, dtype=torch.int32),
        pairs,
        top_k,
        block_m,
    )


def _weights(
    format: str, slots: int, outputs: int, inputs: int, dtype: torch.dtype, with_bias: bool
) -> ExpertWeights:
    stored = inputs // 2 if format == "int4" else inputs
    data = _empty(slots, outputs, stored, dtype=STORED_DTYPES.get(format, dtype))
    bias = _empty(slots, outputs, dtype=dtype) if with_bias else None
    if format == "plain":
        return ExpertWeights(format, data, None, bias)
    shape = {
        "fp8_block": (slots, -(-outputs // GROUP), -(-inputs // GROUP)),
        "int4": (slots, outputs, inputs // GROUP),
    }.get(format, (slots, outputs))
    return ExpertWeights(format, data, _empty(*shape, dtype=torch.float32), bias)


def _empty(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")
