"""Prediction of the experts of coming layers from earlier tokens that took the same path so far.

The experts of a few layers nearly tell which token it is and in what context, and such tokens come
again. So the last ``memory`` tokens are kept with the experts of all their layers, of the last
layers of the token before and the first layers of the token after. The likeness of a kept token
is the number of experts it shares with the present one, layer by layer, older layers counting
less; the chance of an expert is its share among the kept tokens, weighted by exp(likeness), and
the prior.

Layers below ``_HEAD`` compare with every kept token; from there on only the ``_NEAREST`` that are
most alike by then are looked at. Nothing is fitted: training tokens merely fill the memory.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from moeserve_placement.paging.steps import DecodeSteps
from moeserve_placement.paging.tables import one_hot

Array = np.ndarray[Any, Any]

MEMORY = 8192
"""Tokens kept, unless another number is asked for."""
_BEFORE = 2
"""Layers of the token before in the path."""
_HEAD = 3
"""Layers that compare with every kept token."""
_NEAREST = 128
"""Kept tokens that the further layers look at."""


class NeighbourPredictor:
    """The predictor described above.

    training: steps to fill the memory from, of any batch size; batch: lanes of the steps to come.
    horizon: how many layer steps it looks ahead. memory: tokens kept.
    sharpness, decay: weight of a shared expert in the exponent, and the factor on it per layer step
        back. doubt: weight of the prior, the best match being 1. All were chosen on training
        sequences only (see benchmarks/bench_paging.py).

    Raises:
        ValueError: the horizon is not within [1, num_layers - 1].
    """

    name = "neighbours"

    def __init__(
        self,
        training: DecodeSteps,
        *,
        batch: int = 1,
        horizon: int = 2,
        memory: int = MEMORY,
        sharpness: float = 1.0,
        decay: float = 0.9,
        doubt: float = 0.1,
    ) -> None:
        num_layers, num_experts = training.num_layers, training.num_experts
        if not 1 <= horizon < num_layers:
            raise ValueError(
                f"horizon = {horizon}: must be within [1, {num_layers - 1}] for {num_layers} layers"
            )
        self.horizon, self._doubt, self._memory = horizon, doubt, memory
        self._num_layers, self._num_experts = num_layers, num_experts
        self._prior = _prior(training, horizon)
        self._length = _BEFORE + num_layers + horizon
        self._head = min(_HEAD, num_layers)
        self._paths = np.zeros((memory, self._length, num_experts), dtype=np.bool_)
        # The first layers again, kept tokens last: read as a whole for each token.
        self._heads = np.zeros((_BEFORE + self._head + horizon, num_experts, memory), np.float32)
        self._num_kept = self._next_place = 0
        back = np.arange(_BEFORE + num_layers)
        back = back[_BEFORE:] - back[:, None]
        weights = np.where(back >= 0, sharpness * decay ** np.maximum(back, 0), 0)
        self._weights = weights.astype(np.float32)  # [_BEFORE + num_layers, num_layers]
        self._start_lanes(training.batch)
        self._fill(training)
        self._start_lanes(batch)

    def observe(self, topk_ids: Array, lanes: Array, is_first: Array) -> Array:
        """Chances that any token of the step asked about uses the expert."""
        now, done = self._take(topk_ids, lanes, is_first)
        # Sums of float32 may end just above 1.
        unused = [1 - np.minimum(self._predict(path), 1) for path in now]
        # What is done holds the first layers of this step, so it is kept only after predicting.
        self._keep(done)
        return np.asarray(1 - np.prod(unused, axis=0))

    def _start_lanes(self, batch: int) -> None:
        self._lane_paths = np.zeros((batch, self._length, self._num_experts), dtype=np.float32)
        self._lane_busy = np.zeros(batch, dtype=np.bool_)

    def _fill(self, training: DecodeSteps) -> None:
        """Keep the last training tokens."""
        oldest = max(0, training.num_tokens - self._memory)
        for step in range(training.num_steps):
            at = training.tokens(step)
            if at.start >= oldest:
                ids, lanes = training.topk_ids[at], training.lanes[at]
                self._keep(self._take(ids, lanes, training.is_first[at])[1])

    def _take(self, topk_ids: Array, lanes: Array, is_first: Array) -> tuple[Array, Array]:
        """Paths of these tokens so far, and those of the tokens before, now complete."""
        use = one_hot(topk_ids, self._num_experts)
        last = self._lane_paths[lanes]
        goes_on = ~is_first
        last[goes_on, _BEFORE + self._num_layers :] = use[goes_on, : self.horizon]
        now = np.zeros_like(last)
        now[goes_on, :_BEFORE] = last[goes_on, self._num_layers : self._num_layers + _BEFORE]
        now[:, _BEFORE : _BEFORE + self._num_layers] = use
        done = last[self._lane_busy[lanes]]
        self._lane_paths[lanes], self._lane_busy[lanes] = now, True
        return now, done

    def _keep(self, paths: Array) -> None:
        for path in paths:
            self._paths[self._next_place] = path
            self._heads[:, :, self._next_place] = path[: self._heads.shape[0]]
            self._next_place = (self._next_place + 1) % self._memory
            self._num_kept = max(self._num_kept, self._next_place or self._memory)

    def _predict(self, path: Array) -> Array:
        """Chances for one token: [horizon, num_layers, num_experts]."""
        chances = np.empty((self.horizon, self._num_layers, self._num_experts), np.float32)
        if not self._num_kept:
            for ahead in range(1, self.horizon + 1):
                chances[ahead - 1] = self._prior[ahead:][: self._num_layers]
            return chances
        num_known = _BEFORE + self._head
        heads = self._heads[:, :, : self._num_kept]
        shared = np.stack([heads[at][path[at] > 0].sum(axis=0) for at in range(num_known)])
        alike = self._weights[:num_known, : self._head].T @ shared  # [head, num_kept]
        for layer in range(self._head - 1):
            targets = heads[_BEFORE + layer + 1 :][: self.horizon].transpose(0, 2, 1)
            chances[:, layer] = self._vote(alike[layer], targets, self._prior[layer + 1 :])
        self._predict_tail(path, chances, alike[-1])
        return chances

    def _predict_tail(self, path: Array, chances: Array, alike: Array) -> None:
        """Fill in the last layer of the head and all after it."""
        first, num_known = self._head - 1, _BEFORE + self._num_layers
        nearest = np.arange(alike.size)
        if alike.size > _NEAREST:
            nearest = np.argpartition(alike, -_NEAREST)[-_NEAREST:]
        # [length, nearest, experts]
        kept = self._paths[nearest].astype(np.float32).transpose(1, 0, 2)
        shared = np.matmul(kept[:num_known], path[:num_known, :, None])[:, :, 0]
        alike = self._weights[:, first:].T @ shared  # [layers, nearest]
        for ahead in range(1, self.horizon + 1):
            targets = kept[_BEFORE + first + ahead :][: self._num_layers - first]
            chances[ahead - 1, first:] = self._vote(alike, targets, self._prior[first + ahead :])

    def _vote(self, alike: Array, targets: Array, prior: Array) -> Array:
        """Weighted shares of the kept tokens that used each expert: [layers, num_experts].

        alike: [layers or 1, kept]; targets: 0/1 [layers, kept, num_experts]; prior: from the first
            of these layers on.
        """
        weights = np.exp(alike - alike.max(axis=-1, keepdims=True))
        found = np.matmul(weights[..., None, :], targets)[:, 0]
        total = weights.sum(axis=-1, keepdims=True)
        return np.asarray((found + self._doubt * prior[: len(found)]) / (total + self._doubt))


def _prior(training: DecodeSteps, horizon: int) -> Array:
    """Share of tokens that used each expert, the first layers once more after the last."""
    counts = [
        np.bincount(training.topk_ids[:, layer].ravel(), minlength=training.num_experts)
        for layer in range(training.num_layers)
    ]
    share = np.array(counts, dtype=np.float32) / training.num_tokens
    return np.concatenate([share, share[:horizon]])
