"""Attention of one query token a request: long sequences are split over programs, then merged."""

import triton
import triton.language as tl

from moeserve_kernels.device.kernels.attention import (
    LOG2_E,
    cache_offsets,
    load_rows,
    scaled,
    softmax_step,
    span_of_split,
    start_rows,
    store_split,
)


@triton.jit
def decode_kernel(
    query_ptr, key_cache_ptr, value_cache_ptr, block_table_ptr, seq_lens_ptr, sinks_ptr, out_ptr,
    lse_ptr,
    scale, v_scale, soft_cap, window, num_splits,
    stride_qb, stride_qh, stride_kb, stride_ks, stride_kh, stride_vb, stride_vs, stride_vh,
    stride_tb, stride_ob, stride_os, stride_oh, stride_lb, stride_ls,
    GROUP: tl.constexpr, HEAD_BLOCKS: tl.constexpr, HEAD_DIM: tl.constexpr, VALUE_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, SINKS: tl.constexpr, FINAL: tl.constexpr, BLOCK_H: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_V: tl.constexpr,
):  # fmt: skip
    """Program (request, block of the query heads of one kv head, split of the sequence).

    FINAL: the only split, so ``out`` is the result; otherwise out is the splits' means in float32.
    """
    request = tl.program_id(0).to(tl.int64)
    kv_head = tl.program_id(1) // HEAD_BLOCKS
    split = tl.program_id(2)
    in_group = (tl.program_id(1) % HEAD_BLOCKS) * BLOCK_H + tl.arange(0, BLOCK_H)
    live = in_group < GROUP
    heads = kv_head * GROUP + in_group
    length = tl.load(seq_lens_ptr + request)
    begin, end = span_of_split(length, split, num_splits, window, BLOCK_N)
    lse_pointers = lse_ptr + request * stride_lb + split * stride_ls + heads
    if not FINAL:  # noqa: SIM102  (one is for the compiler)
        if begin >= end:
            # The mean stays unwritten; who merges does not read it.
            tl.store(lse_pointers, tl.full((BLOCK_H,), float("-inf"), tl.float32), mask=live)
            return
    query_rows = query_ptr + request * stride_qb + heads * stride_qh
    query = load_rows(query_rows, live, HEAD_DIM, BLOCK_D, True)
    highest, total, acc = start_rows(sinks_ptr, heads, live, BLOCK_H, BLOCK_V, SINKS)
    keys_ptr = key_cache_ptr + kv_head * stride_kh
    values_ptr = value_cache_ptr + kv_head * stride_vh
    for start in range(begin, end, BLOCK_N):
        positions = start + tl.arange(0, BLOCK_N)
        inside = positions < end
        block, slot = cache_offsets(
            block_table_ptr + request * stride_tb, positions, inside, BLOCK_SIZE, True
        )
        key_rows = keys_ptr + block * stride_kb + slot * stride_ks
        value_rows = values_ptr + block * stride_vb + slot * stride_vs
        key = load_rows(key_rows, inside, HEAD_DIM, BLOCK_D, True).to(query.dtype)
        value = load_rows(value_rows, inside, VALUE_DIM, BLOCK_V, True).to(query.dtype)
        scores = scaled(tl.dot(query, key.T, input_precision="ieee"), scale, soft_cap)
        scores = tl.where(inside[None, :], scores, float("-inf"))
        highest, total, acc = softmax_step(scores, value, highest, total, acc)
    out_rows = out_ptr + request * stride_ob + split * stride_os + heads * stride_oh
    store_split(
        acc, highest, total, v_scale, live, out_rows, lse_pointers, VALUE_DIM, BLOCK_V, FINAL
    )


@triton.jit
def merge_kernel(
    partial_ptr,
    lse_ptr,
    sinks_ptr,
    out_ptr,
    num_splits,
    stride_pb,
    stride_ps,
    stride_ph,
    stride_lb,
    stride_ls,
    stride_lh,
    stride_ob,
    stride_oh,
    SINKS: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    BLOCK_S: tl.constexpr,
    BLOCK_V: tl.constexpr,
):
    """Program (request, head): the mean of its splits, weighted by exp(lse)."""
    request = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    lse_row = lse_ptr + request * stride_lb + head * stride_lh
    partial_row = partial_ptr + request * stride_pb + head * stride_ph
    column = tl.arange(0, BLOCK_V)
    highest = tl.full((), float("-inf"), tl.float32)
    if SINKS:
        sink = tl.load(sinks_ptr + head).to(tl.float32)
        highest = tl.maximum(highest, sink)
    for start in range(0, num_splits, BLOCK_S):
        split = start + tl.arange(0, BLOCK_S)
        lse = tl.load(lse_row + split * stride_ls, mask=split < num_splits, other=float("-inf"))
        highest = tl.maximum(highest, tl.max(lse, 0))
    shift = tl.where(highest == float("-inf"), 0.0, highest)
    total = tl.zeros((), tl.float32)
    if SINKS:
        total = tl.exp2((sink - shift) * LOG2_E)
    acc = tl.zeros((BLOCK_V,), tl.float32)
    for start in range(0, num_splits, BLOCK_S):
        split = start + tl.arange(0, BLOCK_S)
        lse = tl.load(lse_row + split * stride_ls, mask=split < num_splits, other=float("-inf"))
        weight = tl.exp2((lse - shift) * LOG2_E)
        rows = partial_row + split.to(tl.int64) * stride_ps
        # A split without tokens was never written.
        mask = (lse != float("-inf"))[:, None] & (column < VALUE_DIM)[None, :]
        part = tl.load(rows[:, None] + column[None, :], mask=mask, other=0.0)
        total += tl.sum(weight, 0)
        acc += tl.sum(part * weight[:, None], 0)
    out = acc / tl.where(total == 0, 1.0, total)
    out_row = out_ptr + request * stride_ob + head * stride_oh
    tl.store(out_row + column, out.to(out_ptr.dtype.element_ty), mask=column < VALUE_DIM)
