"""Decode attention over a latent cache on a GPU."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
import triton

from moeserve_kernels.device.attention import merge
from moeserve_kernels.device.attention_launch import (
    DECODE_HEADS,
    block_width,
    launch_options,
    refuse_dtypes,
    table_of,
)
from moeserve_kernels.device.kernels.mla import mla_decode_kernel
from moeserve_kernels.device.launch import Launch
from moeserve_kernels.device.splits import num_splits as choose_splits
from moeserve_kernels.device.targets import Target, target_of


def mla_decode(
    query: torch.Tensor,
    latent_cache: torch.Tensor,
    block_table: torch.Tensor,
    seq_lens: torch.Tensor,
    scale: float,
    *,
    value_dim: int = 512,
    max_seq_len: int,
    num_splits: int | None = None,
) -> torch.Tensor:
    """See ``operations.mla.mla_decode``."""
    target = target_of(query.device)
    refuse_dtypes(target, query, latent_cache)
    num_requests, num_heads, _ = query.shape
    blocks = triton.cdiv(num_heads, DECODE_HEADS)
    splits = num_splits or choose_splits(target.num_sms, num_requests, blocks, max_seq_len)
    lse = None
    if splits == 1:
        out = query.new_empty(num_requests, num_heads, value_dim)
    else:
        shape = (num_requests, splits, num_heads)
        out = torch.empty(*shape, value_dim, dtype=torch.float32, device=query.device)
        lse = torch.empty(shape, dtype=torch.float32, device=query.device)
    mla_decode_launch(
        query, latent_cache, block_table, seq_lens, out, lse, scale, target=target
    ).run()
    return out if lse is None else merge(out, lse, dtype=query.dtype)


def mla_decode_launch(
    query: torch.Tensor,
    latent_cache: torch.Tensor,
    block_table: torch.Tensor,
    seq_lens: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor | None,
    scale: float,
    *,
    target: Target,
    tile: Mapping[str, int] | None = None,
) -> Launch:
    """Writes ``out`` [B, S, heads, value_dim] and ``lse``; without lse out has no S."""
    value_dim = out.shape[-1]
    rotary_dim = latent_cache.shape[2] - value_dim
    tile = table_of(target, "mla", query, block_width(value_dim)) if tile is None else tile
    num_splits = 1 if lse is None else out.shape[1]
    args = {
        "query_ptr": query,
        "cache_ptr": latent_cache,
        "block_table_ptr": block_table,
        "seq_lens_ptr": seq_lens,
        "out_ptr": out,
        "lse_ptr": out if lse is None else lse,
        "scale": float(scale),
        "num_heads": query.shape[1],
        "num_splits": num_splits,
        "stride_qb": query.stride(0),
        "stride_qh": query.stride(1),
        "stride_cb": latent_cache.stride(0),
        "stride_cs": latent_cache.stride(1),
        "stride_tb": block_table.stride(0),
        "stride_ob": out.stride(0),
        "stride_os": 0 if lse is None else out.stride(1),
        "stride_oh": out.stride(-2),
        "stride_lb": 0 if lse is None else lse.stride(0),
        "stride_ls": 0 if lse is None else lse.stride(1),
    }
    constants = {
        "VALUE_DIM": value_dim,
        "ROTARY_DIM": rotary_dim,
        "BLOCK_SIZE": latent_cache.shape[1],
        "FINAL": lse is None,
        "BLOCK_H": DECODE_HEADS,
        "BLOCK_N": tile["block_n"],
        "BLOCK_V": block_width(value_dim),
        "BLOCK_R": block_width(rotary_dim),
    }
    grid = (query.shape[0], triton.cdiv(query.shape[1], DECODE_HEADS), num_splits)
    return Launch(mla_decode_kernel, grid, args, constants, launch_options(tile))


def aot_cases(target: Target) -> Iterator[tuple[str, Launch]]:
    """DeepSeek's sizes on one of eight ranks, split and whole, on the ``meta`` device."""
    for dtype in (torch.bfloat16, torch.float32):
        query = torch.empty(32, 16, 576, dtype=dtype, device="meta")
        cache = torch.empty(1000, 64, 576, dtype=dtype, device="meta")
        table = torch.empty(32, 128, dtype=torch.int32, device="meta")
        lengths = torch.empty(32, dtype=torch.int32, device="meta")
        whole = torch.empty(32, 16, 512, dtype=dtype, device="meta")
        partial = torch.empty(32, 8, 16, 512, dtype=torch.float32, device="meta")
        lse = torch.empty(32, 8, 16, dtype=torch.float32, device="meta")
        inputs = (query, cache, table, lengths)
        yield f"split {dtype}", mla_decode_launch(*inputs, partial, lse, 0.1, target=target)
        yield f"whole {dtype}", mla_decode_launch(*inputs, whole, None, 0.1, target=target)
