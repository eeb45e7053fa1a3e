"""Parts of the attention kernels: where keys lie, scores, and one step of the softmax.

Scores are kept as powers of two, so that exp2, which chips have, serves without a multiplication.
"""

import triton
import triton.language as tl

LOG2_E = tl.constexpr(1.4426950408889634)
LN_2 = tl.constexpr(0.6931471805599453)


@triton.jit
def cache_offsets(block_row_ptr, positions, inside, BLOCK_SIZE: tl.constexpr, MASKED: tl.constexpr):
    """The cache block, int64, and the slot in it of each position; blocks outside are not read."""
    if MASKED:
        blocks = tl.load(block_row_ptr + positions // BLOCK_SIZE, mask=inside, other=0)
    else:
        blocks = tl.load(block_row_ptr + positions // BLOCK_SIZE)
    return blocks.to(tl.int64), positions % BLOCK_SIZE


@triton.jit
def load_rows(rows, live, WIDTH: tl.constexpr, BLOCK_D: tl.constexpr, MASKED: tl.constexpr):
    """[rows, BLOCK_D] from pointers to rows; zeros past WIDTH and, if MASKED, where not live."""
    column = tl.arange(0, BLOCK_D)
    pointers = rows[:, None] + column[None, :]
    if MASKED and WIDTH < BLOCK_D:
        return tl.load(pointers, mask=live[:, None] & (column < WIDTH)[None, :], other=0.0)
    elif MASKED:
        return tl.load(pointers, mask=live[:, None], other=0.0)
    elif WIDTH < BLOCK_D:
        return tl.load(pointers, mask=(column < WIDTH)[None, :], other=0.0)
    else:
        return tl.load(pointers)


@triton.jit
def scaled(scores, scale, soft_cap):
    """``scores * scale``, capped if there is a cap, as powers of two."""
    if soft_cap is None:
        return scores * (scale * LOG2_E)
    else:
        x = scores * (scale / soft_cap)
        shrunk = tl.exp2(tl.abs(x) * (-2 * LOG2_E))
        tanh = (1 - shrunk) / (1 + shrunk)
        return tl.where(x < 0, -tanh, tanh) * (soft_cap * LOG2_E)


@triton.jit
def softmax_step(scores, values, highest, total, acc):
    """One tile's share: new highest score, sum of weights and weighted sum of values, by row."""
    new = tl.maximum(highest, tl.max(scores, 1))
    # A row that has seen nothing yet has no highest score; its weights must be 0, not NaN.
    shift = tl.where(new == float("-inf"), 0.0, new)
    weights = tl.exp2(scores - shift[:, None])
    shrink = tl.exp2(highest - shift)
    total = total * shrink + tl.sum(weights, 1)
    acc = tl.dot(weights.to(values.dtype), values, acc * shrink[:, None], input_precision="ieee")
    return new, total, acc


@triton.jit
def start_rows(
    sinks_ptr, heads, live, BLOCK_M: tl.constexpr, BLOCK_V: tl.constexpr, SINKS: tl.constexpr
):
    """The softmax before any key: nothing, or the sink of each head, which has no value."""
    acc = tl.zeros((BLOCK_M, BLOCK_V), tl.float32)
    if SINKS:
        highest = tl.load(sinks_ptr + heads, mask=live, other=0.0).to(tl.float32) * LOG2_E
        total = tl.full((BLOCK_M,), 1.0, tl.float32)
    else:
        highest = tl.full((BLOCK_M,), float("-inf"), tl.float32)
        total = tl.zeros((BLOCK_M,), tl.float32)
    return highest, total, acc


@triton.jit
def span_of_split(length, split, num_splits, window, BLOCK_N: tl.constexpr):
    """Positions ``begin..end`` of one split of what the last token sees; empty for short ones."""
    first = 0
    if window is not None:
        first = tl.maximum(length - window, 0)
    size = tl.cdiv(tl.cdiv(length - first, num_splits), BLOCK_N) * BLOCK_N
    begin = tl.minimum(first + split * size, length)
    return begin, tl.minimum(begin + size, length)


@triton.jit
def store_split(
    acc,
    highest,
    total,
    v_scale,
    live,
    out_rows,
    lse_pointers,
    VALUE_DIM: tl.constexpr,
    BLOCK_V: tl.constexpr,
    FINAL: tl.constexpr,
):
    """Writes the mean of the values and, unless FINAL, the log of the sum of weights."""
    # Compared with 0, so that a NaN stays one.
    divisor = tl.where(total == 0, 1.0, total)
    column = tl.arange(0, BLOCK_V)
    out = acc / divisor[:, None] * v_scale
    mask = live[:, None] & (column < VALUE_DIM)[None, :]
    tl.store(
        out_rows[:, None] + column[None, :], out.to(out_rows.dtype.scalar.element_ty), mask=mask
    )
    if not FINAL:
        lse = tl.where(total == 0, float("-inf"), highest + tl.log2(divisor))
        tl.store(lse_pointers, lse * LN_2, mask=live)
