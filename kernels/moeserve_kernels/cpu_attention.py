"""Attention over the paged cache: decoding requests together, long prompts one by one.

A decoding request has one query token, so the G query heads that share a kv head become G query
rows of that head, and K and V are never repeated.
"""

from __future__ import annotations

from collections import defaultdict
from typing import Protocol

import torch
from torch.nn.functional import scaled_dot_product_attention

from moeserve_kernels.cpu_linear import compute_dtype
from moeserve_kernels.kv_blocks import gather_sequence


class Decode(Protocol):
    """Attention of one token per request: ``decode`` below, or ``native.attn_decode``."""

    def __call__(
        self,
        query: torch.Tensor,
        key_cache: torch.Tensor,
        value_cache: torch.Tensor,
        block_table: torch.Tensor,
        seq_lens: torch.Tensor,
        scale: float,
        sliding_window: int | None,
    ) -> torch.Tensor:
        """query [B, heads, d], block_table int64 [B, max_blocks], seq_lens int64 [B]."""
        ...


def paged_attention(
    decode: Decode,
    query: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    block_table: torch.Tensor,
    query_lens: tuple[int, ...],
    seq_lens: tuple[int, ...],
    scale: float,
    sliding_window: int | None,
) -> torch.Tensor:
    """See ``Ops.paged_attention``; ``decode`` does the requests with one query token."""
    output = torch.empty_like(query)
    rows: list[int] = []
    requests: list[int] = []
    row = 0
    for request, (num_queries, length) in enumerate(zip(query_lens, seq_lens, strict=True)):
        if num_queries == 1:
            rows.append(row)
            requests.append(request)
        else:
            key = gather_sequence(key_cache, block_table[request], length)
            value = gather_sequence(value_cache, block_table[request], length)
            part = slice(row, row + num_queries)
            output[part] = _prefill(query[part], key, value, scale, sliding_window)
        row += num_queries
    if len(rows) == row:  # every request decodes
        lengths = torch.tensor(seq_lens, dtype=torch.int64)
        return decode(query, key_cache, value_cache, block_table, lengths, scale, sliding_window)
    if rows:
        lengths = torch.tensor([seq_lens[request] for request in requests])
        table = block_table[requests]
        output[rows] = decode(
            query[rows], key_cache, value_cache, table, lengths, scale, sliding_window
        )
    return output


def decode(
    query: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    block_table: torch.Tensor,
    seq_lens: torch.Tensor,
    scale: float,
    sliding_window: int | None,
) -> torch.Tensor:
    """See ``Decode``: gathers requests of similar length, so that padding at most doubles work."""
    output = torch.empty_like(query)
    classes: dict[int, list[int]] = defaultdict(list)
    for request, length in enumerate(seq_lens.tolist()):
        classes[(length - 1).bit_length()].append(request)
    for requests in classes.values():
        lengths = seq_lens[requests]
        tokens = _token_slots(block_table[requests], lengths, key_cache.shape[1])
        key, value = (cache.flatten(0, 1)[tokens] for cache in (key_cache, value_cache))
        output[requests] = _decode(query[requests], key, value, lengths, scale, sliding_window)
    return output


def _prefill(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    scale: float,
    sliding_window: int | None,
) -> torch.Tensor:
    """query [Q, heads, d] are the last tokens of key, value [L, kv_heads, d] -> [Q, heads, d]."""
    num_queries, length = query.shape[0], key.shape[0]
    mask = None
    if num_queries != length or (sliding_window is not None and sliding_window < length):
        distance = torch.arange(length - num_queries, length)[:, None] - torch.arange(length)
        mask = distance >= 0
        if sliding_window is not None:
            mask &= distance < sliding_window
    dtype = compute_dtype(query.dtype)
    query_heads, key_heads, value_heads = (
        x.to(dtype).transpose(0, 1).unsqueeze(0) for x in (query, key, value)
    )
    attended = scaled_dot_product_attention(
        query_heads,
        key_heads,
        value_heads,
        attn_mask=mask,
        is_causal=mask is None,
        scale=scale,
        enable_gqa=True,
    )
    return attended[0].transpose(0, 1).to(query.dtype)


def _token_slots(block_table: torch.Tensor, lengths: torch.Tensor, block_size: int) -> torch.Tensor:
    """Where in the cache the tokens of each sequence are -> int64 [B, longest].

    Past its end a sequence repeats its last token: memory that others wrote is never read.
    """
    positions = torch.arange(int(lengths.max())).minimum(lengths[:, None] - 1)
    return block_table.gather(1, positions // block_size) * block_size + positions % block_size


def _decode(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    lengths: torch.Tensor,
    scale: float,
    sliding_window: int | None,
) -> torch.Tensor:
    """One token per request.

    Args:
        query: [B, heads, d].
        key, value: [B, L, kv_heads, d], what lies beyond a length is ignored but finite.
        lengths: int64 [B].

    Returns:
        [B, heads, d].
    """
    num_requests, num_heads, head_dim = query.shape
    positions = torch.arange(key.shape[1])
    mask = positions < lengths[:, None]
    if sliding_window is not None:
        mask &= positions >= lengths[:, None] - sliding_window
    num_kv_heads = key.shape[2]
    grouped = query.reshape(num_requests, num_kv_heads, num_heads // num_kv_heads, head_dim)
    dtype = compute_dtype(query.dtype)
    attended = scaled_dot_product_attention(
        grouped.to(dtype),
        key.transpose(1, 2).to(dtype),
        value.transpose(1, 2).to(dtype),
        attn_mask=mask[:, None, None, :],
        scale=scale,
    )
    return attended.reshape(num_requests, num_heads, head_dim).to(query.dtype)
