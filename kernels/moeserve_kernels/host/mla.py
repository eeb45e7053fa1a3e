"""Decode attention over a latent cache on a CPU: one kv head, whose values are part of its keys."""

from __future__ import annotations

import torch

from moeserve_kernels.host import attention


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
    cache = latent_cache.unsqueeze(2)
    return attention.attn_decode(
        query,
        cache,
        cache[..., :value_dim],
        block_table,
        seq_lens,
        scale,
        max_seq_len=max_seq_len,
    )
