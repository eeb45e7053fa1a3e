"""Kernels that sort (token, expert) pairs by slot, stably: count, scan, place.

Pairs are taken in chunks of CHUNK. A pair's row is the first row of its slot, plus the pairs of the
slot in earlier chunks, plus those earlier in its own chunk: sums of whole numbers, so nothing
depends on which program runs first.
"""

import triton
import triton.language as tl


@triton.jit
def load_slots(
    ids_ptr,
    map_ptr,
    pairs,
    num_pairs,
    top_k,
    num_ids,
    num_slots,
    stride_t,
    stride_k,
    HAS_MAP: tl.constexpr,
):
    """The slot of each pair, int32; ``num_slots`` for a pair that is not here."""
    tokens = pairs // top_k
    offsets = tokens.to(tl.int64) * stride_t + (pairs - tokens * top_k) * stride_k
    slots = tl.load(ids_ptr + offsets, mask=pairs < num_pairs, other=-1)
    here = (slots >= 0) & (slots < num_ids)
    if HAS_MAP:
        slots = tl.load(map_ptr + slots, mask=here, other=-1)
        here = (slots >= 0) & (slots < num_slots)
    return tl.where(here, slots, num_slots).to(tl.int32)


@triton.jit
def ranks_in_chunk(slots, CHUNK: tl.constexpr):
    """How many pairs of the same slot stand before each pair of the chunk."""
    place = tl.arange(0, CHUNK)
    earlier = (slots[None, :] == slots[:, None]) & (place[None, :] < place[:, None])
    return tl.sum(earlier.to(tl.int32), 1)


@triton.jit
def first_above(ends, values, BLOCK_S: tl.constexpr, BLOCK_B: tl.constexpr):
    """For each value the first place in rising ``ends`` that is above it, the last if none is.

    A binary search: comparing all with all takes BLOCK_B * BLOCK_S registers.
    """
    low = tl.zeros((BLOCK_B,), tl.int32)
    step = BLOCK_S // 2
    while step > 0:
        passed = tl.gather(ends, low + (step - 1), 0) <= values
        low = tl.where(passed, low + step, low)
        step = step // 2
    return low


@triton.jit
def fill_blocks(
    sorted_ptr,
    slots_ptr,
    counts,
    ends,
    num_pairs,
    num_blocks,
    block_m,
    BLOCK_S: tl.constexpr,
    BLOCK_B: tl.constexpr,
    BLOCK_M: tl.constexpr,
):
    """Writes the slot of each block, and ``num_pairs`` in rows of padding; programs share them.

    counts, ends: [BLOCK_S], pairs of each slot and the first block after its run.
    """
    starts = ends - (counts + block_m - 1) // block_m
    first_padding = starts * block_m + counts
    in_use = tl.max(ends, 0)
    row = tl.arange(0, BLOCK_M)
    for first in range(tl.program_id(0) * BLOCK_B, num_blocks, tl.num_programs(0) * BLOCK_B):
        block = first + tl.arange(0, BLOCK_B)
        slot = first_above(ends, block, BLOCK_S, BLOCK_B)
        tl.store(slots_ptr + block, tl.where(block < in_use, slot, -1), mask=block < num_blocks)
        padding = tl.gather(first_padding, slot, 0)
        padding = tl.where(block < in_use, padding, 0)
        rows = block[:, None] * block_m + row[None, :]
        mask = (rows >= padding[:, None]) & (row < block_m)[None, :] & (block < num_blocks)[:, None]
        tl.store(sorted_ptr + rows, tl.zeros_like(rows) + num_pairs, mask=mask)


@triton.jit
def count_chunks_kernel(
    ids_ptr,
    map_ptr,
    chunk_counts_ptr,
    num_pairs,
    top_k,
    num_ids,
    num_slots,
    stride_t,
    stride_k,
    HAS_MAP: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK_S: tl.constexpr,
):
    """Program c: pairs of each slot in chunk c -> chunk_counts [chunks, num_slots]."""
    chunk = tl.program_id(0)
    pairs = chunk * CHUNK + tl.arange(0, CHUNK)
    slots = load_slots(
        ids_ptr, map_ptr, pairs, num_pairs, top_k, num_ids, num_slots, stride_t, stride_k, HAS_MAP
    )
    counts = tl.histogram(slots, BLOCK_S)
    slot = tl.arange(0, BLOCK_S)
    first = chunk_counts_ptr + chunk.to(tl.int64) * num_slots
    tl.store(first + slot, counts, mask=slot < num_slots)


@triton.jit
def scan_chunks_kernel(
    chunk_counts_ptr,
    totals_ptr,
    num_chunks,
    num_columns,
    BLOCK_CHUNKS: tl.constexpr,
    BLOCK_COLUMNS: tl.constexpr,
):
    """Program n: a block of columns of [chunks, columns]: each count becomes the sum of those
    above it, in place; the sum of all goes to ``totals``."""
    column = tl.program_id(0) * BLOCK_COLUMNS + tl.arange(0, BLOCK_COLUMNS)
    total = tl.zeros((BLOCK_COLUMNS,), tl.int32)
    for first in range(0, num_chunks, BLOCK_CHUNKS):
        chunk = first + tl.arange(0, BLOCK_CHUNKS)
        mask = (chunk < num_chunks)[:, None] & (column < num_columns)[None, :]
        where = chunk_counts_ptr + chunk.to(tl.int64)[:, None] * num_columns + column[None, :]
        counts = tl.load(where, mask=mask, other=0)
        tl.store(where, total[None, :] + tl.cumsum(counts, 0) - counts, mask=mask)
        total += tl.sum(counts, 0)
    tl.store(totals_ptr + column, total, mask=column < num_columns)


