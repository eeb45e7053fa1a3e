"""The gating router: which experts a token goes to, and with which weights."""

from __future__ import annotations

from typing import Protocol

import torch

from moeserve_kernels import Ops


class Router(Protocol):
    """Chooses experts for a layer's tokens: the model's gate, or a benchmark's made-up load."""

    def __call__(self, hidden_states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """[T, H] -> topk_weights float32 [T, k], topk_ids int64 [T, k] of logical experts."""
        ...


class SoftmaxRouter:
    """Softmax over all experts, then the best k."""

    def __init__(self, weight: torch.Tensor, top_k: int, renormalize: bool, ops: Ops) -> None:
        """weight: [E, H]; renormalize: whether the k weights are scaled to sum to 1."""
        self._weight = weight
        self._top_k = top_k
        self._renormalize = renormalize
        self._ops = ops

    def __call__(self, hidden_states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """[T, H] -> topk_weights float32 [T, k], topk_ids int64 [T, k] of logical experts."""
        logits = self._ops.linear(hidden_states, self._weight)
        return self._ops.route(logits, self._top_k, self._renormalize)
