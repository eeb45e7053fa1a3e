"""The launches of attention, for tensors of any device, ``meta`` too, and which tiles they take."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
import triton

from moeserve_kernels import tables
from moeserve_kernels.device.kernels.attention_decode import decode_kernel, merge_kernel
from moeserve_kernels.device.kernels.attention_prefill import prefill_kernel
from moeserve_kernels.device.launch import Launch
from moeserve_kernels.device.targets import Target

DECODE_HEADS = 16  # least rows of a matrix instruction; a larger group takes several blocks
Tile = Mapping[str, int]


@dataclass(frozen=True)
class Options:
    """What decode and prefill take besides tensors of requests; see ``operations.attention``."""

    scale: float
    sliding_window: int | None = None
    sinks: torch.Tensor | None = None
    soft_cap: float | None = None
    k_scale: float = 1.0
    v_scale: float = 1.0


def refuse_dtypes(target: Target, query: torch.Tensor, cache: torch.Tensor) -> None:
    """Raises ValueError when kernels for the chip can not take the dtypes."""
    if cache.dtype == torch.float8_e4m3fn and not target.fp8:
        raise ValueError(
            f"cache: dtype is float8_e4m3fn, which {target.name} can not read; must be the query's"
        )
    if query.dtype == torch.float64:
        raise ValueError("query: dtype is float64, must be float32, float16 or bfloat16 in kernels")


def table_of(target: Target, name: str, query: torch.Tensor, width: int) -> Any:
    """The entry for the dtype of the query and for the smallest head size not under ``width``."""
    kind = "float32" if query.dtype == torch.float32 else "float16"
    sizes = tables.load("attention", target.name)[name][kind]
    return sizes[str(min(size for size in map(int, sizes) if size >= width))]


def block_width(size: int) -> int:
    """Columns of a tile for vectors of ``size``: matrix instructions want a power of two."""
    return max(16, int(triton.next_power_of_2(size)))


def head_blocks(query: torch.Tensor, key_cache: torch.Tensor) -> int:
    """Blocks of query heads that decode takes for one request and split."""
    group = query.shape[1] // key_cache.shape[2]
    return int(key_cache.shape[2] * triton.cdiv(group, DECODE_HEADS))


def decode_launch(
    query: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    block_table: torch.Tensor,
    seq_lens: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor | None,
    options: Options,
    *,
    target: Target,
    tile: Tile | None = None,
) -> Launch:
    """Writes ``out`` [B, S, heads, d_v] and ``lse``; without lse out is [B, heads, d_v]."""
    widths = block_width(key_cache.shape[3]), block_width(value_cache.shape[3])
    tile = table_of(target, "decode", query, max(widths)) if tile is None else tile
    num_splits = 1 if lse is None else out.shape[1]
    out_strides = out.stride() if lse is not None else (out.stride(0), 0, out.stride(1))
    args = {
        **_cache_args(query, key_cache, value_cache, block_table, options),
        "seq_lens_ptr": seq_lens,
        "sinks_ptr": options.sinks if lse is None else None,
        "out_ptr": out,
        "lse_ptr": out if lse is None else lse,
        "num_splits": num_splits,
        "stride_qb": query.stride(0),
        "stride_ob": out_strides[0],
        "stride_os": out_strides[1],
        "stride_oh": out_strides[2],
        "stride_lb": 0 if lse is None else lse.stride(0),
        "stride_ls": 0 if lse is None else lse.stride(1),
    }
    blocks = head_blocks(query, key_cache)
    constants = {
        **_cache_constants(query, key_cache, value_cache),
        "HEAD_BLOCKS": blocks // key_cache.shape[2],
        "SINKS": options.sinks is not None and lse is None,
        "FINAL": lse is None,
        "BLOCK_H": DECODE_HEADS,
        "BLOCK_N": tile["block_n"],
    }
    grid = (query.shape[0], blocks, num_splits)
    return Launch(decode_kernel, grid, args, constants, launch_options(tile))


def merge_launch(
    partial: torch.Tensor,
    lse: torch.Tensor,
    sinks: torch.Tensor | None,
    out: torch.Tensor,
    *,
    target: Target,
    tile: Tile | None = None,
) -> Launch:
    """Writes ``out`` [B, heads, d_v]."""
    tile = tables.load("attention", target.name)["merge"] if tile is None else tile
    num_requests, num_splits, num_heads, value_dim = partial.shape
    block_v = block_width(value_dim)
    args = {
        "partial_ptr": partial,
        "lse_ptr": lse,
        "sinks_ptr": sinks,
        "out_ptr": out,
        "num_splits": num_splits,
        "stride_pb": partial.stride(0),
        "stride_ps": partial.stride(1),
        "stride_ph": partial.stride(2),
        "stride_lb": lse.stride(0),
        "stride_ls": lse.stride(1),
        "stride_lh": lse.stride(2),
        "stride_ob": out.stride(0),
        "stride_oh": out.stride(1),
    }
    constants = {
        "SINKS": sinks is not None,
        "VALUE_DIM": value_dim,
        "BLOCK_S": max(2, tile["elements"] // block_v),
        "BLOCK_V": block_v,
    }
    grid = (num_requests, num_heads)
    return Launch(merge_kernel, grid, args, constants, {"num_warps": tile["num_warps"]})


def prefill_launch(
    query: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    block_table: torch.Tensor,
    query_starts: torch.Tensor,
    seq_lens: torch.Tensor,
    out: torch.Tensor,
    options: Options,
    *,
    max_query_len: int,
    target: Target,
    tile: Tile | None = None,
    requests_at_once: int = 128,
) -> Launch:
    """Writes ``out`` [T, heads, d_v]; a program looks for its request among so many at once."""
    num_tokens, num_heads, _ = query.shape
    num_requests, kv_heads = seq_lens.shape[0], key_cache.shape[2]
    group = num_heads // kv_heads
    if tile is None:
        tiles = prefill_tiles(query, key_cache, value_cache, target)
        # The smallest that holds all rows of the longest request, else the largest.
        rows = max_query_len * group
        tile = next((one for one in tiles if one["block_m"] >= rows), tiles[-1])
    heads = min(group, tile["block_m"])
    tokens = tile["block_m"] // heads
    args = {
        **_cache_args(query, key_cache, value_cache, block_table, options),
        "query_starts_ptr": query_starts,
        "seq_lens_ptr": seq_lens,
        "sinks_ptr": options.sinks,
        "out_ptr": out,
        "num_requests": num_requests,
        "stride_qt": query.stride(0),
        "stride_ot": out.stride(0),
        "stride_oh": out.stride(1),
    }
    constants = {
        **_cache_constants(query, key_cache, value_cache),
        "HEADS": heads,
        "TOKENS": tokens,
        "SINKS": options.sinks is not None,
        "BLOCK_B": requests_at_once,
        "BLOCK_M": tile["block_m"],
        "BLOCK_N": tile["block_n"],
    }
    blocks = num_tokens // tokens + num_requests if num_tokens > 0 else 0
    grid = (blocks, kv_heads * triton.cdiv(group, heads))
    return Launch(prefill_kernel, grid, args, constants, launch_options(tile))


def launch_options(tile: Tile) -> dict[str, int]:
    """Warps and stages of a tile."""
    return {"num_warps": tile["num_warps"], "num_stages": tile["num_stages"]}


def prefill_tiles(
    query: torch.Tensor, key_cache: torch.Tensor, value_cache: torch.Tensor, target: Target
) -> list[Tile]:
    """The tiles for the sizes of the caches, of growing ``block_m``."""
    width = max(block_width(key_cache.shape[3]), block_width(value_cache.shape[3]))
    tiles: list[Tile] = table_of(target, "prefill", query, width)
    return tiles


def _cache_args(
    query: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    block_table: torch.Tensor,
    options: Options,
) -> dict[str, Any]:
    return {
        "query_ptr": query,
        "key_cache_ptr": key_cache,
        "value_cache_ptr": value_cache,
        "block_table_ptr": block_table,
        "scale": float(options.scale * options.k_scale),
        "v_scale": float(options.v_scale),
        "soft_cap": None if options.soft_cap is None else float(options.soft_cap),
        "window": options.sliding_window,
        "stride_qh": query.stride(1),
        "stride_kb": key_cache.stride(0),
        "stride_ks": key_cache.stride(1),
        "stride_kh": key_cache.stride(2),
        "stride_vb": value_cache.stride(0),
        "stride_vs": value_cache.stride(1),
        "stride_vh": value_cache.stride(2),
        "stride_tb": block_table.stride(0),
    }


def _cache_constants(
    query: torch.Tensor, key_cache: torch.Tensor, value_cache: torch.Tensor
) -> dict[str, Any]:
    return {
        "GROUP": query.shape[1] // key_cache.shape[2],
        "HEAD_DIM": key_cache.shape[3],
        "VALUE_DIM": value_cache.shape[3],
        "BLOCK_SIZE": key_cache.shape[1],
        "BLOCK_D": block_width(key_cache.shape[3]),
        "BLOCK_V": block_width(value_cache.shape[3]),
    }
