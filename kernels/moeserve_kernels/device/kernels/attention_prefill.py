"""Causal attention of many query tokens a request against its cached tokens.

A block of queries is several tokens times the query heads that share one kv head, so each tile of
keys is read once for all of them.
"""

import triton
import triton.language as tl

from moeserve_kernels.device.kernels.attention import (
    cache_offsets,
    load_rows,
    scaled,
    softmax_step,
    start_rows,
    store_split,
)


@triton.jit
def request_of(query_starts_ptr, num_requests, block, TOKENS: tl.constexpr, BLOCK_B: tl.constexpr):
    """The request that a block of queries belongs to.

    Request b's blocks start at ``query_starts[b] // TOKENS + b``: room for all its blocks whatever
    the lengths, so that the host need not know them.
    """
    before = tl.zeros((), tl.int32)
    for start in range(0, num_requests, BLOCK_B):
        request = start + tl.arange(0, BLOCK_B)
        first = tl.load(query_starts_ptr + request, mask=request < num_requests, other=0)
        starts = (first // TOKENS + request <= block) & (request < num_requests)
        before += tl.sum(starts.to(tl.int32), 0)
    return before - 1


@triton.jit
def attend(
    query, query_positions, highest, total, acc, begin, end,
    block_row_ptr, keys_ptr, values_ptr,
    scale, soft_cap, window,
    stride_kb, stride_ks, stride_vb, stride_vs,
    HEAD_DIM: tl.constexpr, VALUE_DIM: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_V: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """The softmax after the keys at ``begin..end``; not MASKED: every query sees all of them."""
    for start in range(begin, end, BLOCK_N):
        positions = start + tl.arange(0, BLOCK_N)
        inside = positions < end
        block, slot = cache_offsets(block_row_ptr, positions, inside, BLOCK_SIZE, MASKED)
        key_rows = keys_ptr + block * stride_kb + slot * stride_ks
        value_rows = values_ptr + block * stride_vb + slot * stride_vs
        key = load_rows(key_rows, inside, HEAD_DIM, BLOCK_D, MASKED).to(query.dtype)
        value = load_rows(value_rows, inside, VALUE_DIM, BLOCK_V, MASKED).to(query.dtype)
        scores = scaled(tl.dot(query, key.T, input_precision="ieee"), scale, soft_cap)
        if MASKED:
            distance = query_positions[:, None] - positions[None, :]
            visible = (distance >= 0) & inside[None, :]
            if window is not None:
                visible = visible & (distance < window)
            scores = tl.where(visible, scores, float("-inf"))
        highest, total, acc = softmax_step(scores, value, highest, total, acc)
    return highest, total, acc


@triton.jit
def tiles_of(first_position, end, window, BLOCK_N: tl.constexpr):
    """Keys of begin..full are seen by some of the queries, of full..tail by all, then by some."""
    begin = 0
    full = 0
    tail = (first_position + 1) // BLOCK_N * BLOCK_N
    if window is not None:
        begin = tl.maximum(first_position - window + 1, 0) // BLOCK_N * BLOCK_N
        full = tl.cdiv(tl.maximum(end - window, 0), BLOCK_N) * BLOCK_N
        full = tl.minimum(full, end)
        tail = tl.maximum(full, tail)
    return begin, full, tail, end


@triton.jit
def prefill_kernel(
    query_ptr, key_cache_ptr, value_cache_ptr, block_table_ptr, query_starts_ptr, seq_lens_ptr,
    sinks_ptr, out_ptr,
    scale, v_scale, soft_cap, window, num_requests,
    stride_qt, stride_qh, stride_kb, stride_ks, stride_kh, stride_vb, stride_vs, stride_vh,
    stride_tb, stride_ot, stride_oh,
    GROUP: tl.constexpr, HEADS: tl.constexpr, TOKENS: tl.constexpr, HEAD_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr, BLOCK_SIZE: tl.constexpr, SINKS: tl.constexpr, BLOCK_B: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_V: tl.constexpr,
):  # fmt: skip
    """Program (block of queries, kv head and block of its query heads).

    A block has TOKENS tokens times HEADS of the GROUP query heads of one kv head, in BLOCK_M rows.
    """
    # The last blocks of a prompt see the most keys: they start first.
    block = tl.num_programs(0) - 1 - tl.program_id(0)
    request = request_of(query_starts_ptr, num_requests, block, TOKENS, BLOCK_B)
    query_start = tl.load(query_starts_ptr + request)
    num_queries = tl.load(query_starts_ptr + request + 1) - query_start
    first_token = (block - query_start // TOKENS - request) * TOKENS
    if first_token >= num_queries:
        return
    head_blocks: tl.constexpr = (GROUP + HEADS - 1) // HEADS
    kv_head = tl.program_id(1) // head_blocks
    row = tl.arange(0, BLOCK_M)
    in_group = (tl.program_id(1) % head_blocks) * HEADS + row % HEADS
    token = first_token + row // HEADS
    live = (row < TOKENS * HEADS) & (token < num_queries) & (in_group < GROUP)
    heads = kv_head * GROUP + in_group
    length = tl.load(seq_lens_ptr + request)
    first_position = length - num_queries + first_token
    end = tl.minimum(first_position + TOKENS, length)
    query_rows = query_ptr + (query_start + token).to(tl.int64) * stride_qt + heads * stride_qh
    query = load_rows(query_rows, live, HEAD_DIM, BLOCK_D, True)
    highest, total, acc = start_rows(sinks_ptr, heads, live, BLOCK_M, BLOCK_V, SINKS)
    positions = first_position + row // HEADS
    table_ptr = block_table_ptr + request.to(tl.int64) * stride_tb
    keys_ptr = key_cache_ptr + kv_head * stride_kh
    values_ptr = value_cache_ptr + kv_head * stride_vh
    bounds = tiles_of(first_position, end, window, BLOCK_N)
    for part in tl.static_range(3):
        if part > 0 or window is not None:
            highest, total, acc = attend(
                query, positions, highest, total, acc, bounds[part], bounds[part + 1],
                table_ptr, keys_ptr, values_ptr, scale, soft_cap, window,
                stride_kb, stride_ks, stride_vb, stride_vs,
                HEAD_DIM, VALUE_DIM, BLOCK_SIZE, BLOCK_N, BLOCK_D, BLOCK_V, part != 1,
            )  # fmt: skip
    out_rows = out_ptr + (query_start + token).to(tl.int64) * stride_ot + heads * stride_oh
    store_split(acc, highest, total, v_scale, live, out_rows, out_rows, VALUE_DIM, BLOCK_V, True)
