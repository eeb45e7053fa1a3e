"""What a trace looks like: skew, drift and co-activation, layer by layer.

Two of the measures are positive even where there is nothing to see, because a window is a finite
sample. Beside each stands its noise: the value to expect from that many tokens if experts were
chosen independently (co-activation) or the popularity never changed (drift).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from moeserve_placement.traces.trace import Array, CountTrace, RoutingTrace, TraceError
from moeserve_placement.traces.windows import count_windows

_PAIR_TOKENS = 1 << 14
"""Tokens whose pairs are counted; pairs are sampled evenly from longer traces."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerInfo:
    """Statistics of the expert load of one layer over the whole trace.

    imbalance: most loaded expert / mean expert. gini: 0 (equal) to 1. cv: standard deviation /
    mean. top_share: share of the load on the ``top`` most loaded experts. idle_experts: experts
    without a token.
    drift: total-variation distance of the load shares of consecutive windows, mean over windows,
    0 (same) to 1. None: fewer than two windows.
    coactivation: total-variation distance between the pairs of experts that tokens choose and the
    pairs that independent choices with the same loads would give. None: counts only, or top_k = 1.
    """

    layer: int
    imbalance: float
    gini: float
    cv: float
    top_share: float
    idle_experts: int
    drift: float | None
    drift_noise: float | None
    coactivation: float | None
    coactivation_noise: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceInfo:
    """Size of a trace and the statistics of its layers.

    num_tokens, num_sequences, top_k: None where a count trace does not say it. top: how many
    experts ``top_share`` takes. window_tokens: tokens of one window; None: the windows of a count
    trace.
    """

    kind: str
    num_tokens: int | None
    num_sequences: int | None
    num_windows: int
    num_layers: int
    num_experts: int
    top_k: int | None
    window_tokens: int | None
    top: int
    has_weights: bool
    duration_s: float | None
    labels: dict[str, int]
    metadata: dict[str, str]
    layers: tuple[LayerInfo, ...]

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        return asdict(self)


