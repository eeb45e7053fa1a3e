"""Decode attention over a latent cache (multi-head latent attention, absorbed)."""

from __future__ import annotations

import torch

from moeserve_kernels import backend, check
from moeserve_kernels.operations.attention import check_table

MAX_VALUE_DIM = 512
_FLOATS = (torch.float32, torch.float16, torch.bfloat16, torch.float64)


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
    """Return the attention of the last token of each request, [B, heads, value_dim].

    All heads share one row of the cache a token: its key is the whole row, its value the first
    ``value_dim`` of it. The projections to and from the latent space are the caller's.

    query: [B, heads, value_dim + rotary], float32, float16 or bfloat16.
    latent_cache: [num_blocks, block_size, value_dim + rotary], dtype of query; blocks and slots
        may have any stride.
    block_table: int32 [B, max_blocks]; entries past a sequence are not read.
    seq_lens: int32 [B], the query's own token included; 0 gives zeros.
    scale: of the scores: (head size before absorption) ** -0.5.
    value_dim: up to 512. max_seq_len, num_splits: as in ``attention.attn_decode``.

    Raises ValueError for a wrong shape or dtype.

    Source: DeepSeek-V2 (arXiv 2405.04434), section 2.1.
    """
    _check(query, latent_cache, block_table, seq_lens, value_dim)
    check.at_least("max_seq_len", max_seq_len, 0)
    if num_splits is not None:
        check.at_least("num_splits", num_splits, 1)
    check.values("seq_lens", seq_lens, 0, max_seq_len + 1)
    check_table(block_table, seq_lens, latent_cache.shape[0], latent_cache.shape[1])
    result: torch.Tensor = backend.implementation("mla", query).mla_decode(
        query,
        latent_cache,
        block_table,
        seq_lens,
        scale,
        value_dim=value_dim,
        max_seq_len=max_seq_len,
        num_splits=num_splits,
    )
    return result


def _check(
    query: torch.Tensor,
    latent_cache: torch.Tensor,
    block_table: torch.Tensor,
    seq_lens: torch.Tensor,
    value_dim: int,
) -> None:
    check.dtype("query", query, *_FLOATS)
    check.shape("query", query, ("B", "heads", "value_dim + rotary"))
    width = query.shape[2]
    if not 1 <= value_dim <= min(MAX_VALUE_DIM, width - 1):
        raise ValueError(
            f"value_dim = {value_dim}: must be in 1..{min(MAX_VALUE_DIM, width - 1)} "
            f"(up to {MAX_VALUE_DIM}, and under the {width} of the query)"
        )
    if width - value_dim > MAX_VALUE_DIM // 4:
        raise ValueError(
            f"query: {width - value_dim} rotary values, must be at most {MAX_VALUE_DIM // 4}"
        )
    check.dtype("latent_cache", latent_cache, query.dtype)
    check.shape("latent_cache", latent_cache, ("num_blocks", "block_size", width))
    check.dtype("block_table", block_table, torch.int32)
    check.shape("block_table", block_table, (query.shape[0], "max_blocks"))
    check.dtype("seq_lens", seq_lens, torch.int32)
    check.shape("seq_lens", seq_lens, (query.shape[0],))
    tensors = {
        "query": query,
        "latent_cache": latent_cache,
        "block_table": block_table,
        "seq_lens": seq_lens,
    }
    for name, tensor in tensors.items():
        check.rows_contiguous(name, tensor)
    check.same_device(**tensors)
