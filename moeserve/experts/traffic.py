"""What this rank's experts have computed, how long it took, and how the tokens came to them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

import torch


class Traffic:
    """Counters since start; they only grow.

    pairs: int64 [num_layers], (token, expert) pairs computed on this rank, for tokens of any rank,
    by MoE layer; compute_s: seconds that took; dispatches: calls of MoE layers by the transport
    that they took.
    """

    def __init__(self, layers: Iterable[int]) -> None:
        """layers: the model layer indices of the MoE layers, in the order of ``pairs``."""
        self._row = {layer: row for row, layer in enumerate(layers)}
        self.pairs = torch.zeros(len(self._row), dtype=torch.int64)
        self.compute_s = 0.0
        self.dispatches: Counter[str] = Counter()

    def count(self, layer: int, dispatcher: str, slots: torch.Tensor, seconds: float) -> None:
        """Adds one call of an MoE layer; slots: int64 [R, k], -1 where a pair is not computed."""
        self.dispatches[dispatcher] += 1
        self.pairs[self._row[layer]] += (slots >= 0).sum()
        self.compute_s += seconds

    @property
    def num_pairs(self) -> int:
        """Pairs over all layers."""
        return int(self.pairs.sum())
