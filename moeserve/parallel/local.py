"""One rank: every expert is at home, nothing travels."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from moeserve.parallel.dispatcher import Dispatched, StepSizes
from moeserve_kernels.ops import Ops


@dataclass(frozen=True, kw_only=True, slots=True)
class LocalHandle:
    """What ``combine`` needs: the routing weights, float32 [T, k]."""

    topk_weights: torch.Tensor


class LocalDispatcher:
    """The transport of a world of one; also what the others are compared with, bit for bit."""

    name = "local"

    def __init__(self, ops: Ops) -> None:
        self._ops = ops

    def dispatch(
        self,
        hidden_states: torch.Tensor,
        physical_ids: torch.Tensor,
        topk_weights: torch.Tensor,
        sizes: StepSizes,
    ) -> Dispatched:
        """The tokens themselves; the only rank's slots start at 0, so ids are slots."""
        return Dispatched(
            hidden_states=hidden_states,
            slots=physical_ids,
            topk_weights=topk_weights,
            handle=LocalHandle(topk_weights=topk_weights),
        )

    def combine(self, expert_rows: torch.Tensor, handle: object) -> torch.Tensor:
        """[T, H]: sums as they are, pairs added up in the order of ``topk_ids``."""
        assert isinstance(handle, LocalHandle)
        if expert_rows.dim() == 2:
            return expert_rows
        return self._ops.weighted_sum(expert_rows, handle.topk_weights)
