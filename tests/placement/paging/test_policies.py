import numpy as np
import pytest
from helpers_paging import (
    most_hits,
    reference_lfu_hits,
    reference_lru_hits,
    requests_of,
    steps_of,
    trace_of,
    traces,
)
from hypothesis import given, settings
from hypothesis import strategies as st

from moeserve_placement.paging import Belady, decode_steps, simulate
from moeserve_placement.paging.policies import FastSlow, Lfu, Lru, Random
from moeserve_placement.paging.reuse import MAX_EXPERTS, LinearReuse

BATCHES = st.integers(1, 3)


def hits(steps, policy, *capacities):
    return [result.hits for result in simulate(steps, [policy], capacities=capacities)[0]]


def lru(steps):
    return Lru(steps.num_layers, steps.num_experts)


def every_policy(steps):
    prior = steps.used.mean(axis=0)
    return [
        Random(seed=1),
        lru(steps),
        Lfu(steps.num_layers, steps.num_experts),
        FastSlow(prior),
        LinearReuse(steps, refit_every=4),
    ]


@settings(max_examples=60, deadline=None)
@given(traces(max_tokens=15, max_experts=5), BATCHES, st.integers(1, 4))
def test_belady_finds_the_most_hits_that_exist(trace, batch, capacity):
    steps = decode_steps(trace, batch=batch)
    best = sum(most_hits(requests_of(steps, layer), capacity) for layer in range(steps.num_layers))
    assert hits(steps, Belady(steps), capacity) == [best]


@settings(max_examples=60, deadline=None)
@given(traces(), BATCHES, st.integers(1, 7))
def test_lru_and_lfu_match_plain_caches(trace, batch, capacity):
    steps = decode_steps(trace, batch=batch)
    layers = [requests_of(steps, layer) for layer in range(steps.num_layers)]
    assert hits(steps, lru(steps), capacity) == [
        sum(reference_lru_hits(requests, capacity) for requests in layers)
    ]
    assert hits(steps, Lfu(steps.num_layers, steps.num_experts), capacity) == [
        sum(reference_lfu_hits(requests, capacity) for requests in layers)
    ]


@settings(max_examples=30, deadline=None)
@given(traces(), BATCHES, st.integers(1, 6))
def test_no_policy_beats_belady(trace, batch, capacity):
    steps = decode_steps(trace, batch=batch)
    bound = hits(steps, Belady(steps), capacity)[0]
    for policy in every_policy(steps):
        assert hits(steps, policy, capacity)[0] <= bound, policy.name


@settings(max_examples=30, deadline=None)
@given(traces(), BATCHES)
def test_more_capacity_never_costs_lru_or_belady_a_hit(trace, batch):
    steps = decode_steps(trace, batch=batch)
    found = hits(steps, lru(steps), *range(1, steps.num_experts + 2))
    assert found == sorted(found)
    # Below, a step does not fit and nothing is pinned: another game, which may even be won higher.
    fits = int(steps.used.sum(axis=2).max())
    found = hits(steps, Belady(steps), *range(fits, steps.num_experts + 2))
    assert found == sorted(found)


@settings(max_examples=30, deadline=None)
@given(traces(), BATCHES)
def test_a_cache_for_all_experts_misses_each_once(trace, batch):
    steps = decode_steps(trace, batch=batch)
    for policy in every_policy(steps):
        [[result]] = simulate(steps, [policy], capacities=[steps.num_experts])
        assert result.misses == int(steps.used.any(axis=0).sum())


def test_keys_of_a_layer_do_not_depend_on_later_layers():
    rng = np.random.default_rng(0)
    ids = np.argsort(rng.random((40, 4, 6)), axis=2)[:, :, :2]
    steps = decode_steps(trace_of(ids, 6))
    changed = steps.used[-1].copy()
    changed[2:] = ~changed[2:]
    for first, second in zip(every_policy(steps), every_policy(steps), strict=True):
        for used in steps.used[:-1]:
            first.observe(used)
            second.observe(used)
        before = np.array(first.observe(steps.used[-1]))
        after = np.array(second.observe(changed))
        assert np.array_equal(before[:2], after[:2]), first.name


def test_reuse_regression_learns_a_cycle_that_lru_always_misses():
    cycle = steps_of([[token % 5] for token in range(600)], 5)
    assert hits(cycle, lru(cycle), 4) == [0]
    learned, best = hits(cycle, LinearReuse(cycle), 4)[0], hits(cycle, Belady(cycle), 4)[0]
    assert learned >= 0.9 * best > 0


def test_reuse_regression_refuses_too_many_experts_by_name():
    steps = steps_of([[0], [1]], MAX_EXPERTS + 1)
    with pytest.raises(ValueError, match=f"at most {MAX_EXPERTS} experts"):
        LinearReuse(steps)
