"""Writing the paged cache on a GPU: one launch for keys, values and the query's rotation."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
import triton

from moeserve_kernels import tables
from moeserve_kernels.device.attention_launch import refuse_dtypes
from moeserve_kernels.device.kernels.kv_cache import kv_write_kernel
from moeserve_kernels.device.launch import Launch
from moeserve_kernels.device.targets import Target, target_of


def kv_write(
    key: torch.Tensor,
    value: torch.Tensor | None,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor | None,
    slot_mapping: torch.Tensor,
    *,
    cos: torch.Tensor | None = None,
    sin: torch.Tensor | None = None,
    query: torch.Tensor | None = None,
    k_scale: float = 1.0,
    v_scale: float = 1.0,
) -> torch.Tensor | None:
    """See ``operations.kv_cache.kv_write``."""
    target = target_of(key.device)
    refuse_dtypes(target, key, key_cache)
    rotated = None if query is None else query.new_empty(query.shape)
    kv_write_launch(
        key,
        value,
        key_cache,
        value_cache,
        slot_mapping,
        cos,
        sin,
        query,
        rotated,
        k_scale=k_scale,
        v_scale=v_scale,
        target=target,
    ).run()
    return rotated


def kv_write_launch(
    key: torch.Tensor,
    value: torch.Tensor | None,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor | None,
    slot_mapping: torch.Tensor,
    cos: torch.Tensor | None,
    sin: torch.Tensor | None,
    query: torch.Tensor | None,
    rotated: torch.Tensor | None,
    *,
    k_scale: float,
    v_scale: float,
    target: Target,
    tile: Mapping[str, int] | None = None,
) -> Launch:
    """Writes rows of the caches and ``rotated``."""
    tile = tables.load("attention", target.name)["kv_write"] if tile is None else tile
    num_tokens, kv_heads, head_dim = key.shape
    half = 0 if cos is None else cos.shape[1]
    value_dim = 0 if value is None else value.shape[2]
    blocks = [_width(half), _width(head_dim - 2 * half), _width(value_dim)]
    args = {
        "key_ptr": key,
        "value_ptr": key if value is None else value,
        "query_ptr": key if query is None else query,
        "key_cache_ptr": key_cache,
        "value_cache_ptr": key_cache if value_cache is None else value_cache,
        "rotated_ptr": key if rotated is None else rotated,
        "slot_mapping_ptr": slot_mapping,
        "cos_ptr": slot_mapping if cos is None else cos,
        "sin_ptr": slot_mapping if sin is None else sin,
        "num_tokens": num_tokens,
        "k_scale": float(k_scale),
        "v_scale": float(v_scale),
        **_strides("k", key),
        **_strides("v", value),
        **_strides("q", query),
        **_strides("r", rotated),
        **_cache_strides("kc", key_cache),
        **_cache_strides("vc", value_cache),
        "stride_ct": 0 if cos is None else cos.stride(0),
        "stride_st": 0 if sin is None else sin.stride(0),
    }
    constants = {
        "KV_HEADS": kv_heads,
        "KEY_DIM": head_dim,
        "VALUE_DIM": value_dim,
        "HALF": half,
        "BLOCK_SIZE": key_cache.shape[1],
        "FP8": key_cache.dtype == torch.float8_e4m3fn,
        "BLOCK_T": max(1, tile["elements"] // max(blocks)),
        "BLOCK_R": blocks[0],
        "BLOCK_D": blocks[1],
        "BLOCK_V": blocks[2],
    }
    heads = kv_heads + (0 if query is None else query.shape[1])
    grid = (triton.cdiv(num_tokens, constants["BLOCK_T"]), heads)
    return Launch(kv_write_kernel, grid, args, constants, {"num_warps": tile["num_warps"]})


def aot_cases(target: Target) -> Iterator[tuple[str, Launch]]:
    """Heads of models, whole, partly or not rotated, and a latent cache, on the ``meta`` device."""
    # query heads, kv heads, head size, value size, rotated columns
    shapes = [(32, 4, 128, 128, 128), (64, 8, 64, 64, 64), (32, 8, 96, 96, 48), (0, 1, 576, 0, 0)]
    stored = (torch.bfloat16, torch.float8_e4m3fn) if target.fp8 else (torch.bfloat16,)
    for heads, kv_heads, d, d_v, rotated in shapes:
        for cache in stored:
            inputs = _meta_inputs(heads, kv_heads, d, d_v, rotated, cache)
            launch = kv_write_launch(*inputs, k_scale=0.5, v_scale=2.0, target=target)
            yield f"{heads}/{kv_heads} heads of {d}, {rotated} rotated, {cache}", launch


def _meta_inputs(
    heads: int, kv_heads: int, d: int, d_v: int, rotated: int, cache: torch.dtype
) -> tuple[Any, ...]:
    tokens = 4096

    def made(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor | None:
        return None if 0 in shape else torch.empty(shape, dtype=dtype, device="meta")

    angle = made(tokens, rotated // 2, dtype=torch.float32)
    query = made(tokens, heads, d)
    return (
        made(tokens, kv_heads, d),
        made(tokens, kv_heads, d_v),
        made(1000, 16, kv_heads, d, dtype=cache),
        made(1000, 16, kv_heads, d_v, dtype=cache),
        made(tokens, dtype=torch.int64),
        angle,
        angle,
        query,
        query,
    )


def _width(size: int) -> int:
    return int(triton.next_power_of_2(size)) if size > 0 else 1


def _strides(name: str, tensor: torch.Tensor | None) -> dict[str, int]:
    token, head = (0, 0) if tensor is None else tensor.stride()[:2]
    return {f"stride_{name}t": token, f"stride_{name}h": head}


def _cache_strides(name: str, cache: torch.Tensor | None) -> dict[str, int]:
    block, slot, head = (0, 0, 0) if cache is None else cache.stride()[:3]
    return {f"stride_{name}b": block, f"stride_{name}s": slot, f"stride_{name}h": head}
