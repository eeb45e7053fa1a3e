"""Attention launches to compile ahead of time: every shipped tile at the shapes of models."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from moeserve_kernels import tables
from moeserve_kernels.device.attention_launch import (
    Options,
    decode_launch,
    merge_launch,
    prefill_launch,
    prefill_tiles,
)
from moeserve_kernels.device.launch import Launch
from moeserve_kernels.device.targets import Target

_BLOCK_SIZE = 16
# Query heads, kv heads, head size, value size: Qwen3-30B, gpt-oss, expanded MLA of DeepSeek...
_SHAPES = {
    "float16": {
        64: [(64, 8, 64, 64)],
        128: [(32, 4, 128, 128)],
        256: [(16, 16, 192, 128), (8, 4, 256, 256)],
    },
    "float32": {128: [(32, 8, 96, 96)], 256: [(8, 4, 256, 256)]},
}
_DTYPES = {"float16": torch.bfloat16, "float32": torch.float32}


def cases(target: Target) -> Iterator[tuple[str, Launch]]:
    """(label, launch on the ``meta`` device)."""
    table = tables.load("attention", target.name)
    for kind, dtype in _DTYPES.items():
        for size in table["decode"][kind]:
            for shape in _SHAPES[kind][int(size)]:
                tensors = _tensors(*shape, dtype, dtype)
                yield from _decode(f"{kind} {shape}", tensors, target)
                yield from _prefill(f"{kind} {shape}", tensors, target)
    if target.fp8:
        for size, window, sinks in ((64, None, False), (128, 128, True)):
            shape = _SHAPES["float16"][size][0]
            tensors = _tensors(*shape, torch.bfloat16, torch.float8_e4m3fn)
            yield from _decode(f"fp8 {shape}", tensors, target, window, sinks)
            yield from _prefill(f"fp8 {shape}", tensors, target, window, sinks)
    tensors = _tensors(*_SHAPES["float16"][64][0], torch.bfloat16, torch.bfloat16)
    yield from _prefill("window, sinks, soft cap", tensors, target, 128, True, 30.0)
    yield from _merges(target)


def _tensors(
    heads: int, kv_heads: int, d: int, d_v: int, dtype: torch.dtype, cache: torch.dtype
) -> tuple[torch.Tensor, ...]:
    """query, both caches, block table, lengths, out."""
    return (
        torch.empty(4096, heads, d, dtype=dtype, device="meta"),
        torch.empty(1000, _BLOCK_SIZE, kv_heads, d, dtype=cache, device="meta"),
        torch.empty(1000, _BLOCK_SIZE, kv_heads, d_v, dtype=cache, device="meta"),
        torch.empty(32, 512, dtype=torch.int32, device="meta"),
        torch.empty(32, dtype=torch.int32, device="meta"),
        torch.empty(4096, heads, d_v, dtype=dtype, device="meta"),
    )


def _sinks(query: torch.Tensor) -> torch.Tensor:
    return torch.empty(query.shape[1], dtype=torch.float32, device="meta")


def _decode(
    label: str,
    tensors: tuple[torch.Tensor, ...],
    target: Target,
    window: int | None = None,
    sinks: bool = False,
) -> Iterator[tuple[str, Launch]]:
    query, keys, values, table, lengths, out = tensors
    query, out = query[:32], out[:32]
    shape = (32, 8, query.shape[1])
    partial = torch.empty(*shape, values.shape[3], dtype=torch.float32, device="meta")
    lse = torch.empty(shape, dtype=torch.float32, device="meta")
    options = Options(0.1, window, _sinks(query) if sinks else None)
    inputs = (query, keys, values, table, lengths)
    if sinks:
        yield f"decode whole {label}", decode_launch(*inputs, out, None, options, target=target)
    else:
        yield f"decode split {label}", decode_launch(*inputs, partial, lse, options, target=target)


def _prefill(
    label: str,
    tensors: tuple[torch.Tensor, ...],
    target: Target,
    window: int | None = None,
    sinks: bool = False,
    soft_cap: float | None = None,
) -> Iterator[tuple[str, Launch]]:
    query, keys, values, table, lengths, out = tensors
    starts = torch.empty(33, dtype=torch.int32, device="meta")
    options = Options(0.1, window, _sinks(query) if sinks else None, soft_cap)
    for tile in prefill_tiles(query, keys, values, target):
        launch = prefill_launch(
            query,
            keys,
            values,
            table,
            starts,
            lengths,
            out,
            options,
            max_query_len=4096,
            target=target,
            tile=tile,
        )
        yield f"prefill {tile['block_m']} rows {label}", launch


def _merges(target: Target) -> Iterator[tuple[str, Launch]]:
    for value_dim in (64, 512):
        partial = torch.empty(32, 8, 32, value_dim, dtype=torch.float32, device="meta")
        lse = torch.empty(32, 8, 32, dtype=torch.float32, device="meta")
        out = torch.empty(32, 32, value_dim, dtype=torch.bfloat16, device="meta")
        launch = merge_launch(partial, lse, _sinks(out), out, target=target)
        yield f"merge {value_dim}", launch
