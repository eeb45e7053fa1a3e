"""Reading and writing the paged KV cache: copies, one implementation for all modes."""

from __future__ import annotations

import torch


def kv_write(
    key: torch.Tensor,
    value: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
) -> None:
    """See ``Ops.kv_write``."""
    key_cache.flatten(0, 1).index_copy_(0, slot_mapping, key)
    value_cache.flatten(0, 1).index_copy_(0, slot_mapping, value)


def gather_sequence(cache: torch.Tensor, blocks: torch.Tensor, length: int) -> torch.Tensor:
    """The first ``length`` tokens of the sequence stored in ``blocks`` -> [length, kv_heads, d]."""
    num_blocks = -(-length // cache.shape[1])
    return cache[blocks[:num_blocks]].flatten(0, 1)[:length]
