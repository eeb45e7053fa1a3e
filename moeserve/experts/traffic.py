"""What this rank's experts have computed, and how the tokens came to them."""

from __future__ import annotations

from collections import Counter

import torch


class Traffic:
    """Counters since start; they only grow.

    num_pairs: (token, expert) pairs computed on this rank, for tokens of any rank;
    dispatches: calls of MoE layers by the transport that they took.
    """

    def __init__(self) -> None:
        self.num_pairs = 0
        self.dispatches: Counter[str] = Counter()

    def count(self, dispatcher: str, slots: torch.Tensor) -> None:
        """Adds one call of an MoE layer; slots: int64 [R, k], -1 where a pair is not computed."""
        self.dispatches[dispatcher] += 1
        self.num_pairs += int((slots >= 0).sum())
