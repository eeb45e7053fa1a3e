"""Prediction of the experts of coming layers from counts of what followed what.

For the layer that is h layer steps away, the log-odds that a token uses an expert are a weighted
sum of: the expert's log-odds of use so far; the sum over the token's experts in the layer just
computed of log P(expert | that one) / P(expert); the same sum over the experts of the token before
in the layer asked about; the log of a moving average of recent use there. Integer tables hold the
counts (tables.py). The weights, five for each h, are fitted by logistic regression on training
steps that the tables have not counted by then. After that only the tables go on learning: each
scored step is counted after it has been predicted.
"""

from __future__ import annotations

from typing import Any, Protocol

import numpy as np

from moeserve_placement.paging.logistic import fit_logistic, sigmoid
from moeserve_placement.paging.steps import DecodeSteps
from moeserve_placement.paging.tables import TransitionCounts, one_hot

Array = np.ndarray[Any, Any]

_RATE = np.float32(0.1)
"""Weight of the newest step in the moving average."""
_REFRESH_TOKENS = 512
"""Tokens between two updates of the log ratios from the counts."""
_COUNTED_SHARE = 2 / 3
"""Share of the training steps counted before the weights are fitted on the others."""
_FIT_ROWS = 200_000


class Predictor(Protocol):
    """What the simulation asks of a predictor."""

    name: str
    horizon: int

    def observe(self, topk_ids: Array, lanes: Array, is_first: Array) -> Array:
        """Take in a step and return chances of use: float [horizon, num_layers, num_experts].

        topk_ids: integer [num_tokens, num_layers, top_k]; lanes, is_first: as in DecodeSteps.
        Entry [h - 1, l] is about the layer step that comes h after layer l of this step, and rests
        on layers 0..l of this step and all steps before.
        """
        ...


