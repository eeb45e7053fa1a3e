"""Decode attention over a latent cache: every head reads the same rows, keys and values at once."""

import triton
import triton.language as tl

from moeserve_kernels.device.kernels.attention import (
    cache_offsets,
    load_rows,
    scaled,
    softmax_step,
    span_of_split,
    start_rows,
    store_split,
)


@triton.jit
def mla_decode_kernel(
    query_ptr, cache_ptr, block_table_ptr, seq_lens_ptr, out_ptr, lse_ptr,
    scale, num_heads, num_splits,
    stride_qb, stride_qh, stride_cb, stride_cs, stride_tb, stride_ob, stride_os, stride_oh,
    stride_lb, stride_ls,
    VALUE_DIM: tl.constexpr, ROTARY_DIM: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    FINAL: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_V: tl.constexpr,
    BLOCK_R: tl.constexpr,
):  # fmt: skip
    """Program (request, block of heads, split of the sequence); FINAL as in ``decode_kernel``.

    A row of the cache is VALUE_DIM latent values, key and value alike, then ROTARY_DIM of the key.
    """
    request = tl.program_id(0).to(tl.int64)
    heads = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)
    split = tl.program_id(2)
    live = heads < num_heads
    length = tl.load(seq_lens_ptr + request)
    begin, end = span_of_split(length, split, num_splits, None, BLOCK_N)
    lse_pointers = lse_ptr + request * stride_lb + split * stride_ls + heads
    if not FINAL:  # noqa: SIM102  (one is for the compiler)
        if begin >= end:
            tl.store(lse_pointers, tl.full((BLOCK_H,), float("-inf"), tl.float32), mask=live)
            return
    query_rows = query_ptr + request * stride_qb + heads * stride_qh
    query = load_rows(query_rows, live, VALUE_DIM, BLOCK_V, True)
    query_rotary = load_rows(query_rows + VALUE_DIM, live, ROTARY_DIM, BLOCK_R, True)
    highest, total, acc = start_rows(seq_lens_ptr, heads, live, BLOCK_H, BLOCK_V, False)
    for start in range(begin, end, BLOCK_N):
        positions = start + tl.arange(0, BLOCK_N)
        inside = positions < end
        block, slot = cache_offsets(
            block_table_ptr + request * stride_tb, positions, inside, BLOCK_SIZE, True
        )
        rows = cache_ptr + block * stride_cb + slot * stride_cs
        latent = load_rows(rows, inside, VALUE_DIM, BLOCK_V, True)
        rotary = load_rows(rows + VALUE_DIM, inside, ROTARY_DIM, BLOCK_R, True)
        scores = tl.dot(query_rotary, rotary.T, input_precision="ieee")
        scores = tl.dot(query, latent.T, scores, input_precision="ieee")
        scores = tl.where(inside[None, :], scaled(scores, scale, None), float("-inf"))
        highest, total, acc = softmax_step(scores, latent, highest, total, acc)
    out_rows = out_ptr + request * stride_ob + split * stride_os + heads * stride_oh
    store_split(acc, highest, total, 1.0, live, out_rows, lse_pointers, VALUE_DIM, BLOCK_V, FINAL)
