"""Attention over the paged cache on a GPU: decode in splits that are merged, prefill in blocks."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from moeserve_kernels.device import attention_cases
from moeserve_kernels.device.attention_launch import (
    Options,
    decode_launch,
    head_blocks,
    merge_launch,
    prefill_launch,
    refuse_dtypes,
)
from moeserve_kernels.device.launch import Launch
from moeserve_kernels.device.splits import num_splits as choose_splits
from moeserve_kernels.device.targets import Target, target_of


def attn_decode(
    query: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    block_table: torch.Tensor,
    seq_lens: torch.Tensor,
    scale: float,
    *,
    max_seq_len: int,
    sliding_window: int | None = None,
    sinks: torch.Tensor | None = None,
    soft_cap: float | None = None,
    num_splits: int | None = None,
    k_scale: float = 1.0,
    v_scale: float = 1.0,
) -> torch.Tensor:
    """See ``operations.attention.attn_decode``."""
    target = target_of(query.device)
    refuse_dtypes(target, query, key_cache)
    options = Options(scale, sliding_window, sinks, soft_cap, k_scale, v_scale)
    splits = num_splits or _splits(target, query, key_cache, max_seq_len, sliding_window)
    if splits > 1:
        partial, lse = _split(
            query, key_cache, value_cache, block_table, seq_lens, options, splits, target
        )
        return merge(partial, lse, sinks=sinks, dtype=query.dtype)
    out = query.new_empty(*query.shape[:2], value_cache.shape[3])
    decode_launch(
        query, key_cache, value_cache, block_table, seq_lens, out, None, options, target=target
    ).run()
    return out


def attn_decode_splits(
    query: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    block_table: torch.Tensor,
    seq_lens: torch.Tensor,
    scale: float,
    *,
    max_seq_len: int,
    sliding_window: int | None = None,
    soft_cap: float | None = None,
    num_splits: int | None = None,
    k_scale: float = 1.0,
    v_scale: float = 1.0,
) -> tuple[torch.Tensor, torch.Tensor]:
    """See ``operations.attention.attn_decode_splits``."""
    target = target_of(query.device)
    refuse_dtypes(target, query, key_cache)
    options = Options(scale, sliding_window, None, soft_cap, k_scale, v_scale)
    splits = num_splits or _splits(target, query, key_cache, max_seq_len, sliding_window)
    return _split(query, key_cache, value_cache, block_table, seq_lens, options, splits, target)


def merge(
    partial: torch.Tensor,
    lse: torch.Tensor,
    *,
    sinks: torch.Tensor | None = None,
    dtype: torch.dtype,
) -> torch.Tensor:
    """See ``operations.attention.merge``."""
    num_requests, _, num_heads, value_dim = partial.shape
    out = torch.empty(num_requests, num_heads, value_dim, dtype=dtype, device=partial.device)
    merge_launch(partial, lse, sinks, out, target=target_of(partial.device)).run()
    return out


def attn_prefill(
    query: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    block_table: torch.Tensor,
    query_starts: torch.Tensor,
    seq_lens: torch.Tensor,
    scale: float,
    *,
    max_query_len: int,
    sliding_window: int | None = None,
    sinks: torch.Tensor | None = None,
    soft_cap: float | None = None,
    k_scale: float = 1.0,
    v_scale: float = 1.0,
) -> torch.Tensor:
    """See ``operations.attention.attn_prefill``."""
    target = target_of(query.device)
    refuse_dtypes(target, query, key_cache)
    out = query.new_empty(*query.shape[:2], value_cache.shape[3])
    prefill_launch(
        query,
        key_cache,
        value_cache,
        block_table,
        query_starts,
        seq_lens,
        out,
        Options(scale, sliding_window, sinks, soft_cap, k_scale, v_scale),
        max_query_len=max_query_len,
        target=target,
    ).run()
    return out


def aot_cases(target: Target) -> Iterator[tuple[str, Launch]]:
    """Every shipped tile at the shapes of models, on the ``meta`` device."""
    yield from attention_cases.cases(target)


def _splits(
    target: Target,
    query: torch.Tensor,
    key_cache: torch.Tensor,
    max_seq_len: int,
    sliding_window: int | None,
) -> int:
    blocks = head_blocks(query, key_cache)
    return choose_splits(target.num_sms, query.shape[0], blocks, max_seq_len, sliding_window)


def _split(
    query: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    block_table: torch.Tensor,
    seq_lens: torch.Tensor,
    options: Options,
    splits: int,
    target: Target,
) -> tuple[torch.Tensor, torch.Tensor]:
    num_requests, num_heads, _ = query.shape
    shape = (num_requests, splits, num_heads)
    partial = torch.empty(*shape, value_cache.shape[3], dtype=torch.float32, device=query.device)
    lse = torch.empty(shape, dtype=torch.float32, device=query.device)
    decode_launch(
        query, key_cache, value_cache, block_table, seq_lens, partial, lse, options, target=target
    ).run()
    return partial, lse
