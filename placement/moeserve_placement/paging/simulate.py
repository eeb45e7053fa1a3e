"""Decode steps played against caches: eviction, prefetch and the link in one loop.

Rules of a layer step, in order: count what is there; fetch what is missing, evicting the experts
with the lowest keys that the step does not need; begin prefetches while the link is free before
the next layer starts; wait for the needed experts; compute. An expert whose prefetch is under way
is *late*: the layer waits for the rest. When a layer step needs more experts than its cache holds,
all that are missing are fetched, used and then dropped except for the ``capacity`` highest keys:
never an error, always misses.

Prefetches that have not begun when the next layer starts are forgotten and chosen anew from newer
predictions. So a needed expert waits for no prefetch but the copy being made (stall.py), a prefetch
that waits becomes a demand when its expert is needed, and none begins for a layer that has passed.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from moeserve_placement.paging.policies import EvictionPolicy
from moeserve_placement.paging.predictors import Predictor
from moeserve_placement.paging.prefetch import Calibration, PrefetchRule, bins
from moeserve_placement.paging.results import PagingResult, Tally
from moeserve_placement.paging.stall import Link, StallModel
from moeserve_placement.paging.steps import DecodeSteps

Array = np.ndarray[Any, Any]
Progress = Callable[[int], None]

_CANDIDATES_PER_CHOICE = 2
"""Predicted experts looked at per expert that a token chooses: 2 k hold most of what comes."""
_LEAST_CHANCE = 0.08
"""Experts predicted below are never prefetched: looking at them would only cost time."""


def simulate(
    steps: DecodeSteps,
    policies: Sequence[EvictionPolicy],
    *,
    capacities: Sequence[int],
    stall: StallModel | None = None,
    predictor: Predictor | None = None,
    rule: PrefetchRule | None = None,
    progress: Progress | None = None,
) -> list[list[PagingResult]]:
    """Results per policy and capacity (experts that each layer's cache holds).

    Caches start empty. Policies and predictor must be fresh: each sees each step once, whatever the
    number of capacities. ``progress`` is called with the number of steps done since its last call.

    Raises:
        ValueError: a capacity is below 1.
    """
    for capacity in capacities:
        if capacity < 1:
            raise ValueError(f"capacity = {capacity}: must be at least 1 expert per layer")
    model, choice = stall or StallModel(), rule or PrefetchRule()
    horizon = 0 if predictor is None else predictor.horizon
    players = [
        _Player(policy, [_Run(steps, capacity, model, choice, horizon) for capacity in capacities])
        for policy in policies
    ]
    predicting_s = 0.0
    for step in range(steps.num_steps):
        forecast = None
        if predictor is not None:
            start = time.thread_time()
            forecast = _forecast(steps, step, predictor)
            predicting_s += time.thread_time() - start
        needs = _needs(steps, step)
        for player in players:
            player.step(steps.used[step], needs, forecast)
        if progress is not None and (step % 64 == 63 or step == steps.num_steps - 1):
            progress(step % 64 + 1)
    name = None if predictor is None else predictor.name
    return [player.results(name, predicting_s) for player in players]


def _needs(steps: DecodeSteps, step: int) -> list[list[int]]:
    """Experts that each layer of the step needs, each once."""
    where = steps.tokens(step)
    if where.stop - where.start == 1:
        chosen: list[list[int]] = steps.topk_ids[where.start].tolist()
        return chosen
    return [np.flatnonzero(layer).tolist() for layer in steps.used[step]]


class _Forecast(NamedTuple):
    """What is predicted after each layer; the lists are [horizon][num_layers][...]."""

    chances: list[list[list[float]]]
    """Of every expert."""
    candidates: list[list[list[int]]]
    """Experts, likeliest first."""
    bins: list[list[list[int]]]
    """Of the chances of the candidates, for calibration."""


def _forecast(steps: DecodeSteps, step: int, predictor: Predictor) -> _Forecast:
    where = steps.tokens(step)
    chances = predictor.observe(steps.topk_ids[where], steps.lanes[where], steps.is_first[where])
    num_tokens = where.stop - where.start
    count = min(_CANDIDATES_PER_CHOICE * steps.top_k * num_tokens, steps.num_experts)
    order = np.argsort(-chances, axis=2)[:, :, :count]
    places = bins(np.take_along_axis(chances, order, axis=2))
    return _Forecast(chances.tolist(), order.tolist(), places.tolist())


class _Option(NamedTuple):
    """An absent expert that could be prefetched for a layer ``ahead`` layer steps from now."""

    chance: float
    ahead: int
    expert: int
    layer: int


class _Player:
    """A policy and its runs, one per capacity."""

    def __init__(self, policy: EvictionPolicy, runs: list[_Run]) -> None:
        self._policy, self._runs = policy, runs
        self._scoring_s = 0.0

    def step(self, used: Array, needs: list[list[int]], forecast: _Forecast | None) -> None:
        start = time.thread_time()
        keys = self._policy.observe(used).tolist()
        self._scoring_s += time.thread_time() - start
        for run in self._runs:
            run.step(needs, keys, forecast)

    def results(self, predictor: str | None, predicting_s: float) -> list[PagingResult]:
        shared_s = self._scoring_s + predicting_s
        return [run.result(self._policy.name, predictor, shared_s) for run in self._runs]


class _Run:
    """The caches, link and clock of one capacity."""

    def __init__(
        self,
        steps: DecodeSteps,
        capacity: int,
        stall: StallModel,
        rule: PrefetchRule,
        horizon: int,
    ) -> None:
        self._steps, self._capacity, self._stall, self._rule = steps, capacity, stall, rule
        self._resident: list[dict[int, float]] = [{} for _ in range(steps.num_layers)]
        """Per layer: expert -> when it arrives or has arrived, microseconds."""
        self._aimed: list[set[int]] = [set() for _ in range(steps.num_layers)]
        """Per layer: experts prefetched for its next visit."""
        self._keys: list[list[float]] = [[0.0] * steps.num_experts] * steps.num_layers
        """Per layer: the keys of its last visit."""
        self._watched: list[list[tuple[int, int, int]]] = [[] for _ in range(steps.num_layers)]
        """Per layer: (expert, distance, bin of the chance) of absent experts predicted for it."""
        self._calibration = Calibration(max(horizon, 1))
        self._link = Link(stall)
        self._under_way: tuple[int, int] = (0, -1)
        """Layer and expert of the prefetch begun last."""
        self._now_us = 0.0
        self._tally = Tally()

    def step(
        self, needs: list[list[int]], keys: list[list[float]], forecast: _Forecast | None
    ) -> None:
        """Play one step."""
        for layer, need in enumerate(needs):
            self._keys[layer] = keys[layer]
            ready = self._serve(layer, need)
            if forecast is not None:
                self._prefetch(layer, ready, forecast)
            if ready > self._now_us:
                self._tally.stalls += 1
                self._tally.stall_us += ready - self._now_us
            self._now_us = ready + self._stall.compute_us_per_layer

    def result(self, policy: str, predictor: str | None, scoring_s: float) -> PagingResult:
        """What the run gave; ``scoring_s`` is shared by all capacities, choices are its own."""
        tally, steps = self._tally, self._steps
        return PagingResult(
            policy=policy,
            predictor=predictor,
            capacity=self._capacity,
            batch=steps.batch,
            num_steps=steps.num_steps,
            num_layers=steps.num_layers,
            num_tokens=steps.num_tokens,
            requests=tally.hits + tally.late + tally.misses,
            hits=tally.hits,
            late=tally.late,
            misses=tally.misses,
            prefetches=tally.prefetches,
            useful_prefetches=tally.useful,
            stalls=tally.stalls,
            stall_us=tally.stall_us,
            total_us=self._now_us,
            policy_s=scoring_s + tally.choosing_s,
        )

    def _serve(self, layer: int, need: list[int]) -> float:
        """Bring what the layer needs; returns when all of it is there."""
        resident, tally = self._resident[layer], self._tally
        ready, missing = self._now_us, []
        for expert in need:
            arrival = resident.get(expert)
            if arrival is None:
                missing.append(expert)
            elif arrival > self._now_us:
                tally.late += 1
                ready = max(ready, arrival)
            else:
                tally.hits += 1
        if watched := self._watched[layer]:
            for expert, ahead, place in watched:
                self._calibration.observe(ahead, place, expert in need)
            watched.clear()
        if aimed := self._aimed[layer]:
            tally.useful += len(aimed.intersection(need).difference(missing))
            aimed.clear()
        if not missing:
            return ready
        tally.misses += len(missing)
        arrival = self._demand(layer, need, len(missing))
        for expert in missing:
            resident[expert] = arrival
        self._evict(layer, need)
        return max(ready, arrival)

    def _demand(self, layer: int, need: list[int], count: int) -> float:
        """Fetch what the layer waits for, before a prefetch under way unless that is needed too."""
        aim, expert = self._under_way
        overtake = aim != layer or expert not in need
        arrival = self._link.demand(self._now_us, count, overtake=overtake)
        if overtake and self._link.free_at_us > arrival and expert in self._resident[aim]:
            self._resident[aim][expert] = self._link.free_at_us
        return arrival

    def _evict(self, layer: int, need: list[int]) -> None:
        """Drop the lowest keys, never what is needed unless that alone is more than fits."""
        resident = self._resident[layer]
        excess = len(resident) - self._capacity
        if excess <= 0:
            return
        start = time.thread_time()
        keys = self._keys[layer]
        pinned = set(need) if len(need) <= self._capacity else set()
        free = sorted((keys[expert], expert) for expert in resident if expert not in pinned)
        for _, expert in free[:excess]:
            del resident[expert]
        self._tally.choosing_s += time.thread_time() - start

    def _prefetch(self, layer: int, ready: float, forecast: _Forecast) -> None:
        """Begin what pays, likeliest first, while the link is free before the next layer starts."""
        start = time.thread_time()
        link, next_start = self._link, ready + self._stall.compute_us_per_layer
        options = self._options(layer, forecast)
        demands = sum(option.chance for option in options if option.ahead == 1)
        for option in options:
            if max(self._now_us, link.free_at_us) >= next_start:
                break
            chances = forecast.chances[option.ahead - 1][layer]
            demands -= self._consider(option, chances, next_start, demands)
        self._tally.choosing_s += time.thread_time() - start

    def _consider(
        self, option: _Option, chances: list[float], next_start: float, demands: float
    ) -> float:
        """Begin the prefetch if it pays; returns by how much fewer demands the next layer has."""
        compute_us = self._stall.compute_us_per_layer
        arrival = self._link.arrival_if_asked(self._now_us)
        victim = self._victim(option.layer)
        near = option.chance if option.ahead == 1 else 0.0
        gain_us = self._rule.gain_us(
            chance=option.chance,
            victim_chance=0.0 if victim is None else chances[victim],
            lateness_us=arrival - next_start - (option.ahead - 1) * compute_us,
            link_delay_us=min(1.0, demands - near)
            * min(max(0.0, arrival - next_start), self._link.part_us),
            transfer_us=self._stall.transfer_us,
        )
        if gain_us <= 0:
            return 0.0
        resident = self._resident[option.layer]
        if victim is not None:
            del resident[victim]
        resident[option.expert] = self._link.prefetch(self._now_us)
        self._under_way = (option.layer, option.expert)
        self._aimed[option.layer].add(option.expert)
        self._tally.prefetches += 1
        return near

    def _options(self, layer: int, forecast: _Forecast) -> list[_Option]:
        """Absent experts worth a thought, likeliest first, of all layers within the horizon."""
        options = []
        for ahead, by_layer in enumerate(forecast.candidates, start=1):
            target = (layer + ahead) % self._steps.num_layers
            resident, watched = self._resident[target], self._watched[target]
            chances = forecast.chances[ahead - 1][layer]
            places = forecast.bins[ahead - 1][layer]
            for expert, place in zip(by_layer[layer], places, strict=True):
                said = chances[expert]
                if said < _LEAST_CHANCE:
                    break
                if expert in resident:
                    continue
                watched.append((expert, ahead, place))
                chance = self._calibration.chance(ahead, place, said)
                options.append(_Option(chance, ahead, expert, target))
        options.sort(reverse=True)
        return options

    def _victim(self, layer: int) -> int | None:
        """Who would go for one more expert in the layer; None: there is room.

        The keys are those of the layer's last visit, and what was just prefetched for its next
        visit stays, unless nothing else is left.
        """
        resident, aimed = self._resident[layer], self._aimed[layer]
        if len(resident) < self._capacity:
            return None
        keys = self._keys[layer]
        return min(resident, key=lambda expert: (expert in aimed, keys[expert], expert))
