"""The paged KV cache: one pair of tensors per layer; who may use which block is decided above."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from moeserve.model.spec import ModelSpec


def bytes_per_block(spec: ModelSpec, block_size: int, dtype: torch.dtype) -> int:
    """Bytes of one KV block of ``block_size`` tokens, over all layers, keys and values."""
    per_token = 2 * spec.num_layers * spec.num_kv_heads * spec.head_dim * dtype.itemsize
    return per_token * block_size


@dataclass(frozen=True, kw_only=True, slots=True)
class KVCache:
    """layers: by layer a key and a value cache, each [num_blocks, block_size, kv_heads, d]."""

    layers: tuple[tuple[torch.Tensor, torch.Tensor], ...]

    @classmethod
    def allocate(
        cls, spec: ModelSpec, num_blocks: int, block_size: int, dtype: torch.dtype
    ) -> KVCache:
        """Zeroed memory for ``num_blocks`` blocks, ``bytes_per_block`` each."""
        shape = (num_blocks, block_size, spec.num_kv_heads, spec.head_dim)
        return cls(
            layers=tuple(
                (torch.zeros(shape, dtype=dtype), torch.zeros(shape, dtype=dtype))
                for _ in range(spec.num_layers)
            )
        )
