"""Kernels that order tokens by the ranks that need them, copy their rows, and sum what returns."""

import triton
import triton.language as tl


@triton.jit
def load_needs(
    ranks_ptr,
    tokens,
    num_tokens,
    num_ranks,
    top_k,
    stride_t,
    stride_k,
    CHUNK: tl.constexpr,
    BLOCK_R: tl.constexpr,
):
    """1 where a token needs a rank, [CHUNK, BLOCK_R] int32: once, however many choices do."""
    rank = tl.arange(0, BLOCK_R)
    needs = tl.zeros((CHUNK, BLOCK_R), tl.int32)
    row = ranks_ptr + tokens.to(tl.int64) * stride_t
    for j in range(top_k):
        chosen = tl.load(row + j * stride_k, mask=tokens < num_tokens, other=-1)
        needs = needs | (chosen[:, None] == rank[None, :]).to(tl.int32)
    return tl.where((rank < num_ranks)[None, :], needs, 0)


@triton.jit
def count_needs_kernel(
    ranks_ptr,
    chunk_counts_ptr,
    num_tokens,
    num_ranks,
    top_k,
    stride_t,
    stride_k,
    CHUNK: tl.constexpr,
    BLOCK_R: tl.constexpr,
):
    """Program c: tokens of chunk c that need each rank -> chunk_counts [chunks, num_ranks]."""
    chunk = tl.program_id(0)
    tokens = chunk * CHUNK + tl.arange(0, CHUNK)
    needs = load_needs(
        ranks_ptr, tokens, num_tokens, num_ranks, top_k, stride_t, stride_k, CHUNK, BLOCK_R
    )
    rank = tl.arange(0, BLOCK_R)
    first = chunk_counts_ptr + chunk.to(tl.int64) * num_ranks
    tl.store(first + rank, tl.sum(needs, 0), mask=rank < num_ranks)


@triton.jit
def place_tokens_kernel(
    ranks_ptr,
    chunk_offsets_ptr,
    counts_ptr,
    row_tokens_ptr,
    row_of_ptr,
    num_tokens,
    num_ranks,
    top_k,
    stride_t,
    stride_k,
    num_rows,
    ONE_CHUNK: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_FILL: tl.constexpr,
):
    """Program c: the rows of the tokens of chunk c, and its share of the rows not in use.

    ONE_CHUNK: there is one program, nothing was counted before; it writes the counts too.
    """
    chunk = tl.program_id(0)
    rank = tl.arange(0, BLOCK_R)
    tokens = chunk * CHUNK + tl.arange(0, CHUNK)
    needs = load_needs(
        ranks_ptr, tokens, num_tokens, num_ranks, top_k, stride_t, stride_k, CHUNK, BLOCK_R
    )
    if ONE_CHUNK:
        counts = tl.sum(needs, 0)
        offsets = tl.cumsum(counts, 0) - counts
        tl.store(counts_ptr + rank, counts, mask=rank < num_ranks)
    else:
        counts = tl.load(counts_ptr + rank, mask=rank < num_ranks, other=0)
        first = chunk_offsets_ptr + chunk.to(tl.int64) * num_ranks
        offsets = tl.load(first + rank, mask=rank < num_ranks, other=0)
        offsets += tl.cumsum(counts, 0) - counts
    rows = offsets[None, :] + tl.cumsum(needs, 0) - needs
    where = tokens.to(tl.int64)[:, None] * num_ranks + rank[None, :]
    mask = (tokens < num_tokens)[:, None] & (rank < num_ranks)[None, :]
    tl.store(row_of_ptr + where, tl.where(needs > 0, rows, -1), mask=mask)
    tl.store(row_tokens_ptr + rows, tl.zeros_like(rows) + tokens[:, None], mask=needs > 0)
    in_use = tl.sum(counts, 0)
    for start in range(chunk * BLOCK_FILL, num_rows, tl.num_programs(0) * BLOCK_FILL):
        row = start + tl.arange(0, BLOCK_FILL)
        unused = (row >= in_use) & (row < num_rows)
        tl.store(row_tokens_ptr + row, tl.full((BLOCK_FILL,), -1, tl.int32), mask=unused)


@triton.jit
def copy_rows_kernel(
    source_ptr,
    row_tokens_ptr,
    rows_ptr,
    width,
    stride_source,
    stride_rows,
    BLOCK_H: tl.constexpr,
):
    """Program (r, n): columns n * BLOCK_H and on of row r, from its token; nothing for -1."""
    row = tl.program_id(0)
    token = tl.load(row_tokens_ptr + row)
    column = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)
    mask = column < tl.where(token >= 0, width, 0)
    values = tl.load(source_ptr + token.to(tl.int64) * stride_source + column, mask=mask)
    tl.store(rows_ptr + row.to(tl.int64) * stride_rows + column, values, mask=mask)


@triton.jit
def sum_rows_kernel(
    rows_ptr,
    row_of_ptr,
    out_ptr,
    num_ranks,
    width,
    stride_rows,
    stride_out,
    BLOCK_H: tl.constexpr,
):
    """Program (t, n): columns n * BLOCK_H and on of token t, summed over ranks in their order."""
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)
    total = tl.zeros((BLOCK_H,), tl.float32)
    for rank in range(num_ranks):
        row = tl.load(row_of_ptr + token * num_ranks + rank)
        mask = column < tl.where(row >= 0, width, 0)
        values = tl.load(rows_ptr + row.to(tl.int64) * stride_rows + column, mask=mask, other=0.0)
        total += values.to(tl.float32)
    out = out_ptr + token * stride_out + column
    tl.store(out, total.to(out_ptr.dtype.element_ty), mask=column < width)
