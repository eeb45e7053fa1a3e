"""Random inputs for kernel tests, and their error measure."""

from __future__ import annotations

from dataclasses import dataclass

import torch

TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 1e-2}


def assert_close(got: torch.Tensor, want: torch.Tensor) -> None:
    """``got`` is near the float64 ``want``: relative error of the whole, and of the worst value.

    The whole within ``TOLERANCE`` of the dtype, in the Euclidean norm; the worst value within three
    times that, relative to the largest: one of several thousand may round badly several times over.
    """
    assert got.shape == want.shape
    if got.numel() == 0:
        return
    difference, tolerance = got.double() - want, TOLERANCE[got.dtype]
    whole = difference.norm() / want.norm().clamp(min=1e-3)
    worst = difference.abs().max() / want.abs().max().clamp(min=1e-3)
    assert whole <= tolerance, f"relative error {whole:.2e}"
    assert worst <= 3 * tolerance, f"worst value off by {worst:.2e} of the largest"


@dataclass(frozen=True, kw_only=True)
class Experts:
    """Random experts of one rank and the rows that reach it."""

    hidden_states: torch.Tensor
    w13: torch.Tensor
    w2: torch.Tensor
    slots: torch.Tensor
    topk_weights: torch.Tensor

    def double(self) -> tuple[torch.Tensor, ...]:
        """The arguments of ``moe_ffn`` in float64."""
        return (
            self.hidden_states.double(),
            self.w13.double(),
            self.w2.double(),
            self.slots,
            self.topk_weights,
        )


def random_experts(
    seed: int,
    *,
    rows: int,
    top_k: int,
    slots: int,
    hidden: int = 72,
    size: int = 36,
    dtype: torch.dtype = torch.float32,
) -> Experts:
    """Slots are drawn with about a third of the pairs elsewhere."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator).to(dtype)

    chosen = torch.rand(rows, max(slots, top_k), generator=generator).argsort(1)[:, :top_k]
    elsewhere = (torch.rand(rows, top_k, generator=generator) < 0.3) | (chosen >= slots)
    return Experts(
        hidden_states=normal(rows, hidden),
        w13=normal(slots, 2 * size, hidden) / hidden**0.5,
        w2=normal(slots, hidden, size) / size**0.5,
        slots=chosen.masked_fill(elsewhere, -1),
        topk_weights=torch.rand(rows, top_k, generator=generator),
    )


@dataclass(frozen=True, kw_only=True)
class Paged:
    """Random queries and a paged cache; blocks of a sequence are scattered over it."""

    query: torch.Tensor
    key_cache: torch.Tensor
    value_cache: torch.Tensor
    block_table: torch.Tensor
    query_lens: tuple[int, ...]
    seq_lens: tuple[int, ...]


def random_paged(
    seed: int,
    lens: list[tuple[int, int]],
    *,
    kv_heads: int = 2,
    group: int = 2,
    head_dim: int = 16,
    block_size: int = 4,
    dtype: torch.dtype = torch.float32,
) -> Paged:
    """lens: query_len and seq_len of each request. What no sequence owns is NaN."""
    generator = torch.Generator().manual_seed(seed)
    needed = [-(-length // block_size) for _, length in lens]
    num_blocks = sum(needed) + 3
    order = torch.randperm(num_blocks, generator=generator)
    table = torch.zeros(len(lens), max(needed, default=1), dtype=torch.int64)
    caches = torch.full((2, num_blocks, block_size, kv_heads, head_dim), torch.nan, dtype=dtype)
    start = 0
    for row, (count, (_, length)) in enumerate(zip(needed, lens, strict=True)):
        blocks = order[start : start + count]
        table[row, :count] = blocks
        content = torch.randn(2, length, kv_heads, head_dim, generator=generator).to(dtype)
        slots = torch.arange(length)
        caches[:, blocks[slots // block_size], slots % block_size] = content
        start += count
    num_queries = sum(count for count, _ in lens)
    query = torch.randn(num_queries, kv_heads * group, head_dim, generator=generator).to(dtype)
    return Paged(
        query=query,
        key_cache=caches[0],
        value_cache=caches[1],
        block_table=table,
        query_lens=tuple(count for count, _ in lens),
        seq_lens=tuple(length for _, length in lens),
    )
