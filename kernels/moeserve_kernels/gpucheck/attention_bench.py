"""Attention over a paged cache: microseconds, share of the floor, and against torch's SDPA."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch.nn import functional

from moeserve_kernels import floors
from moeserve_kernels.floors import Floor
from moeserve_kernels.gpucheck.measure import num_sets, time_calls
from moeserve_kernels.gpucheck.plan import Context, Item
from moeserve_kernels.operations.attention import attn_decode, attn_prefill
from moeserve_kernels.operations.mla import mla_decode

_BLOCK = 16
_MAX_CACHE_BYTES = 40 << 30
_ROWS = ((32, 1024), (128, 8192), (1, 32768), (256, 1024), (32, 8192), (1, 1024), (128, 1024))
_MORE = ((32, 32768), (1, 8192), (256, 8192), (128, 32768), (256, 32768))


@dataclass(frozen=True)
class Heads:
    """heads of queries, heads of keys and values, and their size."""

    name: str
    heads: int
    kv_heads: int
    size: int


QWEN3 = Heads("qwen3-30b", 32, 4, 128)
MIXTRAL = Heads("mixtral-8x7b", 32, 8, 128)


def items(*, dry: bool) -> list[Item]:
    """Decode attention at batch 1, 32, 128, 256 x 1k, 8k, 32k."""
    if dry:
        return [_decode_item(Heads("tiny", 4, 2, 64), 2, 40)]
    return [
        _decode_item(heads, batch, length)
        for heads, rows in ((QWEN3, _ROWS + _MORE), (MIXTRAL, _ROWS[:4]))
        for batch, length in rows
    ]


def other_items(*, dry: bool) -> list[Item]:
    """MLA decode with the heads of a rank, and prefill, whole and in chunks."""
    if dry:
        return [_mla_item(2, 20, 4), _prefill_item(8, 20, Heads("tiny", 4, 2, 64))]
    mla = [_mla_item(*row) for row in ((32, 8192, 16), (128, 8192, 16), (128, 8192, 128))]
    rows = ((8192, 8192), (2048, 32768), (512, 8192))
    return [*mla, *(_prefill_item(*row, QWEN3) for row in rows)]


def _decode_item(heads: Heads, batch: int, length: int) -> Item:
    name = f"{heads.name} decode B={batch} n={length}"
    return Item("attention", name, 5.0, partial(_decode, heads, batch, length, name))


def _mla_item(batch: int, length: int, heads: int) -> Item:
    name = f"mla decode B={batch} n={length} heads={heads}"
    return Item("attention", name, 5.0, partial(_mla, batch, length, heads, name))


def _prefill_item(queries: int, length: int, heads: Heads) -> Item:
    name = f"{heads.name} prefill {queries} of n={length}"
    return Item("attention", name, 5.0, partial(_prefill, queries, length, heads, name))


def _decode(heads: Heads, batch: int, length: int, name: str, context: Context) -> None:
    floor = floors.attn_decode(batch, length, heads.heads, heads.kv_heads, heads.size)
    if floor.num_bytes > _MAX_CACHE_BYTES:
        raise ValueError(f"the cache would take {floor.num_bytes / 2**30:.0f} GiB")
    sets = num_sets(floor.num_bytes)
    query = _normal(context, batch, heads.heads, heads.size)
    key, value, tables, seq_lens = _paged(heads, batch, length, sets, context)
    scale = heads.size**-0.5
    calls: list[Callable[[], object]] = [
        partial(attn_decode, query, key, value, table, seq_lens, scale, max_seq_len=length)
        for table in tables
    ]
    del key, value
    _report(name, floor, calls, _sdpa_calls(heads, query, length, sets, context), context)


def _sdpa_calls(
    heads: Heads, query: torch.Tensor, length: int, sets: int, context: Context
) -> Callable[[], list[Callable[[], object]]]:
    """SDPA on the same sizes with a contiguous cache: paging may cost what the ratio says."""

    def prepare() -> list[Callable[[], object]]:
        shape = (query.shape[0], heads.kv_heads, length, heads.size)
        caches = [(_normal(context, *shape), _normal(context, *shape)) for _ in range(sets)]
        sdpa = functional.scaled_dot_product_attention
        return [
            partial(sdpa, query[:, :, None], key, value, enable_gqa=True) for key, value in caches
        ]

    return prepare


def _mla(batch: int, length: int, heads: int, name: str, context: Context) -> None:
    floor = floors.mla_decode(batch, length, heads)
    sets = num_sets(floor.num_bytes)
    query = _normal(context, batch, heads, 576)
    blocks = -(-length // _BLOCK)
    cache = _normal(context, sets * batch * blocks, _BLOCK, 576)
    tables, seq_lens = _tables(batch, length, sets, context)
    calls: list[Callable[[], object]] = [
        partial(mla_decode, query, cache, table, seq_lens, 192**-0.5, max_seq_len=length)
        for table in tables
    ]
    _report(name, floor, calls, None, context)


def _prefill(queries: int, length: int, heads: Heads, name: str, context: Context) -> None:
    floor = floors.attn_prefill(queries, length, heads.heads, heads.kv_heads, heads.size)
    query = _normal(context, queries, heads.heads, heads.size)
    key, value, tables, seq_lens = _paged(heads, 1, length, 1, context)
    starts = torch.tensor([0, queries], dtype=torch.int32, device=context.device)
    scale = heads.size**-0.5
    call = partial(
        attn_prefill,
        query,
        key,
        value,
        tables[0],
        starts,
        seq_lens,
        scale,
        max_query_len=queries,
    )

    def prepare() -> list[Callable[[], object]]:
        shape = (1, heads.kv_heads, length, heads.size)
        rows = query.transpose(0, 1)[None]
        sdpa = functional.scaled_dot_product_attention
        caches = _normal(context, *shape), _normal(context, *shape)
        return [partial(sdpa, rows, *caches, is_causal=True, enable_gqa=True)]

    # SDPA puts the first query at the first token, which is the same work for whole prompts only.
    _report(name, floor, [call], prepare if queries == length else None, context)


def _report(
    name: str,
    floor: Floor,
    calls: list[Callable[[], object]],
    peer: Callable[[], list[Callable[[], object]]] | None,
    context: Context,
) -> None:
    ours = time_calls(calls)
    least = floor.microseconds(context.limits)
    fields: dict[str, Any] = {}
    calls.clear()  # lets go of our cache before the peer's is made
    if peer is not None:
        try:
            theirs = time_calls(peer(), seconds=0.06)
            fields["sdpa_us"] = theirs.microseconds
            fields["sdpa_ratio"] = theirs.microseconds / ours.microseconds
        except Exception as error:  # a peer may fail in any way; our own result stands
            context.report.failed("peer", f"sdpa, {name}", error, matters=False)
    context.report.add(
        "attention",
        name,
        microseconds=ours.microseconds,
        floor_us=least,
        share_of_floor=least / ours.microseconds,
        bound=floor.bound(context.limits),
        gb_per_s=floor.num_bytes / ours.microseconds / 1e3,
        tflops=floor.flops / ours.microseconds / 1e6,
        spread=ours.spread,
        graph=ours.is_graph,
        **fields,
    )


def _normal(context: Context, *shape: int) -> torch.Tensor:
    return torch.empty(shape, dtype=context.dtype, device=context.device).normal_()


def _paged(
    heads: Heads, batch: int, length: int, sets: int, context: Context
) -> tuple[torch.Tensor, torch.Tensor, list[torch.Tensor], torch.Tensor]:
    """Key and value caches, and for each set a table of blocks of its own."""
    blocks = sets * batch * -(-length // _BLOCK)
    shape = (blocks, _BLOCK, heads.kv_heads, heads.size)
    tables, seq_lens = _tables(batch, length, sets, context)
    return _normal(context, *shape), _normal(context, *shape), tables, seq_lens


def _tables(
    batch: int, length: int, sets: int, context: Context
) -> tuple[list[torch.Tensor], torch.Tensor]:
    """Blocks in random order, as after hours of serving."""
    per_request = -(-length // _BLOCK)
    generator = torch.Generator().manual_seed(context.seed)
    order = torch.randperm(sets * batch * per_request, generator=generator).to(torch.int32)
    tables = order.view(sets, batch, per_request).to(context.device)
    seq_lens = torch.full((batch,), length, dtype=torch.int32, device=context.device)
    return list(tables), seq_lens
