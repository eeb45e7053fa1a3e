"""Attention whose result for a token depends on its sequence alone.

K and V are walked in steps of 64 tokens, counted from the start of the sequence. Scores and sums
of a step are tile products of one shape; the maximum is exact; steps are added up in order. What a
token may not see contributes an exact zero, so it does not matter how far the walk goes on behind
it, and hence not how the prompt was cut into chunks.
"""

from __future__ import annotations

import torch
from torch.nn import functional

from moeserve_kernels.invariant_linear import TileLinear
from moeserve_kernels.invariant_rows import exp, sum_last
from moeserve_kernels.kv_blocks import gather_sequence

_STEP = 64  # tokens


def paged_attention(
    linear: TileLinear,
    query: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    block_table: torch.Tensor,
    query_lens: tuple[int, ...],
    seq_lens: tuple[int, ...],
    scale: float,
    sliding_window: int | None,
) -> torch.Tensor:
    """See ``Ops.paged_attention``; ``linear`` does the products."""
    output = torch.empty_like(query)
    row = 0
    for request, (num_queries, length) in enumerate(zip(query_lens, seq_lens, strict=True)):
        key, value = (
            _steps(gather_sequence(cache, block_table[request], length))
            for cache in (key_cache, value_cache)
        )
        visible = _visible(num_queries, length, key.shape[1], sliding_window)
        rows = slice(row, row + num_queries)
        output[rows] = _attend(linear, query[rows], key, value, visible, scale)
        row += num_queries
    return output


def _steps(sequence: torch.Tensor) -> torch.Tensor:
    """[L, kv_heads, d] -> float32 [kv_heads, steps, 64, d], filled up with zeros."""
    padded = functional.pad(sequence.float(), (0, 0, 0, 0, 0, -sequence.shape[0] % _STEP))
    return padded.view(-1, _STEP, *sequence.shape[1:]).permute(2, 0, 1, 3)


def _visible(
    num_queries: int, length: int, num_steps: int, sliding_window: int | None
) -> torch.Tensor:
    """Which positions each query may see: bool [Q, steps * 64]."""
    distance = torch.arange(length - num_queries, length)[:, None] - torch.arange(num_steps * _STEP)
    visible = distance >= 0
    return visible if sliding_window is None else visible & (distance < sliding_window)


def _attend(
    linear: TileLinear,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    visible: torch.Tensor,
    scale: float,
) -> torch.Tensor:
    """One request: query [Q, heads, d], key and value [kv_heads, steps, 64, d] -> [Q, heads, d]."""
    num_queries, num_heads, head_dim = query.shape
    num_kv_heads = key.shape[0]
    group = num_heads // num_kv_heads
    hidden = ~visible.repeat_interleave(group, dim=0)
    rows = query.float().view(num_queries, num_kv_heads, group * head_dim).unbind(1)
    heads = [
        _attend_head(linear, x.reshape(-1, head_dim), k, v, hidden, scale)
        for x, k, v in zip(rows, key, value, strict=True)
    ]
    # [kv_heads, Q * group, d] -> [Q, kv_heads, group, d] -> [Q, heads, d]
    stacked = torch.stack(heads).view(num_kv_heads, num_queries, group, head_dim)
    return stacked.transpose(0, 1).reshape(query.shape)


def _attend_head(
    linear: TileLinear,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    hidden: torch.Tensor,
    scale: float,
) -> torch.Tensor:
    """query [Rows, d], key and value [steps, 64, d], hidden [Rows, steps * 64] -> [Rows, d]."""
    scores = torch.cat([linear(query, step) for step in key], dim=1) * scale
    scores = scores.masked_fill(hidden, -torch.inf)
    powers = exp(scores - scores.amax(1, keepdim=True))
    total = torch.zeros(query.shape[0], 1)
    output = torch.zeros_like(query)
    for step_powers, step_values in zip(torch.split(powers, _STEP, dim=1), value, strict=True):
        total = total + sum_last(step_powers)
        output = output + linear(step_powers, step_values.T)
    return output / total
