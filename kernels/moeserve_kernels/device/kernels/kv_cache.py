"""Writing keys and values into the paged cache, and rotating keys and queries on the way."""

import triton
import triton.language as tl


@triton.jit
def as_stored(x, scale, like_ptr, FP8: tl.constexpr):
    """``x`` in the dtype of the cache; fp8 is divided by the scale and held to its range."""
    if FP8:
        x = tl.div_rn(x, tl.full(x.shape, 1.0, tl.float32) * scale)
        # Comparisons, as a minimum would make a number of a NaN.
        x = tl.where(x > 448.0, 448.0, tl.where(x < -448.0, -448.0, x))
    return x.to(like_ptr.dtype.scalar.element_ty)


@triton.jit
def copy_rows(
    source_rows,
    target_rows,
    live,
    scale,
    FIRST: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    FP8: tl.constexpr,
):
    """Columns FIRST..WIDTH of the rows, as they are stored."""
    column = FIRST + tl.arange(0, BLOCK)
    mask = live[:, None] & (column < WIDTH)[None, :]
    x = tl.load(source_rows[:, None] + column[None, :], mask=mask, other=0.0).to(tl.float32)
    stored = as_stored(x, scale, target_rows, FP8)
    tl.store(target_rows[:, None] + column[None, :], stored, mask=mask)


@triton.jit
def rotate_rows(
    source_rows,
    target_rows,
    live,
    scale,
    cos_rows,
    sin_rows,
    HALF: tl.constexpr,
    BLOCK: tl.constexpr,
    FP8: tl.constexpr,
):
    """The first 2 * HALF columns: those of the first half as pairs with those of the second."""
    column = tl.arange(0, BLOCK)
    mask = live[:, None] & (column < HALF)[None, :]
    first = tl.load(source_rows[:, None] + column[None, :], mask=mask, other=0.0).to(tl.float32)
    second = tl.load(source_rows[:, None] + (column + HALF)[None, :], mask=mask, other=0.0)
    second = second.to(tl.float32)
    cos = tl.load(cos_rows[:, None] + column[None, :], mask=mask, other=0.0).to(tl.float32)
    sin = tl.load(sin_rows[:, None] + column[None, :], mask=mask, other=0.0).to(tl.float32)
    rotated = as_stored(first * cos - second * sin, scale, target_rows, FP8)
    tl.store(target_rows[:, None] + column[None, :], rotated, mask=mask)
    rotated = as_stored(second * cos + first * sin, scale, target_rows, FP8)
    tl.store(target_rows[:, None] + (column + HALF)[None, :], rotated, mask=mask)


@triton.jit
def kv_write_kernel(
    key_ptr, value_ptr, query_ptr, key_cache_ptr, value_cache_ptr, rotated_ptr, slot_mapping_ptr,
    cos_ptr, sin_ptr,
    num_tokens, k_scale, v_scale,
    stride_kt, stride_kh, stride_vt, stride_vh, stride_qt, stride_qh, stride_kcb, stride_kcs,
    stride_kch, stride_vcb, stride_vcs, stride_vch, stride_rt, stride_rh, stride_ct, stride_st,
    KV_HEADS: tl.constexpr, KEY_DIM: tl.constexpr, VALUE_DIM: tl.constexpr, HALF: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, FP8: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_R: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_V: tl.constexpr,
):  # fmt: skip
    """Program (block of tokens, head): first the kv heads, then the heads of the query, if any.

    HALF: pairs that are rotated, 0: none. VALUE_DIM 0: there are no values. BLOCK_D covers the
    columns of a key that are not rotated.
    """
    token = tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)
    head = tl.program_id(1)
    exists = token < num_tokens
    row = token.to(tl.int64)
    cos_rows = cos_ptr + row * stride_ct
    sin_rows = sin_ptr + row * stride_st
    if head < KV_HEADS:
        slot = tl.load(slot_mapping_ptr + token, mask=exists, other=-1)
        live = exists & (slot >= 0)
        block = slot // BLOCK_SIZE
        inside = slot % BLOCK_SIZE
        keys = key_ptr + row * stride_kt + head * stride_kh
        stored = key_cache_ptr + block * stride_kcb + inside * stride_kcs + head * stride_kch
        if HALF > 0:
            rotate_rows(keys, stored, live, k_scale, cos_rows, sin_rows, HALF, BLOCK_R, FP8)
        if 2 * HALF < KEY_DIM:
            copy_rows(keys, stored, live, k_scale, 2 * HALF, KEY_DIM, BLOCK_D, FP8)
        if VALUE_DIM > 0:
            values = value_ptr + row * stride_vt + head * stride_vh
            stored = value_cache_ptr + block * stride_vcb + inside * stride_vcs + head * stride_vch
            copy_rows(values, stored, live, v_scale, 0, VALUE_DIM, BLOCK_V, FP8)
    else:
        queries = query_ptr + row * stride_qt + (head - KV_HEADS) * stride_qh
        rotated = rotated_ptr + row * stride_rt + (head - KV_HEADS) * stride_rh
        if HALF > 0:
            rotate_rows(queries, rotated, exists, 1.0, cos_rows, sin_rows, HALF, BLOCK_R, False)
        if 2 * HALF < KEY_DIM:
            copy_rows(queries, rotated, exists, 1.0, 2 * HALF, KEY_DIM, BLOCK_D, False)