def describe(
    trace: RoutingTrace | CountTrace, *, window_tokens: int = 2048, top: int | None = None
) -> TraceInfo:
    """The statistics of a trace.

    window_tokens: tokens per window for drift (routing traces; a last, shorter window is left out
        where there is another). top: experts of ``top_share``; None: top_k, or a tenth of the
        experts of a count trace.

    Raises:
        TraceError: window_tokens is below 1 or top is not in [1, num_experts].
    """
    is_routing = isinstance(trace, RoutingTrace)
    if isinstance(trace, RoutingTrace):
        short = trace.num_tokens >= window_tokens
        windows = count_windows(trace, window_tokens, drop_last=short).counts
        totals = trace.counts()
    else:
        windows, totals = trace.counts, trace.counts.sum(axis=0)
    if top is None:
        top = trace.top_k if isinstance(trace, RoutingTrace) else max(1, trace.num_experts // 10)
    if not 1 <= top <= trace.num_experts:
        raise TraceError(f"top = {top}: must be in [1, {trace.num_experts}]")
    layers = tuple(
        _layer(trace, i, totals[i], windows[:, i], top=top) for i in range(trace.num_layers)
    )
    return TraceInfo(
        **_sizes(trace),
        num_windows=windows.shape[0],
        window_tokens=window_tokens if is_routing else None,
        top=top,
        metadata=dict(trace.metadata),
        layers=layers,
    )


def imbalance(load: Array) -> float:
    """Largest / mean of a load, 1.0 where there is no load at all."""
    mean = float(load.mean())
    return float(load.max()) / mean if mean > 0 else 1.0


def gini(load: Array) -> float:
    """Gini coefficient of a load: 0 where all are equal, (n - 1) / n where one has all."""
    ordered = np.sort(load.astype(np.float64))
    total, count = float(ordered.sum()), ordered.size
    if total <= 0:
        return 0.0
    ranks = np.arange(1, count + 1)
    return float(2 * (ranks * ordered).sum() / (count * total) - (count + 1) / count)


def pair_counts(topk_ids: Array, num_experts: int) -> Array:
    """Tokens that chose both experts: int64 [num_experts, num_experts], symmetric, diagonal 0.

    topk_ids: [num_tokens, top_k], one layer.
    """
    pairs = np.zeros((num_experts, num_experts), dtype=np.int64)
    ids = topk_ids.astype(np.int64)
    for first in range(ids.shape[1]):
        for second in range(first + 1, ids.shape[1]):
            flat = ids[:, first] * num_experts + ids[:, second]
            pairs += np.bincount(flat, minlength=num_experts**2).reshape(pairs.shape)
    return pairs + pairs.T


def coactivation(pairs: Array) -> tuple[float, float]:
    """(strength, noise) of pair counts; see ``LayerInfo``.

    The independent pairs are w_e * w_f off the diagonal, with w fitted so that every expert is in
    as many pairs as it was (iterative proportional fitting).
    """
    total = float(pairs.sum())
    if total <= 0:
        return 0.0, 0.0
    observed = pairs / total
    marginal = observed.sum(axis=1)
    weight = marginal.copy()
    for _ in range(100):
        rest = weight.sum() - weight
        fitted = np.divide(marginal, rest, out=np.zeros_like(weight), where=rest > 0)
        change = float(np.abs(fitted - weight).max())
        # Half steps: the plain iteration can swing between two values.
        weight = np.sqrt(fitted * weight)
        if change < 1e-12:
            break
    expected = np.outer(weight, weight)
    np.fill_diagonal(expected, 0)
    expected /= max(float(expected.sum()), 1e-300)
    distance = 0.5 * float(np.abs(observed - expected).sum())
    return distance, _distance_noise(expected, total)


def drift(windows: Array) -> tuple[float, float] | None:
    """(drift, noise) of the loads [num_windows, num_experts] of one layer; see ``LayerInfo``."""
    totals = windows.sum(axis=1)
    windows, totals = windows[totals > 0], totals[totals > 0]
    if windows.shape[0] < 2:
        return None
    shares = windows / totals[:, None]
    distance = 0.5 * np.abs(np.diff(shares, axis=0)).sum(axis=1)
    mean_share = windows.sum(axis=0) / totals.sum()
    # The difference of two windows has the variance of both; n: their harmonic mean, halved.
    pairs = 1 / (1 / totals[1:] + 1 / totals[:-1])
    noise = [_distance_noise(mean_share, float(size)) for size in pairs]
    return float(distance.mean()), float(np.mean(noise))


def _distance_noise(shares: Array, samples: float) -> float:
    """Expected total-variation distance of ``samples`` draws from their own distribution.

    Half the sum of the mean absolute deviations, each sqrt(2 / pi) of its standard deviation; where
    less than about one draw is expected the deviation is at most twice the share.
    """
    deviation = np.sqrt(2 / np.pi * shares * (1 - shares) / samples)
    return 0.5 * float(np.minimum(deviation, 2 * shares).sum())


def _layer(
    trace: RoutingTrace | CountTrace, index: int, total: Array, windows: Array, *, top: int
) -> LayerInfo:
    mean = float(total.mean())
    moved = drift(windows)
    together = None
    if isinstance(trace, RoutingTrace) and trace.top_k > 1:
        step = -(-trace.num_tokens // _PAIR_TOKENS)
        together = coactivation(pair_counts(trace.topk_ids[::step, index], trace.num_experts))
    return LayerInfo(
        layer=trace.layer_ids[index],
        imbalance=imbalance(total),
        gini=gini(total),
        cv=float(total.std()) / mean if mean > 0 else 0.0,
        top_share=float(np.sort(total)[-top:].sum() / max(int(total.sum()), 1)),
        idle_experts=int((total == 0).sum()),
        drift=moved[0] if moved else None,
        drift_noise=moved[1] if moved else None,
        coactivation=together[0] if together else None,
        coactivation_noise=together[1] if together else None,
    )


def _sizes(trace: RoutingTrace | CountTrace) -> dict[str, Any]:
    common = {"num_layers": trace.num_layers, "num_experts": trace.num_experts}
    if isinstance(trace, CountTrace):
        tokens = trace.tokens_per_window
        return common | {
            "kind": "counts",
            "num_tokens": None if tokens is None else int(tokens.sum()),
            "num_sequences": None,
            "top_k": None,
            "has_weights": False,
            "duration_s": None,
            "labels": {},
        }
    times = trace.arrival_times_s
    return common | {
        "kind": "routing",
        "num_tokens": trace.num_tokens,
        "num_sequences": trace.num_sequences,
        "top_k": trace.top_k,
        "has_weights": trace.topk_weights is not None,
        "duration_s": None if times is None else float(times.max() - times.min()),
        "labels": dict(_tokens_per_label(trace)),
    }


def _tokens_per_label(trace: RoutingTrace) -> Iterator[tuple[str, int]]:
    if trace.labels is None:
        return
    names, owner = np.unique(np.array(trace.labels, dtype=object), return_inverse=True)
    tokens = np.bincount(owner, weights=trace.sequence_lengths)
    for name, count in zip(names.tolist(), tokens.tolist(), strict=True):
        yield str(name), int(count)
