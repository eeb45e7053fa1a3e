"""The figures of merit, each by its published definition.

- imbalance: fullest over mean rank level, per batch and layer; 1 is perfect.
- balancedness as SGLang logs it: mean over layers of (mean + 1e-5) / (max + 1e-5) rank load, then
  the mean over batches.
- balancedness as vLLM logs it: sum over layers of the mean over sum over layers of the maximum,
  then the mean over batches. The two differ where layers carry unequal loads or skew.
- time lost: how much longer the batches take than with perfect balance, if time is tokens:
  sum of (max - mean) over sum of mean.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from moeserve_placement.replay.score import Levels

_SGLANG_EPSILON = 1e-5


@dataclass(frozen=True, slots=True, kw_only=True)
class Balance:
    """Statistics of imbalance over batches and layers.

    mean, p50, p99, max: over all (batch, layer) pairs. worst_layer: model layer index of the layer
    with the largest mean, worst_layer_mean. time_lost: fraction of the time of perfect balance.
    """

    num_batches: int
    mean: float
    p50: float
    p99: float
    max: float
    worst_layer: int
    worst_layer_mean: float
    balancedness_sglang: float
    balancedness_vllm: float
    time_lost: float


def balance(levels: Levels, layer_ids: Sequence[int]) -> Balance:
    """The statistics of some batches, one or more."""
    values = levels.imbalance
    by_layer = values.mean(0)
    worst = int(by_layer.argmax())
    total = float(levels.mean.sum())
    lost = float((levels.peak - levels.mean).sum()) / total if total > 0 else 0.0
    return Balance(
        num_batches=len(values),
        mean=float(values.mean()),
        p50=float(np.quantile(values, 0.5)),
        p99=float(np.quantile(values, 0.99)),
        max=float(values.max()),
        worst_layer=int(layer_ids[worst]),
        worst_layer_mean=float(by_layer[worst]),
        balancedness_sglang=balancedness_sglang(levels),
        balancedness_vllm=balancedness_vllm(levels),
        time_lost=lost,
    )


def balancedness_sglang(levels: Levels) -> float:
    """Mean over batches and layers of mean over max; 1 is perfect."""
    ratio = (levels.mean + _SGLANG_EPSILON) / (levels.peak + _SGLANG_EPSILON)
    return float(ratio.mean())


def balancedness_vllm(levels: Levels) -> float:
    """Mean over batches of (sum over layers of mean) / (sum over layers of max); 1 is perfect."""
    peak, mean = levels.peak.sum(1), levels.mean.sum(1)
    return float(np.where(peak > 0, mean / np.where(peak > 0, peak, 1.0), 1.0).mean())
