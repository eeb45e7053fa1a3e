"""Root-mean-square norm of rows, with the sum of a residual before it if there is one."""

import triton
import triton.language as tl


@triton.jit
def load_sum(x_rows, residual_rows, column, mask, like_ptr, RESIDUAL: tl.constexpr):
    """Columns of the rows in float32; a sum is rounded as it is stored."""
    pointers = x_rows[:, None] + column[None, :]
    x = tl.load(pointers, mask=mask, other=0.0).to(tl.float32)
    if RESIDUAL:
        pointers = residual_rows[:, None] + column[None, :]
        x += tl.load(pointers, mask=mask, other=0.0).to(tl.float32)
        x = x.to(like_ptr.dtype.element_ty).to(tl.float32)
    return x


@triton.jit
def rms_norm_kernel(
    x_ptr,
    residual_ptr,
    weight_ptr,
    out_ptr,
    sum_ptr,
    num_rows,
    num_inner,
    width,
    eps,
    stride_xo,
    stride_xi,
    stride_ro,
    stride_ri,
    RESIDUAL: tl.constexpr,
    ONE_TILE: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_H: tl.constexpr,
):
    """Program n: BLOCK_R rows; row r of x is at ``r // num_inner`` outer, ``r % num_inner`` inner.

    ``out`` and ``sum`` are contiguous. ONE_TILE: a row fits BLOCK_H, otherwise it is read twice.
    """
    row = (tl.program_id(0) * BLOCK_R + tl.arange(0, BLOCK_R)).to(tl.int64)
    live = row < num_rows
    outer = row // num_inner
    inner = row % num_inner
    x_rows = x_ptr + outer * stride_xo + inner * stride_xi
    residual_rows = residual_ptr + outer * stride_ro + inner * stride_ri
    squares = tl.zeros((BLOCK_R,), tl.float32)
    x = tl.zeros((BLOCK_R, BLOCK_H), tl.float32)
    for start in range(0, BLOCK_H if ONE_TILE else width, BLOCK_H):
        column = start + tl.arange(0, BLOCK_H)
        mask = live[:, None] & (column < width)[None, :]
        x = load_sum(x_rows, residual_rows, column, mask, out_ptr, RESIDUAL)
        squares += tl.sum(x * x, 1)
    factor = 1.0 / tl.sqrt_rn(squares / width + eps)
    for start in range(0, BLOCK_H if ONE_TILE else width, BLOCK_H):
        column = start + tl.arange(0, BLOCK_H)
        mask = live[:, None] & (column < width)[None, :]
        if not ONE_TILE:
            x = load_sum(x_rows, residual_rows, column, mask, out_ptr, RESIDUAL)
        weight = tl.load(weight_ptr + column, mask=column < width, other=0.0).to(tl.float32)
        normed = x * factor[:, None] * weight[None, :]
        pointers = (row * width)[:, None] + column[None, :]
        tl.store(out_ptr + pointers, normed.to(out_ptr.dtype.element_ty), mask=mask)
        if RESIDUAL:
            tl.store(sum_ptr + pointers, x.to(sum_ptr.dtype.element_ty), mask=mask)
