"""Second grouped product of the experts: sorted rows in, weighted pairs out."""

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
def down_tile(
    h_ptr, h_desc, w_ptr, w_desc, scales_ptr, bias_ptr, topk_weights_ptr, y_ptr,
    sorted_pairs_ptr, slot, block, tile_n, num_pairs, top_k, N, K,
    stride_hr, stride_ws, stride_wn, stride_ss, stride_sn, stride_sk, stride_bs,
    stride_kt, stride_kj, stride_yp,
    FORMAT: tl.constexpr, IDENTITY: tl.constexpr, EVEN_K: tl.constexpr, SWAP: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """A tile of y: a block's rows x BLOCK_N of the N outputs, each row put where its pair is."""
    pairs, live, rows = pairs_of(block, sorted_pairs_ptr, num_pairs, IDENTITY, BLOCK_M)
    columns = tile_n * BLOCK_N + tl.arange(0, BLOCK_N)
    n = tl.minimum(columns, N - 1)  # past the end: some row that exists, not stored
    w_rows = w_ptr + slot * stride_ws + n.to(tl.int64) * stride_wn
    w_row = (slot * N).to(tl.int32) + tile_n * BLOCK_N
    scale_rows = scale_rows_of(scales_ptr, slot, n, stride_ss, stride_sn, FORMAT)
    y, _ = accumulate(
        h_ptr + rows * stride_hr, h_desc, block * BLOCK_M, live,
        w_rows, w_desc, w_row, scale_rows, w_rows, w_row, scale_rows, K, stride_sk,
        FORMAT, False, SWAP, EVEN_K, BLOCK_M, BLOCK_N, BLOCK_K,
    )  # fmt: skip
    y = finish(y, scale_rows, bias_ptr, slot, n, stride_bs, FORMAT, SWAP)
    if SWAP:
        y = y.T
    if topk_weights_ptr is not None:
        weight_ptrs = topk_weights_ptr + (pairs // top_k).to(tl.int64) * stride_kt
        weights = tl.load(weight_ptrs + (pairs % top_k) * stride_kj, mask=live, other=0.0)
        y = y * weights[:, None]
    y_ptrs = y_ptr + pairs.to(tl.int64)[:, None] * stride_yp + columns[None, :]
    mask = live[:, None] & (columns < N)[None, :]
    tl.store(y_ptrs, y.to(y_ptr.dtype.element_ty), mask=mask)


@triton.jit
def moe_down_kernel(
    h_ptr, h_desc, w_ptr, w_desc, scales_ptr, bias_ptr, topk_weights_ptr, y_ptr,
    sorted_pairs_ptr, block_slots_ptr, num_padded_rows_ptr,
    num_pairs, num_blocks, top_k, N, K,
    stride_hr, stride_ws, stride_wn, stride_ss, stride_sn, stride_sk, stride_bs,
    stride_kt, stride_kj, stride_yp,
    FORMAT: tl.constexpr, IDENTITY: tl.constexpr, EVEN_K: tl.constexpr, SWAP: tl.constexpr,
    PERSISTENT: tl.constexpr, GROUP_M: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """A program computes tiles of y: BLOCK_M sorted rows x BLOCK_N of the N outputs.

    Grid: num_blocks * ceil(N / BLOCK_N), a tile each; blocks past the last in use return at once.
    With PERSISTENT a few programs a processor step through the tiles in use, and load what the
    next tile needs while they store the last.
    """
    num_tiles_n = tl.cdiv(N, BLOCK_N)
    if PERSISTENT:
        blocks = tl.load(num_padded_rows_ptr) // BLOCK_M
        for tile in tl.range(
            tl.program_id(0), blocks * num_tiles_n, tl.num_programs(0), flatten=True
        ):
            block, tile_n = tile_of(tile, blocks, num_tiles_n, GROUP_M)
            slot = tl.load(block_slots_ptr + block).to(tl.int64)
            down_tile(
                h_ptr, h_desc, w_ptr, w_desc, scales_ptr, bias_ptr, topk_weights_ptr, y_ptr,
                sorted_pairs_ptr, slot, block, tile_n, num_pairs, top_k, N, K,
                stride_hr, stride_ws, stride_wn, stride_ss, stride_sn, stride_sk, stride_bs,
                stride_kt, stride_kj, stride_yp,
                FORMAT, IDENTITY, EVEN_K, SWAP, BLOCK_M, BLOCK_N, BLOCK_K,
            )  # fmt: skip
    else:
        block, tile_n = tile_of(tl.program_id(0), num_blocks, num_tiles_n, GROUP_M)
        slot = tl.load(block_slots_ptr + block).to(tl.int64)
        if slot >= 0:
            down_tile(
                h_ptr, h_desc, w_ptr, w_desc, scales_ptr, bias_ptr, topk_weights_ptr, y_ptr,
                sorted_pairs_ptr, slot, block, tile_n, num_pairs, top_k, N, K,
                stride_hr, stride_ws, stride_wn, stride_ss, stride_sn, stride_sk, stride_bs,
                stride_kt, stride_kj, stride_yp,
                FORMAT, IDENTITY, EVEN_K, SWAP, BLOCK_M, BLOCK_N, BLOCK_K,
            )  # fmt: skip
