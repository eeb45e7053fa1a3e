"""Bounds that know the future: Belady's for eviction, and an oracle for prefetch.

What Belady's bounds: the number of experts fetched on demand, per layer, with caches of equal
capacity per layer, experts of one size, no prefetch, and all experts of a step in the cache.
Keeping the experts whose next use is nearest is the exact optimum (Belady 1966; the exchange
argument still holds when the experts of a step are pinned: every policy must keep those). A step
that needs more than the cache holds pins nothing, for any policy. Prefetch can go below the bound
in stalls, never in transfers.

The oracle predicts without error as many layer steps ahead as a predictor may look. What it leaves
of the stalls is due to the link, the rule and the eviction, not to prediction.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from moeserve_placement.paging.steps import DecodeSteps

Array = np.ndarray[Any, Any]


def next_use(used: Array) -> Array:
    """Steps until each expert is used again, at least 1: int32, the shape of ``used``.

    used: bool [num_steps, ...]. An expert that is never used again gets num_steps + 1 or more.
    """
    num_steps = used.shape[0]
    result = np.empty(used.shape, dtype=np.int32)
    ahead = np.full(used.shape[1:], num_steps, dtype=np.int32)
    for step in range(num_steps - 1, -1, -1):
        ahead += 1
        result[step] = ahead
        ahead[used[step]] = 0
    return result


class Belady:
    """The oracle as a policy: ranks experts by how soon they are used next."""

    name = "belady"

    def __init__(self, steps: DecodeSteps) -> None:
        self._next_use = next_use(steps.used)
        self._step = -1

    def observe(self, used: Array) -> Array:
        """Keys of the next step of the trace given at the start; ``used`` is not looked at."""
        self._step += 1
        return np.asarray(-self._next_use[self._step])


class Oracle:
    """The future as a predictor (Predictor in predictors.py): chances are 0 or 1."""

    name = "oracle"

    def __init__(self, steps: DecodeSteps, *, horizon: int = 2) -> None:
        self.horizon = horizon
        path = steps.used.reshape(-1, steps.num_experts)
        self._path = np.concatenate([path, np.zeros((horizon, steps.num_experts), np.bool_)])
        self._num_layers, self._step = steps.num_layers, -1

    def observe(self, topk_ids: Array, lanes: Array, is_first: Array) -> Array:
        """Chances from the trace given at the start; the arguments are not looked at."""
        self._step += 1
        start = self._step * self._num_layers
        ahead = [self._path[start + h :][: self._num_layers] for h in range(1, self.horizon + 1)]
        return np.array(ahead, dtype=np.float32)
