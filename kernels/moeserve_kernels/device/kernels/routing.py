"""Kernel that chooses experts: scores, groups, then top-k by repeated maximum.

With k of 8 or so, k passes over a row that sits in registers cost less than sorting it. Every step
takes the lowest id of equals, so the choice does not depend on how a maximum is reduced.
"""

import triton
import triton.language as tl


@triton.jit
def score_experts(logits, SIGMOID: tl.constexpr):
    """Scores [BLOCK_T, BLOCK_E] in float32; logits past the experts are -inf, and score 0."""
    if SIGMOID:
        scores = 1.0 / (1.0 + tl.exp(-logits))
    else:
        scores = tl.exp(logits - tl.max(logits, 1)[:, None])
        scores = scores / tl.sum(scores, 1)[:, None]
    return scores


@triton.jit
def pick_best(values, free, index, last, BLOCK: tl.constexpr):
    """In each row the lowest index among the highest of those that are free, at most ``last``."""
    best = tl.max(tl.where(free, values, float("-inf")), 1)
    found = free & (values == best[:, None])
    return tl.minimum(tl.min(tl.where(found, index[None, :], BLOCK), 1), last)


@triton.jit
def keep_groups(
    selection,
    expert,
    num_experts,
    NUM_GROUPS: tl.constexpr,
    TOPK_GROUPS: tl.constexpr,
    TWO_BEST: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_E: tl.constexpr,
    BLOCK_G: tl.constexpr,
):
    """Whether each expert [BLOCK_T, BLOCK_E] is in one of the best groups."""
    group = tl.arange(0, BLOCK_G)
    group_of = expert // (num_experts // NUM_GROUPS)
    scores = tl.full((BLOCK_T, BLOCK_G), float("-inf"), tl.float32)
    for g in range(NUM_GROUPS):
        inside = tl.where((group_of == g)[None, :], selection, float("-inf"))
        score = tl.max(inside, 1)
        if TWO_BEST:
            among = (inside == score[:, None]) & (group_of == g)[None, :]
            first = tl.min(tl.where(among, expert[None, :], BLOCK_E), 1)
            rest = tl.where(expert[None, :] == first[:, None], float("-inf"), inside)
            score += tl.max(rest, 1)
        scores = tl.where((group == g)[None, :], score[:, None], scores)
    free = (group < NUM_GROUPS)[None, :] & (scores == scores)
    kept = tl.zeros((BLOCK_T, BLOCK_E), tl.int32)
    for _ in range(TOPK_GROUPS):
        chosen = pick_best(scores, free, group, NUM_GROUPS - 1, BLOCK_G)
        free = free & (group[None, :] != chosen[:, None])
        kept += (group_of[None, :] == chosen[:, None]).to(tl.int32)
    return kept > 0


@triton.jit
def route_kernel(
    logits_ptr,
    bias_ptr,
    weights_ptr,
    ids_ptr,
    num_tokens,
    num_experts,
    stride_t,
    stride_e,
    scaling_factor,
    TOP_K: tl.constexpr,
    NUM_GROUPS: tl.constexpr,
    TOPK_GROUPS: tl.constexpr,
    SIGMOID: tl.constexpr,
    RENORMALIZE: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    TWO_BEST: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_E: tl.constexpr,
    BLOCK_G: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """Program n: BLOCK_T tokens, all experts -> weights and ids [tokens, TOP_K], contiguous."""
    token = tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)
    expert = tl.arange(0, BLOCK_E)
    offsets = token.to(tl.int64)[:, None] * stride_t + expert[None, :] * stride_e
    mask = (token < num_tokens)[:, None] & (expert < num_experts)[None, :]
    logits = tl.load(logits_ptr + offsets, mask=mask, other=float("-inf")).to(tl.float32)
    scores = score_experts(logits, SIGMOID)
    selection = scores
    if HAS_BIAS:
        bias = tl.load(bias_ptr + expert, mask=expert < num_experts, other=0.0)
        selection = scores + bias.to(tl.float32)[None, :]
    selection = tl.where(selection == selection, selection, float("-inf"))  # NaN goes last
    free = (expert < num_experts)[None, :] & (token >= 0)[:, None]
    if TOPK_GROUPS < NUM_GROUPS:
        free = free & keep_groups(
            selection, expert, num_experts, NUM_GROUPS, TOPK_GROUPS, TWO_BEST,
            BLOCK_T, BLOCK_E, BLOCK_G,
        )  # fmt: skip
    choice = tl.arange(0, BLOCK_K)
    weights = tl.zeros((BLOCK_T, BLOCK_K), tl.float32)
    ids = tl.zeros((BLOCK_T, BLOCK_K), tl.int32)
    for j in range(TOP_K):
        chosen = pick_best(selection, free, expert, num_experts - 1, BLOCK_E)
        taken = expert[None, :] == chosen[:, None]
        free = free & (expert[None, :] != chosen[:, None])
        weight = tl.sum(tl.where(taken, scores, 0.0), 1)
        weights = tl.where((choice == j)[None, :], weight[:, None], weights)
        ids = tl.where((choice == j)[None, :], chosen[:, None], ids)
    if RENORMALIZE:
        weights = weights / (tl.sum(weights, 1) + 1e-20)[:, None]
    where = token.to(tl.int64)[:, None] * TOP_K + choice[None, :]
    mask = (token < num_tokens)[:, None] & (choice < TOP_K)[None, :]
    tl.store(weights_ptr + where, weights * scaling_factor, mask=mask)
    tl.store(ids_ptr + where, ids, mask=mask)
