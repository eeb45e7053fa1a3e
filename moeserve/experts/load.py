"""How many tokens each logical expert got: exact counts, the input of every placement decision."""

from __future__ import annotations

from collections.abc import Iterable

import torch

PHASES = ("prompt", "decode")


class LoadCounter:
    """Pairs routed by this rank, per phase, layer and logical expert, since start.

    Exact: the sum over a layer is tokens x top_k. Counts are taken from the routing of real tokens
    at home, before dispatch, so padding and idle steps can not reach them.
    """

    def __init__(self, layers: Iterable[int], num_experts: int) -> None:
        """layers: the model layer indices of the MoE layers, in the order of ``snapshot``."""
        self.layers = tuple(layers)
        self.num_experts = num_experts
        self._row = {layer: row for row, layer in enumerate(self.layers)}
        self._counts = torch.zeros(len(PHASES), len(self.layers), num_experts, dtype=torch.int64)
        self._is_decode: torch.Tensor | None = None

    def begin_step(self, is_decode: torch.Tensor) -> None:
        """The tokens of the step to come, bool [T]: whether each was generated, not prompted."""
        self._is_decode = is_decode.to(torch.int64).unsqueeze(1)

    def count(self, layer: int, topk_ids: torch.Tensor) -> None:
        """Adds the routing of T tokens, int64 [T, k] logical expert ids.

        Raises:
            ValueError: an id is too high, or negative; nothing is counted then.
        """
        experts = self.num_experts
        if topk_ids.numel():
            least, most = topk_ids.aminmax()
            if int(least) < 0 or int(most) >= experts:
                raise ValueError(f"layer {layer}: expert ids must be in [0, {experts})")
        if self._is_decode is None:  # a model that is run by hand: all of it is prompt
            counts = torch.bincount(topk_ids.flatten(), minlength=experts)
            self._counts[0, self._row[layer]] += counts
            return
        keys = (topk_ids + experts * self._is_decode).flatten()
        by_phase = torch.bincount(keys, minlength=len(PHASES) * experts).view(len(PHASES), experts)
        self._counts[:, self._row[layer]] += by_phase

    def snapshot(self) -> torch.Tensor:
        """A copy of the counts, int64 [num_layers, num_experts], rows as in ``layers``."""
        return self._counts.sum(0)

    def by_phase(self) -> torch.Tensor:
        """A copy of the counts, int64 [len(PHASES), num_layers, num_experts]."""
        return self._counts.clone()
