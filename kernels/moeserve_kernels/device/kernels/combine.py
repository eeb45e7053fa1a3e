"""Sum of a token's pairs in the order of its choices."""

import triton
import triton.language as tl


@triton.jit
def slot_of_choice(topk_ids_ptr, expert_map_ptr, token, choice, stride_it, stride_ij):
    """The slot of a pair; negative: it is not here, and what ``pairs`` holds for it is not read."""
    slot = tl.load(topk_ids_ptr + token * stride_it + choice * stride_ij).to(tl.int32)
    if expert_map_ptr is not None:
        slot = tl.load(expert_map_ptr + slot, mask=slot >= 0, other=-1)
    return slot


@triton.jit
def combine_kernel(
    pairs_ptr, topk_weights_ptr, topk_ids_ptr, expert_map_ptr, shared_ptr, residual_ptr, out_ptr,
    top_k, H,
    stride_pt, stride_pj, stride_wt, stride_wj, stride_it, stride_ij,
    stride_st, stride_rt, stride_ot,
    BLOCK_H: tl.constexpr,
):  # fmt: skip
    """One program adds up BLOCK_H values of one token: grid (T, ceil(H / BLOCK_H))."""
    token = tl.program_id(0).to(tl.int64)
    h = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)
    inside = h < H
    total = tl.zeros((BLOCK_H,), tl.float32)
    for choice in range(0, top_k):
        here = inside
        if topk_ids_ptr is not None:
            slot = slot_of_choice(topk_ids_ptr, expert_map_ptr, token, choice, stride_it, stride_ij)
            here = h < tl.where(slot >= 0, H, 0)
        pair_ptrs = pairs_ptr + token * stride_pt + choice * stride_pj + h
        pair = tl.load(pair_ptrs, mask=here, other=0.0).to(tl.float32)
        if topk_weights_ptr is not None:
            weight = tl.load(topk_weights_ptr + token * stride_wt + choice * stride_wj)
            pair = tl.where(here, pair * weight.to(tl.float32), 0.0)
        total += pair
    if shared_ptr is not None:
        total += tl.load(shared_ptr + token * stride_st + h, mask=inside, other=0.0).to(tl.float32)
    if residual_ptr is not None:
        residual = tl.load(residual_ptr + token * stride_rt + h, mask=inside, other=0.0)
        total += residual.to(tl.float32)
    tl.store(out_ptr + token * stride_ot + h, total.to(out_ptr.dtype.element_ty), mask=inside)
