"""Parts of the grouped products: which tile a program takes, and one tile's sum over the inputs.

``x @ w.T`` for BLOCK_M rows of activations and BLOCK_N rows of one slot's weights. With SWAP it is
computed as ``w @ x.T``, so that few rows of activations still fill the matrix instruction, and
tiles are [BLOCK_N, BLOCK_M]. Weights and, where rows are sorted, activations come through tensor
descriptors if there are any (``*_desc`` not None), else through pointers.
"""

import triton
import triton.language as tl

GROUP = tl.constexpr(128)  # inputs that share a scale in int4, outputs too in fp8_block
HALF = tl.constexpr(64)


@triton.jit
def tile_of(tile, num_blocks, num_tiles_n, GROUP_M: tl.constexpr):
    """Block of rows and tile of columns: GROUP_M blocks share the weights they read from L2."""
    per_group = GROUP_M * num_tiles_n
    first = (tile // per_group) * GROUP_M
    size = tl.minimum(num_blocks - first, GROUP_M)
    return first + (tile % per_group) % size, (tile % per_group) // size


@triton.jit
def pairs_of(block, sorted_pairs_ptr, num_pairs, IDENTITY: tl.constexpr, BLOCK_M: tl.constexpr):
    """The pair of each row, which rows hold one, and the rows themselves, int64."""
    inside = tl.arange(0, BLOCK_M)
    if IDENTITY:
        pairs = block + 0 * inside
        return pairs, inside == 0, pairs.to(tl.int64)
    else:
        rows = block * BLOCK_M + inside
        pairs = tl.load(sorted_pairs_ptr + rows)
        return pairs, pairs < num_pairs, rows.to(tl.int64)


@triton.jit
def along_n(values, SWAP: tl.constexpr):
    """A vector of columns, to be broadcast over a tile."""
    if SWAP:
        return values[:, None]
    else:
        return values[None, :]


@triton.jit
def scale_rows_of(scales_ptr, slot, rows, stride_ss, stride_sn, FORMAT: tl.constexpr):
    """Pointers to the (first) scale of each row of weights; of no use when there are none."""
    if FORMAT == "plain":
        return rows
    elif FORMAT == "fp8_block":
        return scales_ptr + slot * stride_ss + (rows // GROUP).to(tl.int64) * stride_sn
    else:
        return scales_ptr + slot * stride_ss + rows.to(tl.int64) * stride_sn


@triton.jit
def finish(
    acc, scale_rows, bias_ptr, slot, rows, stride_bs, FORMAT: tl.constexpr, SWAP: tl.constexpr
):
    """The sum times the scale of its output channel, plus the bias."""
    if FORMAT == "int8" or FORMAT == "fp8_channel":
        acc = acc * along_n(tl.load(scale_rows), SWAP)
    if bias_ptr is not None:
        bias = tl.load(bias_ptr + slot * stride_bs + rows)
        acc = acc + along_n(bias.to(tl.float32), SWAP)
    return acc


@triton.jit
def multiply(x, w, acc, SWAP: tl.constexpr):
    """``acc + x @ w.T``, or with SWAP ``acc + w @ x.T``."""
    if SWAP:
        return tl.dot(w, x.T, acc, input_precision="ieee")
    else:
        return tl.dot(x, w.T, acc, input_precision="ieee")


@triton.jit
def load_x(x_rows, x_desc, row, live, k, K, EVEN_K: tl.constexpr, WIDTH: tl.constexpr):
    """WIDTH inputs from ``k`` on of the rows of a block; zeros where a row is padding."""
    if x_desc is not None:
        return x_desc.load([row, k])
    inside = k + tl.arange(0, WIDTH)
    mask = live[:, None]
    if not EVEN_K:
        mask = mask & (inside < K)[None, :]
    return tl.load(x_rows[:, None] + inside[None, :], mask=mask, other=0.0)


@triton.jit
def load_w(w_rows, w_desc, row, k, K, EVEN_K: tl.constexpr, WIDTH: tl.constexpr):
    """WIDTH inputs (bytes of int4) from ``k`` on of the rows of weights."""
    if w_desc is not None:
        return w_desc.load([row, k])
    inside = k + tl.arange(0, WIDTH)
    if EVEN_K:
        return tl.load(w_rows[:, None] + inside[None, :])
    else:
        return tl.load(w_rows[:, None] + inside[None, :], mask=(inside < K)[None, :], other=0.0)


@triton.jit
def add_product(acc, x, x_high, w, scale_ptrs, FORMAT: tl.constexpr, SWAP: tl.constexpr):
    """``acc`` plus one step's product. Group scales multiply the step's sum, not each weight."""
    if FORMAT == "int4":
        # Low halves of the bytes are the group's first inputs, high halves the others: two
        # products need no shuffle of the weights.
        low = ((w & 15).to(tl.int8) - 8).to(x.dtype)
        high = ((w >> 4).to(tl.int8) - 8).to(x.dtype)
        part = multiply(x, low, tl.zeros_like(acc), SWAP)
        part = multiply(x_high, high, part, SWAP)
        return acc + part * along_n(tl.load(scale_ptrs), SWAP)
    elif FORMAT == "fp8_block":
        part = multiply(x, w.to(x.dtype), tl.zeros_like(acc), SWAP)
        return acc + part * along_n(tl.load(scale_ptrs), SWAP)
    else:
        return multiply(x, w.to(x.dtype), acc, SWAP)


@triton.jit
def accumulate(
    x_rows, x_desc, x_row, live, w_rows, w_desc, w_row, scale_rows,
    up_rows, up_row, up_scale_rows, K, stride_sk,
    FORMAT: tl.constexpr, GATED: tl.constexpr, SWAP: tl.constexpr, EVEN_K: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """The tile in float32, and with GATED that of the ``up`` rows (otherwise zeros)."""
    if SWAP:
        acc = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
    else:
        acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    up = acc
    INT4: tl.constexpr = FORMAT == "int4"
    WIDTH: tl.constexpr = BLOCK_K // 2 if INT4 else BLOCK_K
    for k in range(0, K, BLOCK_K):
        k_w = k
        k_x = k
        if INT4:  # WIDTH bytes: as many inputs of the group's first half, and of its second
            k_w = tl.multiple_of(k // 2, WIDTH)
            k_x = tl.multiple_of(k_w + (k // GROUP) * HALF, WIDTH)
        x = load_x(x_rows, x_desc, x_row, live, k_x, K, EVEN_K, WIDTH)
        x_high = x
        if INT4:
            x_high = load_x(x_rows, x_desc, x_row, live, k_x + HALF, K, EVEN_K, WIDTH)
        scale = (k // GROUP) * stride_sk
        w = load_w(w_rows, w_desc, w_row, k_w, K, EVEN_K, WIDTH)
        acc = add_product(acc, x, x_high, w, scale_rows + scale, FORMAT, SWAP)
        if GATED:
            w = load_w(up_rows, w_desc, up_row, k_w, K, EVEN_K, WIDTH)
            up = add_product(up, x, x_high, w, up_scale_rows + scale, FORMAT, SWAP)
    return acc, up
