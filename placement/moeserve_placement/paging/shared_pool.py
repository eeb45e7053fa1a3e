"""One pool of slots over all layers, where it matters that a layer just done is needed last.

Layers come in a fixed cycle. Among experts unused for equally many visits of their layer, plain LRU
evicts the one whose layer was visited longest ago: just the one that comes next. Layer-aware LRU
evicts the one whose layer comes last ("Cache Management for Mixture-of-Experts LLMs", 2025; the
same idea as Least-Stale in SpecMD). With one cache per layer the two are the same.

The pool holds ``capacity`` times the layers, so that it compares with caches of ``capacity`` per
layer. No prefetch.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from moeserve_placement.paging.belady import next_use
from moeserve_placement.paging.results import PagingResult, Tally
from moeserve_placement.paging.stall import StallModel
from moeserve_placement.paging.steps import DecodeSteps

Array = np.ndarray[Any, Any]
Ranker = Callable[[int, int], Array]
"""(step, layer) -> keys [num_layers, num_experts] at that moment; the lowest is evicted first."""


def simulate_pool(
    steps: DecodeSteps,
    policy: str,
    *,
    capacities: Sequence[int],
    stall: StallModel | None = None,
    progress: Callable[[int], None] | None = None,
) -> list[PagingResult]:
    """Results per capacity (experts per layer on average) of lru, layer-lru or belady.

    Belady's is the exact bound on misses of any eviction policy for the pool, under the same terms
    as belady.py.

    Raises:
        ValueError: another policy, or a capacity below 1.
    """
    rankers: dict[str, Callable[[DecodeSteps], Ranker]] = {
        "lru": _lru,
        "layer-lru": _layer_lru,
        "belady": _belady,
    }
    if policy not in rankers:
        raise ValueError(f"policy = {policy!r}: must be one of {', '.join(rankers)}")
    for capacity in capacities:
        if capacity < 1:
            raise ValueError(f"capacity = {capacity}: must be at least 1 expert per layer")
    model, rank = stall or StallModel(), rankers[policy](steps)
    pools = [_Pool(steps, capacity) for capacity in capacities]
    scoring_s = 0.0
    for step in range(steps.num_steps):
        for layer in range(steps.num_layers):
            start = time.thread_time()
            keys = rank(step, layer)
            scoring_s += time.thread_time() - start
            for pool in pools:
                pool.visit(layer, steps.used[step, layer], keys)
        if progress is not None:
            progress(1)
    return [pool.result(policy, model, scoring_s) for pool in pools]


class _Pool:
    """The slots of one capacity."""

    def __init__(self, steps: DecodeSteps, capacity: int) -> None:
        self._steps, self._capacity = steps, capacity
        self._num_slots = capacity * steps.num_layers
        self._resident = np.zeros((steps.num_layers, steps.num_experts), dtype=np.bool_)
        self._num_resident = 0
        self._tally = Tally()

    def visit(self, layer: int, used: Array, keys: Array) -> None:
        """One layer step: fetch what is missing, evict the lowest keys."""
        resident, tally = self._resident[layer], self._tally
        num_missing = int(np.count_nonzero(used & ~resident))
        tally.hits += int(np.count_nonzero(used)) - num_missing
        if not num_missing:
            return
        tally.misses += num_missing
        tally.stalls += 1
        self._num_resident += num_missing
        resident |= used
        excess = self._num_resident - self._num_slots
        if excess > 0:
            start = time.thread_time()
            self._evict(layer, used, keys, excess)
            tally.choosing_s += time.thread_time() - start

    def _evict(self, layer: int, used: Array, keys: Array, excess: int) -> None:
        candidates = self._resident.copy()
        if np.count_nonzero(used) <= self._num_slots:
            candidates[layer] &= ~used
        ranked = np.where(candidates, keys, np.inf).ravel()
        worst = np.argpartition(ranked, excess - 1)[:excess] if excess > 1 else ranked.argmin()
        self._resident.reshape(-1)[worst] = False
        self._num_resident -= excess

    def result(self, policy: str, stall: StallModel, scoring_s: float) -> PagingResult:
        """What the run gave. Without prefetch every miss waits for its own transfer."""
        tally, steps = self._tally, self._steps
        stall_us = tally.misses * stall.transfer_us
        return PagingResult(
            policy=policy,
            predictor=None,
            capacity=self._capacity,
            batch=steps.batch,
            num_steps=steps.num_steps,
            num_layers=steps.num_layers,
            num_tokens=steps.num_tokens,
            requests=tally.hits + tally.misses,
            hits=tally.hits,
            late=0,
            misses=tally.misses,
            prefetches=0,
            useful_prefetches=0,
            stalls=tally.stalls,
            stall_us=stall_us,
            total_us=stall_us + steps.num_steps * steps.num_layers * stall.compute_us_per_layer,
            policy_s=scoring_s + tally.choosing_s,
        )


def _lru(steps: DecodeSteps) -> Ranker:
    """Keys: the layer step of the last use."""
    last_use = np.full((steps.num_layers, steps.num_experts), -1.0)

    def rank(step: int, layer: int) -> Array:
        last_use[layer, steps.used[step, layer]] = step * steps.num_layers + layer
        return last_use

    return rank


def _layer_lru(steps: DecodeSteps) -> Ranker:
    """Keys: minus the visits of its layer without use, then minus the distance to the next visit.

    The distance is below one visit: it only decides between experts of equal age.
    """
    num_layers = steps.num_layers
    age = np.zeros((num_layers, steps.num_experts))
    layers = np.arange(num_layers)
    distance = ((layers[None] - layers[:, None] - 1) % num_layers)[:, :, None] / num_layers

    def rank(step: int, layer: int) -> Array:
        age[layer] += 1.0
        age[layer, steps.used[step, layer]] = 0.0
        return np.asarray(-(age + distance[layer]))

    return rank


def _belady(steps: DecodeSteps) -> Ranker:
    """Keys: minus the layer step of the next use."""
    num_layers = steps.num_layers
    visits = np.arange(num_layers, dtype=np.int64)[:, None]
    ahead = next_use(steps.used)
    first = np.argmax(steps.used, axis=0)
    never = ~steps.used.any(axis=0)
    when = np.where(never, 2 * steps.num_steps, first).astype(np.int64) * num_layers + visits

    def rank(step: int, layer: int) -> Array:
        when[layer] = (step + ahead[step, layer].astype(np.int64)) * num_layers + layer
        return -when

    return rank