@triton.jit
def place_pairs_kernel(
    ids_ptr,
    map_ptr,
    chunk_offsets_ptr,
    counts_ptr,
    sorted_ptr,
    block_slots_ptr,
    num_padded_rows_ptr,
    num_pairs,
    top_k,
    num_ids,
    num_slots,
    stride_t,
    stride_k,
    num_blocks,
    block_m,
    HAS_MAP: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK_S: tl.constexpr,
    BLOCK_B: tl.constexpr,
    BLOCK_M: tl.constexpr,
):
    """Program c: writes the pairs of chunk c to their rows, and its share of the blocks."""
    chunk = tl.program_id(0)
    slot = tl.arange(0, BLOCK_S)
    counts = tl.load(counts_ptr + slot, mask=slot < num_slots, other=0)
    blocks = (counts + block_m - 1) // block_m
    ends = tl.cumsum(blocks, 0)
    pairs = chunk * CHUNK + tl.arange(0, CHUNK)
    slots = load_slots(
        ids_ptr, map_ptr, pairs, num_pairs, top_k, num_ids, num_slots, stride_t, stride_k, HAS_MAP
    )
    here = slots < num_slots
    first = chunk_offsets_ptr + chunk.to(tl.int64) * num_slots
    row = tl.load(first + slots, mask=here, other=0) + ranks_in_chunk(slots, CHUNK)
    row += tl.gather((ends - blocks) * block_m, slots, 0)
    tl.store(sorted_ptr + row, pairs, mask=here)
    fill_blocks(
        sorted_ptr,
        block_slots_ptr,
        counts,
        ends,
        num_pairs,
        num_blocks,
        block_m,
        BLOCK_S,
        BLOCK_B,
        BLOCK_M,
    )
    if chunk == 0:
        tl.store(num_padded_rows_ptr, tl.sum(blocks, 0) * block_m)


@triton.jit
def align_once_kernel(
    ids_ptr,
    map_ptr,
    counts_ptr,
    sorted_ptr,
    block_slots_ptr,
    num_padded_rows_ptr,
    num_pairs,
    top_k,
    num_ids,
    num_slots,
    stride_t,
    stride_k,
    num_blocks,
    block_m,
    HAS_MAP: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK_S: tl.constexpr,
    BLOCK_B: tl.constexpr,
    BLOCK_M: tl.constexpr,
):
    """One program does it all, chunk after chunk: for few pairs a launch costs more than this."""
    slot = tl.arange(0, BLOCK_S)
    counts = tl.zeros((BLOCK_S,), tl.int32)
    for first in range(0, num_pairs, CHUNK):
        pairs = first + tl.arange(0, CHUNK)
        slots = load_slots(
            ids_ptr, map_ptr, pairs, num_pairs, top_k, num_ids, num_slots, stride_t, stride_k,
            HAS_MAP,
        )  # fmt: skip
        counts += tl.histogram(slots, BLOCK_S)
    counts = tl.where(slot < num_slots, counts, 0)
    tl.store(counts_ptr + slot, counts, mask=slot < num_slots)
    blocks = (counts + block_m - 1) // block_m
    ends = tl.cumsum(blocks, 0)
    tl.store(num_padded_rows_ptr, tl.sum(blocks, 0) * block_m)
    next_row = (ends - blocks) * block_m
    for first in range(0, num_pairs, CHUNK):
        pairs = first + tl.arange(0, CHUNK)
        slots = load_slots(
            ids_ptr, map_ptr, pairs, num_pairs, top_k, num_ids, num_slots, stride_t, stride_k,
            HAS_MAP,
        )  # fmt: skip
        row = tl.gather(next_row, slots, 0) + ranks_in_chunk(slots, CHUNK)
        tl.store(sorted_ptr + row, pairs, mask=slots < num_slots)
        next_row += tl.histogram(slots, BLOCK_S)
    fill_blocks(
        sorted_ptr, block_slots_ptr, counts, ends, num_pairs, num_blocks, block_m,
        BLOCK_S, BLOCK_B, BLOCK_M,
    )  # fmt: skip


@triton.jit
def map_ids_kernel(
    ids_ptr,
    map_ptr,
    slots_ptr,
    num_pairs,
    top_k,
    num_ids,
    num_slots,
    stride_t,
    stride_k,
    HAS_MAP: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """Program c: the slot of each pair of chunk c, -1 for one that is not here."""
    pairs = tl.program_id(0) * CHUNK + tl.arange(0, CHUNK)
    slots = load_slots(
        ids_ptr, map_ptr, pairs, num_pairs, top_k, num_ids, num_slots, stride_t, stride_k, HAS_MAP
    )
    tl.store(slots_ptr + pairs, tl.where(slots < num_slots, slots, -1), mask=pairs < num_pairs)
