"""Attention over the paged cache on a CPU: decoding requests together, prompts one by one.

The query heads that share a kv head are rows of that head, so keys and values are never repeated.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass

import torch

_FP8 = torch.float8_e4m3fn
_MAX_SCORES = 1 << 24  # of a block of queries; 64 MiB in float32


@dataclass(frozen=True)
class _Options:
    scale: float
    sliding_window: int | None
    soft_cap: float | None
    v_scale: float


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
    """See ``operations.attention.attn_decode``; nothing is split."""
    partial, lse = attn_decode_splits(
        query,
        key_cache,
        value_cache,
        block_table,
        seq_lens,
        scale,
        max_seq_len=max_seq_len,
        sliding_window=sliding_window,
        soft_cap=soft_cap,
        num_splits=1,
        k_scale=k_scale,
        v_scale=v_scale,
    )
    return merge(partial, lse, sinks=sinks, dtype=query.dtype)


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
    splits = num_splits or 1
    num_requests, num_heads, _ = query.shape
    wide = torch.promote_types(query.dtype, torch.float32)
    shape = (num_requests, splits, num_heads)
    partial = torch.zeros(*shape, value_cache.shape[3], dtype=wide)
    lse = torch.full(shape, -torch.inf, dtype=wide)
    first = torch.zeros_like(seq_lens, dtype=torch.int64)
    if sliding_window is not None:
        first = (seq_lens.long() - sliding_window).clamp(min=0)
    sizes = -(-(seq_lens.long() - first) // splits)
    options = _Options(scale * k_scale, None, soft_cap, v_scale)
    for split in range(splits):
        begin = (first + split * sizes).minimum(seq_lens)
        end = (begin + sizes).minimum(seq_lens)
        for requests in _alike(end - begin):
            lengths = (end - begin)[requests]
            where = begin[requests, None] + torch.arange(int(lengths.max()))
            positions = where.minimum(end[requests, None] - 1)  # what is past the end is not read
            key, value = (
                _tokens(cache, block_table[requests], positions, wide).transpose(1, 2)
                for cache in (key_cache, value_cache)
            )
            grouped = _grouped(query[requests].to(wide), key.shape[1])
            visible = (where < end[requests, None])[:, None, None]
            found, logs = _attend(grouped, key, value, visible, options)
            partial[requests, split], lse[requests, split] = found.flatten(1, 2), logs.flatten(1)
    return partial, lse


def merge(
    partial: torch.Tensor,
    lse: torch.Tensor,
    *,
    sinks: torch.Tensor | None = None,
    dtype: torch.dtype,
) -> torch.Tensor:
    """See ``operations.attention.merge``."""
    highest = lse.amax(1, keepdim=True)
    if sinks is not None:
        highest = highest.maximum(sinks)
    highest = highest.masked_fill(highest == -torch.inf, 0.0)
    weights = (lse - highest).exp()
    total = weights.sum(1)
    if sinks is not None:
        total = total + (sinks - highest[:, 0]).exp()
    parts = partial.masked_fill((lse == -torch.inf).unsqueeze(-1), 0.0)
    out = torch.einsum("bsh,bshd->bhd", weights, parts)
    return (out / total.masked_fill(total == 0, 1.0).unsqueeze(-1)).to(dtype)


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
    wide = torch.promote_types(query.dtype, torch.float32)
    out = query.new_empty(*query.shape[:2], value_cache.shape[3])
    options = _Options(scale * k_scale, sliding_window, soft_cap, v_scale)
    starts = query_starts.tolist()
    for request, length in enumerate(seq_lens.tolist()):
        rows = slice(starts[request], starts[request + 1])
        if length == 0 or rows.start == rows.stop:
            out[rows] = 0.0
            continue
        positions = torch.arange(length)[None]
        key, value = (
            _tokens(cache, block_table[request, None], positions, wide)[0].transpose(0, 1)
            for cache in (key_cache, value_cache)
        )
        attended, logs = _causal(query[rows].to(wide), key, value, options)
        if sinks is not None:
            attended *= torch.sigmoid(logs - sinks).unsqueeze(-1)
        out[rows] = attended.to(query.dtype)
    return out


def _causal(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, options: _Options
) -> tuple[torch.Tensor, torch.Tensor]:
    """query [Q, heads, d] last of key, value [kv_heads, L, d] -> [Q, heads, d_v], [Q, heads]."""
    num_queries, num_heads, _ = query.shape
    length = key.shape[1]
    step = max(1, _MAX_SCORES // (length * num_heads))
    outputs, logs = [], []
    for first in range(0, num_queries, step):
        rows = _grouped(query[first : first + step], key.shape[0])  # [Q, kv_heads, group, d]
        last = length - num_queries + first + rows.shape[0]
        begin = 0
        if options.sliding_window is not None:
            begin = max(0, last - rows.shape[0] + 1 - options.sliding_window)
        distance = torch.arange(last - rows.shape[0], last)[:, None] - torch.arange(begin, last)
        visible = distance >= 0
        if options.sliding_window is not None:
            visible &= distance < options.sliding_window
        found, lse = _attend(
            rows.transpose(0, 1).flatten(1, 2),
            key[:, begin:last],
            value[:, begin:last],
            visible.repeat_interleave(rows.shape[2], 0),
            options,
        )
        shape = (key.shape[0], rows.shape[0], rows.shape[2])
        outputs.append(found.reshape(*shape, -1).transpose(0, 1).flatten(1, 2))
        logs.append(lse.reshape(shape).transpose(0, 1).flatten(1, 2))
    return torch.cat(outputs), torch.cat(logs)


def _attend(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    visible: torch.Tensor,
    options: _Options,
) -> tuple[torch.Tensor, torch.Tensor]:
    """query [..., R, d], key and value [..., L, d] -> [..., R, d_v] and the log of the sums."""
    scores = query @ key.mT * options.scale
    if options.soft_cap is not None:
        scores = torch.tanh(scores / options.soft_cap) * options.soft_cap
    scores.masked_fill_(~visible, -torch.inf)
    lse = scores.logsumexp(-1)
    weights = (scores - lse.unsqueeze(-1)).exp_()
    return weights @ value * options.v_scale, lse


def _grouped(query: torch.Tensor, kv_heads: int) -> torch.Tensor:
    """[N, heads, d] -> [N, kv_heads, group, d]."""
    return query.reshape(query.shape[0], kv_heads, -1, query.shape[2])


def _alike(lengths: torch.Tensor) -> list[list[int]]:
    """Requests of similar length, none of length 0: padding at most doubles the work."""
    classes: dict[int, list[int]] = defaultdict(list)
    for request, length in enumerate(lengths.tolist()):
        if length > 0:
            classes[(length - 1).bit_length()].append(request)
    return list(classes.values())


def _tokens(
    cache: torch.Tensor, block_table: torch.Tensor, positions: torch.Tensor, dtype: torch.dtype
) -> torch.Tensor:
    """What lies at positions [N, L] of N sequences -> [N, L, ...]."""
    block_size = cache.shape[1]
    blocks = block_table.long().gather(1, positions // block_size)
    if cache.dtype == _FP8:
        stored = cache.view(torch.uint8)[blocks, positions % block_size].view(_FP8)
    else:
        stored = cache[blocks, positions % block_size]
    return stored.to(dtype)
