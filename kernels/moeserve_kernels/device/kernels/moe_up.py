"""First grouped product of the experts: rows gathered by token, gate and up, activation."""

import triton
import triton.language as tl

from moeserve_kernels.device.kernels.grouped import (
    accumulate,
    finish,
    pairs_of,
    scale_rows_of,
    tile_of,
)


@triton.jit
def activate(gate, up, alpha, limit, ACTIVATION: tl.constexpr):
    """The gated activation, in float32."""
    if ACTIVATION == "silu":
        return gate * tl.sigmoid(gate) * up
    elif ACTIVATION == "gelu":
        # The tanh form: (1 + tanh(z)) / 2 = sigmoid(2 z), z = sqrt(2 / pi) (g + 0.044715 g^3).
        inner = 1.5957691216057308 * (gate + 0.044715 * gate * gate * gate)
        return gate * tl.sigmoid(inner) * up
    else:
        gate = tl.minimum(gate, limit)
        up = tl.minimum(tl.maximum(up, -limit), limit)
        return (up + 1.0) * gate * tl.sigmoid(alpha * gate)


@triton.jit
def moe_up_kernel(
    x_ptr, w_ptr, w_desc, scales_ptr, bias_ptr, h_ptr,
    sorted_pairs_ptr, block_slots_ptr,
    num_pairs, num_blocks, top_k, N, K, alpha, limit,
    stride_xt, stride_ws, stride_wn, stride_ss, stride_sn, stride_sk, stride_bs, stride_hr,
    FORMAT: tl.constexpr, ACTIVATION: tl.constexpr, IDENTITY: tl.constexpr,
    EVEN_K: tl.constexpr, SWAP: tl.constexpr, GROUP_M: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """A program computes a tile of h: BLOCK_M sorted rows x BLOCK_N of the N intermediate columns.

    Grid: num_blocks * ceil(N / BLOCK_N), of which blocks past the last in use return at once. Rows
    0..N-1 of a slot's weights are gate, N..2N-1 up. There is no persistent form: with rows that
    are gathered, triton 3.6 does not load ahead across tiles.
    """
    block, tile_n = tile_of(tl.program_id(0), num_blocks, tl.cdiv(N, BLOCK_N), GROUP_M)
    slot = tl.load(block_slots_ptr + block).to(tl.int64)
    if slot < 0:
        return
    pairs, live, rows = pairs_of(block, sorted_pairs_ptr, num_pairs, IDENTITY, BLOCK_M)
    columns = tile_n * BLOCK_N + tl.arange(0, BLOCK_N)
    n = tl.minimum(columns, N - 1)  # past the end: some row that exists, not stored
    x_rows = x_ptr + (pairs // top_k).to(tl.int64) * stride_xt
    w_rows = w_ptr + slot * stride_ws + n.to(tl.int64) * stride_wn
    w_row = (slot * 2 * N).to(tl.int32) + tile_n * BLOCK_N
    up_rows = w_ptr + slot * stride_ws + (N + n).to(tl.int64) * stride_wn
    scale_rows = scale_rows_of(scales_ptr, slot, n, stride_ss, stride_sn, FORMAT)
    up_scale_rows = scale_rows_of(scales_ptr, slot, N + n, stride_ss, stride_sn, FORMAT)
    gate, up = accumulate(
        x_rows, None, 0, live, w_rows, w_desc, w_row, scale_rows,
        up_rows, w_row + N, up_scale_rows, K, stride_sk,
        FORMAT, True, SWAP, EVEN_K, BLOCK_M, BLOCK_N, BLOCK_K,
    )  # fmt: skip
    gate = finish(gate, scale_rows, bias_ptr, slot, n, stride_bs, FORMAT, SWAP)
    up = finish(up, up_scale_rows, bias_ptr, slot, N + n, stride_bs, FORMAT, SWAP)
    h = activate(gate, up, alpha, limit, ACTIVATION)
    if SWAP:
        h = h.T
    h_ptrs = h_ptr + rows[:, None] * stride_hr + columns[None, :]
    mask = live[:, None] & (columns < N)[None, :]
    tl.store(h_ptrs, h.to(h_ptr.dtype.element_ty), mask=mask)
