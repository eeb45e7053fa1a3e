"""Random inputs of attention: blocks in random order, NaN where nothing may be read."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

FP8 = torch.float8_e4m3fn


@dataclass(frozen=True)
class Inputs:
    """Tensors for ``attn_decode`` (one query a request) and ``attn_prefill``."""

    query: torch.Tensor
    key_cache: torch.Tensor
    value_cache: torch.Tensor
    block_table: torch.Tensor
    query_starts: torch.Tensor
    seq_lens: torch.Tensor
    query_lens: list[int]

    def decode(self) -> tuple[torch.Tensor, ...]:
        """Positional tensors of ``attn_decode``."""
        return self.query, self.key_cache, self.value_cache, self.block_table, self.seq_lens

    def prefill(self) -> tuple[torch.Tensor, ...]:
        """Positional tensors of ``attn_prefill``."""
        starts = (self.query_starts, self.seq_lens)
        return self.query, self.key_cache, self.value_cache, self.block_table, *starts


def draw(
    seq_lens: Sequence[int],
    query_lens: Sequence[int] | None = None,
    *,
    heads: int = 4,
    kv_heads: int = 2,
    d: int = 32,
    d_v: int | None = None,
    block_size: int = 16,
    dtype: torch.dtype = torch.float32,
    cache_dtype: torch.dtype | None = None,
    seed: int = 0,
) -> Inputs:
    """Slots past a sequence are NaN, table entries past it point out of the cache."""
    generator = torch.Generator().manual_seed(seed)
    query_lens = [1] * len(seq_lens) if query_lens is None else list(query_lens)
    blocks = [-(-length // block_size) for length in seq_lens]
    table = torch.full((len(seq_lens), max([*blocks, 1])), 101, dtype=torch.int32)
    caches = [
        torch.full((sum(blocks) + 1, block_size, kv_heads, size), torch.nan)
        for size in (d, d if d_v is None else d_v)
    ]
    order = torch.randperm(sum(blocks) + 1, generator=generator)
    first = 0
    for request, length in enumerate(seq_lens):
        mine = order[first : first + blocks[request]]
        first += blocks[request]
        table[request, : len(mine)] = mine
        positions = torch.arange(length)
        for cache in caches:
            cache[mine[positions // block_size], positions % block_size] = torch.randn(
                length, *cache.shape[2:], generator=generator
            )
    query = torch.randn(sum(query_lens), heads, d, generator=generator)
    starts = torch.tensor([0, *query_lens], dtype=torch.int32).cumsum(0).to(torch.int32)
    stored = cache_dtype or dtype
    return Inputs(
        query.to(dtype),
        caches[0].to(stored),
        caches[1].to(stored),
        table,
        starts,
        torch.tensor(list(seq_lens), dtype=torch.int32),
        query_lens,
    )


def exact(tensors: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
    """Floats in float64 for the formula; stored fp8 values stay what they are."""
    return tuple(
        one.double() if one.is_floating_point() and one.dtype != FP8 else one for one in tensors
    )
