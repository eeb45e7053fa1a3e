"""Decode attention over a latent cache: one kv head whose values are the front of its keys."""

from __future__ import annotations

import torch


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
    out = query.new_zeros(*query.shape[:2], value_dim)
    for request, length in enumerate(seq_lens.tolist()):
        blocks = block_table[request, : -(-length // latent_cache.shape[1])].long()
        latent = latent_cache[blocks].flatten(0, 1)[:length]
        weights = (query[request] @ latent.T * scale).softmax(-1)  # [heads, length]
        out[request] = weights @ latent[:, :value_dim]
    return out
