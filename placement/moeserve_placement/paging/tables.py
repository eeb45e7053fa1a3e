"""Integer counts of which expert followed which, and the log ratios made of them.

``by_layer[h - 1, l, i, j]``: tokens that used i in layer l and j in the layer h layer steps later.
Layers are cyclic: after the last layer of a token comes the first layer of its sequence's next
token. ``by_token[l, i, j]``: tokens that used i in layer l whose next token used j there.
"""

from __future__ import annotations

from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]

PSEUDO_COUNT = 2.0
"""Weight of independence behind each ratio: the ratio of a pair hardly seen stays near 1."""


class TransitionCounts:
    """The two tables, for ``horizon`` layer steps ahead (at most num_layers - 1)."""

    def __init__(self, num_layers: int, num_experts: int, *, horizon: int) -> None:
        self._shape = (num_layers, num_experts)
        self.horizon = horizon
        self.num_tokens = 0
        self.use = np.zeros(self._shape, dtype=np.int64)
        self.by_layer = np.zeros((horizon, num_layers, num_experts, num_experts), dtype=np.int64)
        self.by_token = np.zeros((num_layers, num_experts, num_experts), dtype=np.int64)

    def add(self, topk_ids: Array, previous_ids: Array, has_previous: Array) -> None:
        """Count tokens.

        topk_ids, previous_ids: integer [num_tokens, num_layers, top_k], the experts of tokens and
            of the token before each in its sequence; has_previous: bool [num_tokens], where the
            latter means something.
        """
        token = self._layers_first(topk_ids)
        after, before = token[:, has_previous], self._layers_first(previous_ids[has_previous])
        self.num_tokens += topk_ids.shape[0]
        self.use += token.sum(axis=1).astype(np.int64)
        self.by_token += _pairs(before, after)
        for ahead in range(1, self.horizon + 1):
            table = self.by_layer[ahead - 1]
            table[:-ahead] += _pairs(token[:-ahead], token[ahead:])
            table[-ahead:] += _pairs(before[-ahead:], after[:ahead])

    def share(self) -> Array:
        """Share of tokens that used each expert, [num_layers, num_experts]; never 0."""
        return (self.use + 0.5) / (self.num_tokens + 1.0)

    def log_odds(self) -> Array:
        """log(p / (1 - p)) of ``share``: float32 [num_layers, num_experts]."""
        share = np.minimum(self.share(), 0.999)
        return np.asarray(np.log(share / (1 - share)), dtype=np.float32)

    def layer_ratios(self) -> Array:
        """log P(j | i) / P(j) for the layer table, float32, its shape."""
        share = self.share()
        return np.stack(
            [
                _log_ratios(self.by_layer[ahead - 1], np.roll(share, -ahead, axis=0))
                for ahead in range(1, self.horizon + 1)
            ]
        )

    def token_ratios(self) -> Array:
        """log P(j | i) / P(j) for the token table, float32, its shape."""
        return _log_ratios(self.by_token, self.share())

    def _layers_first(self, topk_ids: Array) -> Array:
        """One-hot float32 [num_layers, num_tokens, num_experts]."""
        return one_hot(topk_ids, self._shape[1]).transpose(1, 0, 2)


def one_hot(topk_ids: Array, num_experts: int) -> Array:
    """float32 [num_tokens, num_layers, num_experts]: 1 where a token uses an expert."""
    result = np.zeros((*topk_ids.shape[:2], num_experts), dtype=np.float32)
    np.put_along_axis(result, topk_ids.astype(np.int64), 1.0, axis=2)
    return result


def _pairs(first: Array, second: Array) -> Array:
    """Joint counts per layer, int64. Sums of float32 ones are exact below 2^24 tokens a call."""
    return np.asarray(np.rint(np.matmul(first.transpose(0, 2, 1), second)), dtype=np.int64)


def _log_ratios(joint: Array, share: Array) -> Array:
    """joint: [num_layers, experts, experts]; share: [num_layers, experts] of the second expert."""
    # Every token has the same number of second experts, shares add up to it: row sums give counts.
    of_first = joint.sum(axis=2, keepdims=True) / share.sum(axis=1)[:, None, None]
    expected = share[:, None, :]
    smoothed = (joint + PSEUDO_COUNT * expected) / (of_first + PSEUDO_COUNT)
    return np.asarray(np.log(smoothed / expected), dtype=np.float32)
