"""Attention over the paged cache, request by request, as the definition says."""

from __future__ import annotations

import torch

_FP8 = torch.float8_e4m3fn


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
    return attn_prefill(
        query,
        key_cache,
        value_cache,
        block_table,
        torch.arange(query.shape[0] + 1),
        seq_lens,
        scale,
        max_query_len=1,
        sliding_window=sliding_window,
        sinks=sinks,
        soft_cap=soft_cap,
        k_scale=k_scale,
        v_scale=v_scale,
    )


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
    """See ``operations.attention.attn_decode_splits``: one split takes every token."""
    num_requests, num_heads, _ = query.shape
    shape = (num_requests, num_splits or 1, num_heads)
    partial = query.new_zeros(*shape, value_cache.shape[3])
    lse = query.new_full(shape, -torch.inf)
    for request, length in enumerate(seq_lens.tolist()):
        if length > 0:
            key, value = (
                sequence(cache, block_table[request], length, query.dtype) * by
                for cache, by in ((key_cache, k_scale), (value_cache, v_scale))
            )
            scores = scores_of(query[request, None], key, scale, sliding_window, soft_cap)
            lse[request, 0] = scores.logsumexp(-1)[:, 0]
            partial[request, 0] = weighted(scores.softmax(-1), value)[0]
    return partial, lse


def merge(
    partial: torch.Tensor,
    lse: torch.Tensor,
    *,
    sinks: torch.Tensor | None = None,
    dtype: torch.dtype,
) -> torch.Tensor:
    """See ``operations.attention.merge``: a softmax over the splits and the sink."""
    num_requests, _, num_heads = lse.shape
    sink = lse.new_full((num_heads,), -torch.inf) if sinks is None else sinks.to(lse.dtype)
    logits = torch.cat([lse, sink.expand(num_requests, 1, num_heads)], 1)
    weights = logits.softmax(1).nan_to_num(0.0)[:, :-1, :, None]  # all -inf: nothing was seen
    parts = partial.masked_fill(lse[..., None] == -torch.inf, 0.0)
    return (weights * parts).sum(1).to(dtype)


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
    outputs = [query.new_empty(0, query.shape[1], value_cache.shape[3])]
    starts = query_starts.tolist()
    for request, length in enumerate(seq_lens.tolist()):
        rows = query[starts[request] : starts[request + 1]]
        key, value = (
            sequence(cache, block_table[request], length, query.dtype) * by
            for cache, by in ((key_cache, k_scale), (value_cache, v_scale))
        )
        if length == 0:
            outputs.append(rows.new_zeros(*rows.shape[:2], value.shape[2]))
            continue
        scores = scores_of(rows, key, scale, sliding_window, soft_cap)
        if sinks is not None:
            sink = sinks.to(scores.dtype)[:, None, None].expand(-1, scores.shape[1], 1)
            scores = torch.cat([scores, sink], -1)
        outputs.append(weighted(scores.softmax(-1)[..., :length], value))
    return torch.cat(outputs)


def sequence(
    cache: torch.Tensor, blocks: torch.Tensor, length: int, dtype: torch.dtype
) -> torch.Tensor:
    """The first ``length`` tokens of the sequence in ``blocks`` -> [length, ...]."""
    needed = blocks[: -(-length // cache.shape[1])].long()
    stored = cache.view(torch.uint8)[needed].view(_FP8) if cache.dtype == _FP8 else cache[needed]
    return stored.flatten(0, 1)[:length].to(dtype)


def scores_of(
    query: torch.Tensor,
    key: torch.Tensor,
    scale: float,
    sliding_window: int | None,
    soft_cap: float | None,
) -> torch.Tensor:
    """[Q, heads, d] and [L, kv_heads, d] -> [heads, Q, L], -inf where a query must not look."""
    key = key.repeat_interleave(query.shape[1] // key.shape[1], dim=1)
    scores = torch.einsum("qhd,lhd->hql", query, key) * scale
    if soft_cap is not None:
        scores = soft_cap * torch.tanh(scores / soft_cap)
    num_queries, length = query.shape[0], key.shape[0]
    distance = torch.arange(length - num_queries, length)[:, None] - torch.arange(length)
    hidden = distance < 0
    if sliding_window is not None:
        hidden |= distance >= sliding_window
    return scores.masked_fill(hidden, -torch.inf)


def weighted(weights: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """[heads, Q, L] and [L, kv_heads, d] -> [Q, heads, d]."""
    value = value.repeat_interleave(weights.shape[0] // value.shape[1], dim=1)
    return torch.einsum("hql,lhd->qhd", weights, value)
