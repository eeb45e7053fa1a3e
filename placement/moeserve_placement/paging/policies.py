"""Eviction policies: which expert of a layer is worth keeping.

A policy ranks; it does not know the cache. After each step it gives a key per layer and expert, and
the cache evicts the lowest key first, never an expert that the step needs. Row l of the keys may
use what layers 0..l did in this step and everything before, so that a decision made at layer l
never rests on what happens after it.
"""

from __future__ import annotations

from typing import Any, Protocol

import numpy as np

Array = np.ndarray[Any, Any]


class EvictionPolicy(Protocol):
    """What the simulation asks of a policy."""

    name: str

    def observe(self, used: Array) -> Array:
        """Take in one step and return the keys to evict by, lowest first.

        used: bool [num_layers, num_experts], the experts that the step needs.
        Returns a real [num_layers, num_experts] array that the caller must not keep or change.
        """
        ...


class Random:
    """Evicts any expert with equal chance: what knowing nothing gives."""

    name = "random"

    def __init__(self, *, seed: int = 0) -> None:
        self._rng = np.random.default_rng(seed)

    def observe(self, used: Array) -> Array:
        """Fresh random keys."""
        return np.asarray(self._rng.random(used.shape))


class Lru:
    """Evicts the expert unused for longest.

    The key is the time of the last use in steps; layers of a step are fractions of it, so keys of
    different layers compare as well. With one cache per layer this already is layer-aware.
    """

    name = "lru"

    def __init__(self, num_layers: int, num_experts: int) -> None:
        self._last_use = np.full((num_layers, num_experts), -1.0)
        self._time = (np.arange(num_layers) / num_layers)[:, None]

    def observe(self, used: Array) -> Array:
        """Times of last use."""
        np.copyto(self._last_use, self._time, where=used)
        self._time = self._time + 1.0
        return self._last_use


class Lfu:
    """Evicts the expert used least since the start."""

    name = "lfu"

    def __init__(self, num_layers: int, num_experts: int) -> None:
        self._count = np.zeros((num_layers, num_experts), dtype=np.int64)

    def observe(self, used: Array) -> Array:
        """Number of steps that used each expert."""
        self._count += used
        return self._count


class FastSlow:
    """Evicts by a fast plus a slow moving average of use plus a share of the prior.

    prior: float [num_layers, num_experts], the share of training steps that used each expert.
    fast, slow: weight of the newest step in the two averages (1/7: the last seven or so).
    """

    name = "fast-slow"

    def __init__(
        self, prior: Array, *, fast: float = 0.15, slow: float = 0.015, prior_weight: float = 0.5
    ) -> None:
        self._rates = np.array([fast, slow]).reshape(2, 1, 1)
        self._averages = np.stack([prior, prior]).astype(np.float64)
        self._prior = prior_weight * prior

    def observe(self, used: Array) -> Array:
        """The sum of the three."""
        self._averages += self._rates * (used - self._averages)
        return np.asarray(self._averages.sum(axis=0) + self._prior)
