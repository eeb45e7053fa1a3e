"""Routing, token by token."""

from __future__ import annotations

import torch


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
    """See ``operations.routing.route``; weights are float64 when the logits are."""
    logits = router_logits.to(torch.promote_types(router_logits.dtype, torch.float32))
    scores = logits.softmax(1) if scoring == "softmax" else logits.sigmoid()
    chosen = torch.empty(scores.shape[0], top_k, dtype=torch.long, device=scores.device)
    for token, row in enumerate(scores):
        by = row if correction_bias is None else row + correction_bias.to(row.dtype)
        by = torch.where(by.isnan(), -torch.inf, by)
        groups = by.view(num_expert_groups, -1)
        counted = 1 if correction_bias is None else min(2, groups.shape[1])
        group_scores = groups.sort(1, descending=True).values[:, :counted].sum(1)
        kept = _best(group_scores.tolist(), range(num_expert_groups), topk_groups)
        size = groups.shape[1]
        candidates = [expert for expert in range(by.shape[0]) if expert // size in kept]
        chosen[token] = torch.tensor(_best(by.tolist(), candidates, top_k))
    weights = scores.gather(1, chosen)
    if renormalize:
        weights = weights / (weights.sum(1, keepdim=True) + 1e-20)
    return weights * scaling_factor, chosen.to(torch.int32)


def _best(values: list[float], candidates: list[int] | range, count: int) -> list[int]:
    """The ``count`` candidates with the highest values, of equals the lower first."""
    return sorted(candidates, key=lambda one: (-values[one], one))[:count]
