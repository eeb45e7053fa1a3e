"""How many tokens each logical expert got: exact counts, the input of every placement decision."""

from __future__ import annotations

from collections.abc import Iterable

import torch


class LoadCounter:
    """Pairs routed by this rank, per layer and logical expert, since start.

    Exact: the sum over a layer is tokens x top_k. Counts are taken from the routing of real tokens
    at home, before dispatch, so padding and idle steps can not reach them.
    """

    def __init__(self, layers: Iterable[int], num_experts: int) -> None:
        """layers: the model layer indices of the MoE layers, in the order of ``snapshot``."""
        self.layers = tuple(layers)
        self.num_experts = num_experts
        self._row = {layer: row for row, layer in enumerate(self.layers)}
        self._counts = torch.zeros(len(self.layers), num_experts, dtype=torch.int64)

    def count(self, layer: int, topk_ids: torch.Tensor) -> None:
        """Adds the routing of T tokens, int64 [T, k] logical expert ids.

        Raises:
            ValueError, RuntimeError: an id is too high, or negative; nothing is counted then.
        """
        counts = torch.bincount(topk_ids.flatten(), minlength=self.num_experts)
        if len(counts) > self.num_experts:
            raise ValueError(f"layer {layer}: expert ids must be in [0, {self.num_experts})")
        self._counts[self._row[layer]] += counts

    def snapshot(self) -> torch.Tensor:
        """A copy of the counts, int64 [num_layers, num_experts], rows as in ``layers``."""
        return self._counts.clone()
