"""Choosing top_k different experts per token so that each is chosen as often as wanted.

Experts are drawn by systematic sampling (Madow 1949): with inclusion probabilities p_e <= 1 that
sum to top_k, laid end to end on a line in random order, the experts under the points u, u + 1, ...,
u + top_k - 1 are all different, and expert e is among them with probability p_e exactly. Softmax
sampling without replacement would not hit a wanted probability.

Since a token chooses an expert at most once, no expert can have more than 1 / top_k of the load:
the imbalance (max / mean) of experts is at most num_experts / top_k.
"""

from __future__ import annotations

import numpy as np

from moeserve_placement.traces.trace import Array, TraceError

_CAP = 1 - 1e-9
"""Largest inclusion probability: below 1, so that rounding can not choose an expert twice."""
_MIN_POPULARITY = 1e-12
_MAX_SCALE = 400.0
_BLOCK_TOKENS = 32
"""Tokens that share one random order of the experts: an order each would cost most of the time."""


def inclusion(logits: Array, top_k: int) -> Array:
    """Inclusion probabilities proportional to exp(logits), capped at 1: [..., num_experts].

    What the cap cuts off goes to the other experts in proportion; every row sums to top_k.
    """
    popularity = np.exp(logits - logits.max(axis=-1, keepdims=True))
    popularity = np.maximum(popularity, _MIN_POPULARITY)
    ordered = -np.sort(-popularity, axis=-1)
    # Factor if the m largest are capped; the right m is the first whose next expert stays below 1.
    rest = np.cumsum(ordered[..., ::-1], axis=-1)[..., ::-1]
    capped = np.arange(ordered.shape[-1])
    factor = np.maximum(top_k - capped * _CAP, 0) / rest
    first = np.argmax(factor * ordered <= _CAP, axis=-1)
    chosen = np.take_along_axis(factor, first[..., None], axis=-1)
    return np.asarray(np.minimum(popularity * chosen, _CAP))


def load_imbalance(load: Array, groups: Array | None = None) -> Array:
    """Largest / mean load of experts, or of their groups, along the last axis.

    groups: [num_experts], the group (rank) of each expert; None: every expert is its own.
    """
    if groups is not None:
        load = load @ np.eye(int(groups.max()) + 1)[groups]
    return np.asarray(load.max(axis=-1) / np.maximum(load.mean(axis=-1), 1e-300))


def solve_scale(
    pattern: Array,
    target: Array,
    *,
    top_k: int,
    offset: Array | float = 0.0,
    groups: Array | None = None,
) -> Array:
    """The factor of ``pattern`` in the logits that makes the expected imbalance ``target``.

    pattern: [rows, num_experts], which experts gain; offset: added to the logits.
    target: [rows]. Returns [rows], found by bisection.

    Raises:
        TraceError: a target that no factor reaches; the text says what is the most.
    """
    spread = pattern.std(axis=-1, keepdims=True)
    unit = pattern / np.maximum(spread, 1e-12)

    def reached(scale: Array) -> Array:
        logits = offset + scale[:, None] * unit
        return load_imbalance(inclusion(logits, top_k), groups)

    low, high = np.zeros(len(pattern)), np.full(len(pattern), _MAX_SCALE)
    most = reached(high)
    if (target > most * (1 + 1e-6)).any():
        row = int(np.argmax(target / most))
        what = "rank" if groups is not None else "expert"
        raise TraceError(
            f"imbalance = {target[row]:.3g}: the most loaded {what} can have at most "
            f"{most[row]:.3g} times the mean here, because top_k = {top_k} gives an expert at most "
            f"1/{top_k} of the load (num_experts / top_k = {pattern.shape[1] / top_k:.3g})"
        )
    for _ in range(48):
        middle = (low + high) / 2
        above = reached(middle) >= target
        low, high = np.where(above, low, middle), np.where(above, middle, high)
    return np.asarray(high / np.maximum(spread[:, 0], 1e-12))


def sample_topk(probabilities: Array, num_tokens: int, *, rng: np.random.Generator) -> Array:
    """Experts of num_tokens tokens, drawn with these inclusion probabilities.

    probabilities: [num_experts], each below 1, with an integer sum top_k.
    Returns int64 [num_tokens, top_k]: different experts for every token, in random order.
    """
    num_experts, top_k = probabilities.size, round(float(probabilities.sum()))
    num_blocks = -(-num_tokens // _BLOCK_TOKENS)
    order = np.argsort(rng.random((num_blocks, num_experts)), axis=1)
    ends = np.cumsum(probabilities[order], axis=1)
    ends *= top_k / ends[:, -1:]
    points = rng.random((num_blocks, _BLOCK_TOKENS, 1)) + np.arange(top_k)
    # One search for all blocks: block b is shifted by b * (top_k + 1), so the ends stay sorted.
    shift = np.arange(num_blocks) * (top_k + 1.0)
    found = np.searchsorted((ends + shift[:, None]).ravel(), points + shift[:, None, None], "right")
    place = np.minimum(found - np.arange(num_blocks)[:, None, None] * num_experts, num_experts - 1)
    chosen = np.take_along_axis(order, place.reshape(num_blocks, -1), axis=1)
    return np.asarray(chosen.reshape(-1, top_k)[:num_tokens])
