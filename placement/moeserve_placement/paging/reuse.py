"""Eviction by predicted reuse: a linear model per layer, learned on past steps and kept up to date.

The target is gamma^(steps until the next use), so an expert used soon is near 1 and one not used
for long is near 0. What it is predicted from, for every expert of the layer: whether the step uses
it, square roots of three moving averages of its use (fast, middle, slow), and the experts of the
layer below in this step and of the layer above one step ago. So the model holds expert to expert
relations ("after 5 and 9 comes 12, rarely 3"), which averages of single experts can not.

Ridge regression in closed form: sums of products from the training steps, then every
``refit_every`` steps the steps just seen are added, once their future is known, and it is solved
again. Nothing of the future of a scored step is ever used.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from moeserve_placement.paging.steps import DecodeSteps

Array = np.ndarray[Any, Any]

MAX_EXPERTS = 128
"""Beyond, the sums of products (square of six features per expert) outgrow what they give."""

_OWN_RATES = np.array([0.3, 0.1, 0.03], dtype=np.float32).reshape(3, 1, 1)
_FLOOR = np.float32(1e-6)
_LAG = 24
"""Steps of future behind each target. 0.87^24 is 0.04: what comes later hardly changes it."""
_UPDATE_COST = 193 * 193 * 24
"""Products per step that an update may cost; larger models learn from every nth step only."""


class LinearReuse:
    """Evicts the expert whose predicted reuse is lowest.

    training: steps to learn from before the first scored one; of the same batch size.
    gamma, ridge: discount per step and regularisation. Chosen on sequences of one recorded trace
        (benchmarks/bench_paging.py tells which, and which scores were seen meanwhile).
    refit_every: steps between updates.

    Raises:
        ValueError: the layers have more than MAX_EXPERTS experts.
    """

    name = "reuse"

    def __init__(
        self,
        training: DecodeSteps,
        *,
        gamma: float = 0.87,
        ridge: float = 200.0,
        refit_every: int = 512,
    ) -> None:
        num_layers, num_experts = training.num_layers, training.num_experts
        if num_experts > MAX_EXPERTS:
            raise ValueError(
                f"policy = 'reuse': is for at most {MAX_EXPERTS} experts a layer, the trace has "
                f"{num_experts}; choose fast-slow"
            )
        self._gamma, self._refit_every = gamma, refit_every
        size = 6 * num_experts + 1
        self._stride = max(1, round(size * size * num_layers / _UPDATE_COST))
        self._features = _Features(num_layers, num_experts)
        self._rows: list[Array] = []
        self._used: list[Array] = []
        self._products = np.tile(ridge * np.eye(size, dtype=np.float32), (num_layers, 1, 1))
        self._targets = np.zeros((num_layers, size, num_experts), dtype=np.float32)
        self._weights = np.zeros((num_layers, size, num_experts), dtype=np.float32)
        self._learn(training)

    def observe(self, used: Array) -> Array:
        """Predicted reuse of every expert, and an update of the model where it is due."""
        features = self._features.observe(used)
        self._remember(features, used)
        if len(self._used) >= self._refit_every + _LAG:
            self._absorb(self._refit_every)
            self._solve()
        return np.asarray(np.matmul(features[:, None, :], self._weights)[:, 0, :])

    def _learn(self, training: DecodeSteps) -> None:
        for used in training.used:
            self._remember(self._features.observe(used), used)
            if len(self._used) >= self._refit_every + _LAG:
                self._absorb(self._refit_every)
        self._absorb(len(self._used) - 1)
        self._solve()
        self._rows.clear()
        self._used.clear()

    def _remember(self, features: Array, used: Array) -> None:
        self._rows.append(features.copy())
        self._used.append(used)

    def _absorb(self, count: int) -> None:
        """Add the oldest ``count`` remembered steps to the sums and forget them."""
        if count < 1:
            return
        targets = np.empty((count, *self._used[0].shape), dtype=np.float32)
        reuse = np.zeros(self._used[0].shape, dtype=np.float32)
        for step in range(len(self._used) - 1, -1, -1):
            if step < count:
                targets[step] = reuse
            reuse = np.where(self._used[step], np.float32(1), reuse) * np.float32(self._gamma)
        rows = np.stack(self._rows[: count : self._stride], axis=1)  # [layers, steps, size]
        transposed = rows.transpose(0, 2, 1)
        self._products += np.matmul(transposed, rows)
        self._targets += np.matmul(transposed, targets[:: self._stride].transpose(1, 0, 2))
        del self._rows[:count], self._used[:count]

    def _solve(self) -> None:
        self._weights = np.linalg.solve(self._products, self._targets)


class _Features:
    """The six numbers per expert and the constant, laid out [num_layers, 6 * experts + 1]."""

    def __init__(self, num_layers: int, num_experts: int) -> None:
        self._averages = np.zeros((3, num_layers, num_experts), dtype=np.float32)
        self._row = np.zeros((num_layers, 6 * num_experts + 1), dtype=np.float32)
        self._row[:, -1] = 1
        self._blocks = self._row[:, :-1].reshape(num_layers, 6, num_experts)
        self._use = np.zeros((num_layers, num_experts), dtype=np.float32)

    def observe(self, used: Array) -> Array:
        """Features after this step; the array is written again by the next call."""
        blocks = self._blocks
        # The layer above, one step ago: its part of this step is not known at this layer yet.
        blocks[:-1, 5] = self._use[1:]
        self._use = used.astype(np.float32)
        self._averages += _OWN_RATES * (self._use - self._averages)
        # Averages that decay for thousands of steps become denormal numbers, 50 times slower.
        np.maximum(self._averages, _FLOOR, out=self._averages)
        blocks[:, 0] = self._use
        blocks[:, 1:4] = np.sqrt(self._averages).transpose(1, 0, 2)
        blocks[1:, 4] = self._use[:-1]
        return self._row