class CountTablePredictor:
    """The predictor described above.

    training: steps to count and fit on, of the same batch size as those to predict.
    horizon: how many layer steps it looks ahead.

    Raises:
        ValueError: the horizon is not within [1, num_layers - 1].
    """

    name = "count-tables"

    def __init__(self, training: DecodeSteps, *, horizon: int = 2) -> None:
        num_layers, num_experts = training.num_layers, training.num_experts
        if not 1 <= horizon < num_layers:
            raise ValueError(
                f"horizon = {horizon}: must be within [1, {num_layers - 1}] for {num_layers} layers"
            )
        self.horizon = horizon
        self._counts = TransitionCounts(num_layers, num_experts, horizon=horizon)
        self._layers = np.arange(num_layers)[:, None]
        self._previous_ids = np.zeros((training.batch, num_layers, training.top_k), dtype=np.int64)
        self._previous_ratios = np.zeros((training.batch, num_layers, num_experts), np.float32)
        self._waiting: list[tuple[Array, Array, Array]] = []
        self._num_waiting = 0
        self._average = np.zeros((num_layers, num_experts), dtype=np.float32)
        self._weights = self._learn(training)

    def observe(self, topk_ids: Array, lanes: Array, is_first: Array) -> Array:
        """Chances that any token of the step asked about uses the expert."""
        evidence = self._evidence(topk_ids, lanes, is_first)
        self._remember(topk_ids, lanes, is_first)
        log_odds = np.einsum("hf,hf...->h...", self._weights[:, :4], evidence, optimize=False)
        chances = sigmoid(log_odds + self._weights[:, 4].reshape(-1, 1, 1, 1))
        if chances.shape[1] == 1:
            return np.asarray(chances[:, 0])
        return np.asarray(1 - np.prod(1 - chances, axis=1))

    def _evidence(self, topk_ids: Array, lanes: Array, is_first: Array) -> Array:
        """float32 [horizon, 4, num_tokens, num_layers, num_experts], by layer of the present."""
        token_before = self._previous_ratios[lanes]
        token_before[is_first] = 0
        token_now = self._token_ratios[self._layers, topk_ids].sum(axis=2)
        recent_before = np.log(self._average + np.float32(0.01))
        use = one_hot(topk_ids, self._average.shape[1]).mean(axis=0)
        self._average += _RATE * (use - self._average)
        recent_now = np.log(self._average + np.float32(0.01))
        self._previous_ratios[lanes] = token_now
        evidence = np.empty((self.horizon, 4, *token_now.shape), dtype=np.float32)
        for ahead in range(1, self.horizon + 1):
            found = evidence[ahead - 1]
            found[0] = np.roll(self._log_odds, -ahead, axis=0)
            found[1] = self._layer_ratios[ahead - 1][self._layers, topk_ids].sum(axis=2)
            # Further on in this step the token before is the past; in the next step this one is.
            found[2, :, :-ahead] = token_before[:, ahead:]
            found[2, :, -ahead:] = token_now[:, :ahead]
            found[3, :, :-ahead] = recent_before[ahead:]
            found[3, :, -ahead:] = recent_now[:ahead]
        return evidence

    def _remember(self, topk_ids: Array, lanes: Array, is_first: Array) -> None:
        self._waiting.append((topk_ids, self._previous_ids[lanes], ~is_first))
        self._previous_ids[lanes] = topk_ids
        self._num_waiting += topk_ids.shape[0]
        if self._num_waiting >= _REFRESH_TOKENS:
            self._count_waiting()
            self._refresh()

    def _count_waiting(self) -> None:
        self._counts.add(*(np.concatenate(parts) for parts in zip(*self._waiting, strict=True)))
        self._waiting.clear()
        self._num_waiting = 0

    def _refresh(self) -> None:
        self._log_odds = self._counts.log_odds()
        self._layer_ratios = self._counts.layer_ratios()
        self._token_ratios = self._counts.token_ratios()

    def _learn(self, training: DecodeSteps) -> Array:
        """Count, then fit: returns weights float32 [horizon, 5], the constant last."""
        num_counted = max(1, int(training.num_steps * _COUNTED_SHARE))
        self._refresh()
        for step in range(num_counted):
            where = training.tokens(step)
            self._remember(
                training.topk_ids[where], training.lanes[where], training.is_first[where]
            )
        self._count_waiting()
        self._refresh()
        self._average[:] = self._counts.share()
        rows, labels = self._fit_rows(training, num_counted)
        weights = [fit_logistic(rows[h], labels[h]) for h in range(self.horizon)]
        return np.asarray(weights, dtype=np.float32)

    def _fit_rows(self, training: DecodeSteps, start: int) -> tuple[list[Array], list[Array]]:
        """Per distance: evidence [num_rows, 4] and whether it came true [num_rows]."""
        rows: list[list[Array]] = [[] for _ in range(self.horizon)]
        labels: list[list[Array]] = [[] for _ in range(self.horizon)]
        num_tokens = training.num_tokens - int(training.offsets[start])
        per_token = training.num_layers * training.num_experts
        stride = max(1, num_tokens * per_token // _FIT_ROWS)
        for step in range(start, training.num_steps):
            where = training.tokens(step)
            topk_ids = training.topk_ids[where]
            evidence = self._evidence(topk_ids, training.lanes[where], training.is_first[where])
            self._remember(topk_ids, training.lanes[where], training.is_first[where])
            if step % stride:
                continue
            truth = one_hot(topk_ids, training.num_experts)
            for ahead in range(1, self.horizon + 1):
                # Only targets in this step: the weights of a distance serve the next step too.
                known = evidence[ahead - 1][:, :, :-ahead]
                rows[ahead - 1].append(known.reshape(4, -1).T)
                labels[ahead - 1].append(truth[:, ahead:].reshape(-1))
        empty = np.zeros((0, 4), dtype=np.float32)
        return (
            [np.concatenate([empty, *parts]) for parts in rows],
            [np.concatenate([empty[:, 0], *parts]) for parts in labels],
        )
