"""Kernel that quantises rows, or groups of a row, each with its own scale.

Rounding is spelled out in whole numbers where a chip or the interpreter has no exact conversion;
both ways give the same bits.
"""

import triton
import triton.language as tl


@triton.jit
def round_to_int8(x):
    """Nearest whole number, ties to even, of |x| <= 127."""
    # Adding 1.5 * 2^23 leaves no bits for a fraction: the sum is rounded by the adder itself.
    return ((x + 12582912.0).to(tl.int32, bitcast=True) - 0x4B400000).to(tl.int8)


@triton.jit
def round_to_e4m3_bits(x):
    """The bits of the nearest float8_e4m3fn, ties to even, of |x| <= 448, as uint8."""
    bits = x.to(tl.int32, bitcast=True)
    size = bits & 0x7FFFFFFF
    # Normal values: round off 20 of 23 mantissa bits, then move the bias from 127 to 7.
    normal = ((size + 0x7FFFF + ((size >> 20) & 1)) >> 20) - ((127 - 7) << 3)
    # Under 2^-6 steps are 2^-9, the distance of floats at 2^14: again the adder rounds.
    tiny = (size.to(tl.float32, bitcast=True) + 16384.0).to(tl.int32, bitcast=True) - 0x46800000
    code = tl.where(size < 0x3C800000, tiny, normal)  # 2^-6
    return (code | ((bits >> 24) & 0x80)).to(tl.uint8)


@triton.jit
def scale_of(largest, is_broken, LARGEST: tl.constexpr):
    """Scale of a group from its largest magnitude; NaN when it holds a NaN or an infinity."""
    scale = tl.maximum(tl.div_rn(largest, tl.full(largest.shape, LARGEST, tl.float32)), 2.0**-126)
    return tl.where(is_broken, float("nan"), scale)


@triton.jit
def round_values(x, scale, LARGEST: tl.constexpr, ROUND: tl.constexpr, like_ptr):
    """``x * (1 / scale)`` [BLOCK_U, BLOCK_K] as stored: ROUND is "int8", "fp8" or "fp8_bits"."""
    # One division a group: a division a value would take longer than reading it does.
    inverse = tl.div_rn(tl.full(scale.shape, 1.0, tl.float32), scale)
    x = tl.where((scale == scale)[:, None], x * inverse[:, None], 0.0)
    x = tl.minimum(tl.maximum(x, -LARGEST), LARGEST)
    if ROUND == "int8":
        q = round_to_int8(x)
    elif ROUND == "fp8":
        q = x.to(like_ptr.dtype.element_ty)
    else:
        q = round_to_e4m3_bits(x)
    return q


@triton.jit
def group_mask(k, live, left, group_size, IS_RAGGED: tl.constexpr):
    """Which values [BLOCK_U, BLOCK_K] belong to their groups; ``left`` to the end of the row."""
    mask = (k < group_size)[None, :] & live[:, None]
    if IS_RAGGED:  # alone, as this comparison keeps loads from being vectors
        mask = mask & (k[None, :] < left[:, None])
    return mask


@triton.jit
def quant_rows_kernel(
    x_ptr,
    source_rows_ptr,
    q_ptr,
    scales_ptr,
    num_units,
    num_groups,
    group_size,
    width,
    stride_x,
    stride_q,
    HAS_SOURCE_ROWS: tl.constexpr,
    LARGEST: tl.constexpr,
    ROUND: tl.constexpr,
    ONE_TILE: tl.constexpr,
    IS_RAGGED: tl.constexpr,
    BLOCK_U: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """Program n: BLOCK_U units; unit u is group ``u % num_groups`` of row ``u // num_groups``.

    Row r is read from row ``source_rows[r]`` of x; when that is negative it is left unwritten.
    ONE_TILE: a group fits BLOCK_K and stays in registers; otherwise it is read twice.
    IS_RAGGED: the last group of a row is shorter than the others.
    """
    unit = tl.program_id(0) * BLOCK_U + tl.arange(0, BLOCK_U)
    row = unit // num_groups
    first = (unit - row * num_groups) * group_size
    live = unit < num_units
    source = row
    if HAS_SOURCE_ROWS:
        source = tl.load(source_rows_ptr + row, mask=live, other=-1)
        live = live & (source >= 0)
    x_row = x_ptr + (source.to(tl.int64) * stride_x + first)
    q_row = q_ptr + (row.to(tl.int64) * stride_q + first)
    left = width - first
    largest = tl.zeros((BLOCK_U,), tl.float32)
    is_broken = tl.zeros((BLOCK_U,), tl.int32)
    x = tl.zeros((BLOCK_U, BLOCK_K), tl.float32)
    for start in range(0, BLOCK_K if ONE_TILE else group_size, BLOCK_K):
        k = start + tl.arange(0, BLOCK_K)
        mask = group_mask(k, live, left, group_size, IS_RAGGED)
        x = tl.load(x_row[:, None] + k[None, :], mask=mask, other=0.0).to(tl.float32)
        is_finite = tl.abs(x) < float("inf")
        largest = tl.maximum(largest, tl.max(tl.where(is_finite, tl.abs(x), 0.0), 1))
        is_broken = tl.maximum(is_broken, tl.max(tl.where(is_finite, 0, 1), 1))
    scale = scale_of(largest, is_broken > 0, LARGEST)
    tl.store(scales_ptr + unit, scale, mask=live)
    for start in range(0, BLOCK_K if ONE_TILE else group_size, BLOCK_K):
        k = start + tl.arange(0, BLOCK_K)
        mask = group_mask(k, live, left, group_size, IS_RAGGED)
        if not ONE_TILE:
            x = tl.load(x_row[:, None] + k[None, :], mask=mask, other=0.0).to(tl.float32)
        q = round_values(x, scale, LARGEST, ROUND, q_ptr)
        tl.store(q_row[:, None] + k[None, :], q, mask=mask)
