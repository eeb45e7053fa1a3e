"""Routing on the CPU: stable sorts, so that equals keep their order."""

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
    """See ``operations.routing.route``."""
    logits = router_logits.float()
    scores = torch.softmax(logits, 1) if scoring == "softmax" else torch.sigmoid(logits)
    selection = scores if correction_bias is None else scores + correction_bias.float()
    selection = selection.masked_fill(selection.isnan(), -torch.inf)
    best_of_group = 1 if correction_bias is None else 2
    experts = _in_groups(selection, num_expert_groups, topk_groups, best_of_group)
    if experts is None:
        ids = _first(selection, top_k)
    else:
        ids = experts.gather(1, _first(selection.gather(1, experts), top_k))
    weights = scores.gather(1, ids)
    if renormalize:
        weights = weights / (weights.sum(1, keepdim=True) + 1e-20)
    return weights * scaling_factor, ids.to(torch.int32)


def _in_groups(
    selection: torch.Tensor, num_groups: int, topk_groups: int, best_of_group: int
) -> torch.Tensor | None:
    """Ids of the experts in the groups that stay, rising, [T, candidates]; None: all of them."""
    if topk_groups == num_groups:
        return None
    size = selection.shape[1] // num_groups
    groups = selection.reshape(-1, num_groups, size)
    group_scores = groups.topk(min(best_of_group, size), dim=2).values.sum(2)
    kept = _first(group_scores, topk_groups).sort(1).values
    return (kept[..., None] * size + torch.arange(size)).flatten(1)


def _first(values: torch.Tensor, count: int) -> torch.Tensor:
    """Positions of the ``count`` highest of each row, of equals the lower first."""
    return torch.sort(values, dim=1, descending=True, stable=True).indices[:, :count]
