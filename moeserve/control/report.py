"""What every rank tells rank 0 of its load: counters since start, as one row of numbers."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from moeserve.experts.load import PHASES, LoadCounter
from moeserve.experts.traffic import Traffic


def pack(load: LoadCounter, traffic: Traffic) -> torch.Tensor:
    """The rank's counters, int64 [n]: counts by phase, pairs by layer, nanoseconds computed."""
    nanoseconds = torch.tensor([int(traffic.compute_s * 1e9)], dtype=torch.int64)
    return torch.cat((load.by_phase().flatten(), traffic.pairs, nanoseconds))


def size(num_layers: int, num_experts: int) -> int:
    """Numbers in a row."""
    return len(PHASES) * num_layers * num_experts + num_layers + 1


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadReport:
    """All ranks' counters since start.

    counts: int64 [num_ranks, len(PHASES), num_layers, num_experts], by home of the token. pairs:
    int64 [num_ranks, num_layers], by where they were computed. compute_s: float64 [num_ranks].
    """

    counts: np.ndarray
    pairs: np.ndarray
    compute_s: np.ndarray

    @classmethod
    def unpack(cls, rows: np.ndarray, num_layers: int, num_experts: int) -> LoadReport:
        """The report of rows that ``pack`` made, int64 [num_ranks, n]."""
        cut = len(PHASES) * num_layers * num_experts
        return cls(
            counts=rows[:, :cut].reshape(-1, len(PHASES), num_layers, num_experts),
            pairs=rows[:, cut : cut + num_layers],
            compute_s=rows[:, cut + num_layers] / 1e9,
        )

    def since(self, earlier: LoadReport | None) -> LoadReport:
        """What was added since an earlier report.

        Raises:
            ValueError: a counter fell; the text says of which rank.
        """
        if earlier is None:
            return self
        window = LoadReport(
            counts=self.counts - earlier.counts,
            pairs=self.pairs - earlier.pairs,
            compute_s=self.compute_s - earlier.compute_s,
        )
        fell = (window.counts < 0).any((1, 2, 3)) | (window.pairs < 0).any(1)
        if fell.any():
            raise ValueError(f"load counters of rank {int(fell.argmax())} fell")
        return window

    @property
    def by_expert(self) -> np.ndarray:
        """Tokens by layer and expert over ranks and phases: int64 [num_layers, num_experts]."""
        total: np.ndarray = self.counts.sum((0, 1))
        return total

    @property
    def imbalance(self) -> float:
        """Largest over mean rank load, mean over the layers that had any; 1.0 when none had."""
        means = self.pairs.mean(0)
        busy = means > 0
        if not busy.any():
            return 1.0
        return float((self.pairs.max(0)[busy] / means[busy]).mean())
