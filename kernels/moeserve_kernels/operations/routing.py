"""Routing: which experts a token takes, and with what weight."""

from __future__ import annotations

import torch

from moeserve_kernels import backend, check

SCORINGS = ("softmax", "sigmoid")
MAX_EXPERTS = 1024  # the width of a tile of scores


def route(
    router_logits: torch.Tensor,
    top_k: int,
    *,
    scoring: str = "softmax",
    renormalize: bool = True,
    correction_bias: torch.Tensor | None = None,
    num_expert_groups: int = 1,
    topk_groups: int = 1,
    scaling_factor: float = 1.0,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return ``(topk_weights float32 [T, k], topk_ids int32 [T, k])``, best first.

    router_logits: [T, E], any float dtype, rows with any stride; E up to 1024.
    scoring: scores are the "softmax" over the experts or the "sigmoid" of each, in float32.
    correction_bias: [E]; experts are chosen by score + bias, weighted by the score alone.
    num_expert_groups, topk_groups: experts are chosen from the best ``topk_groups`` of so many
        groups of E / num_expert_groups neighbours; a group counts as much as its best expert, with
        a ``correction_bias`` as much as its two best together.
    renormalize: weights are divided by their sum (+ 1e-20); then multiplied by ``scaling_factor``.

    Of equals (experts and groups) the lower id goes first. A NaN is chosen last; a row whose
    softmax is NaN gets valid ids and NaN weights.

    Raises ValueError for a wrong shape or dtype, or fewer than ``top_k`` experts to choose from.

    Sources: DeepSeek-V2 (arXiv 2405.04434, 2.1.2), DeepSeek-V3 (arXiv 2412.19437, 2.1.2).
    """
    check.shape("router_logits", router_logits, ("T", "E"))
    check.dtype(
        "router_logits", router_logits, torch.float32, torch.float16, torch.bfloat16, torch.float64
    )
    check.one_of("scoring", scoring, SCORINGS)
    num_experts = router_logits.shape[1]
    if num_experts > MAX_EXPERTS:
        raise ValueError(f"router_logits: {num_experts} experts, must be at most {MAX_EXPERTS}")
    if correction_bias is not None:
        check.shape("correction_bias", correction_bias, (num_experts,))
        check.same_device(router_logits=router_logits, correction_bias=correction_bias)
    _check_choice(num_experts, top_k, num_expert_groups, topk_groups)
    family = backend.implementation("routing", router_logits)
    result: tuple[torch.Tensor, torch.Tensor] = family.route(
        router_logits,
        top_k,
        scoring=scoring,
        renormalize=renormalize,
        correction_bias=correction_bias,
        num_expert_groups=num_expert_groups,
        topk_groups=topk_groups,
        scaling_factor=scaling_factor,
    )
    return result


def _check_choice(num_experts: int, top_k: int, num_groups: int, topk_groups: int) -> None:
    """Raises ValueError unless ``top_k`` experts can be chosen from the groups that stay."""
    check.at_least("top_k", top_k, 1)
    check.at_least("num_expert_groups", num_groups, 1)
    check.at_least("topk_groups", topk_groups, 1)
    if num_experts % num_groups != 0:
        raise ValueError(f"num_expert_groups = {num_groups}: must divide {num_experts} experts")
    if topk_groups > num_groups:
        raise ValueError(f"topk_groups = {topk_groups}: must be at most {num_groups} groups")
    candidates = num_experts // num_groups * topk_groups
    if top_k > candidates:
        raise ValueError(f"top_k = {top_k}: must be at most the {candidates} experts to choose of")
