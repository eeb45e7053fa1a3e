"""Statistics of a trace against brute force, exact values and what chance alone would give."""

from __future__ import annotations

import itertools
import json

import numpy as np
import pytest
from helpers_traces import count_traces, routing_traces
from hypothesis import given, settings
from hypothesis import strategies as st

from moeserve_placement.traces import CountTrace, RoutingTrace, TraceError
from moeserve_placement.traces.info import coactivation, describe, drift, gini, pair_counts

LOADS = st.lists(st.integers(0, 1000), min_size=1, max_size=12)


@settings(max_examples=40)
@given(load=LOADS)
def test_gini_is_the_mean_difference_over_twice_the_mean(load: list[int]) -> None:
    count, total = len(load), sum(load)
    pairs = sum(abs(a - b) for a in load for b in load)
    expected = pairs / (2 * count * total) if total else 0.0
    assert gini(np.array(load)) == pytest.approx(expected, abs=1e-9)


@settings(max_examples=40)
@given(trace=routing_traces(max_experts=12))
def test_pairs_equal_those_of_a_plain_loop(trace: RoutingTrace) -> None:
    expected = np.zeros((trace.num_experts,) * 2, int)
    for token in trace.topk_ids[:, 0].tolist():
        for first, second in itertools.permutations(token, 2):
            expected[first, second] += 1
    np.testing.assert_array_equal(pair_counts(trace.topk_ids[:, 0], trace.num_experts), expected)


@settings(max_examples=40)
@given(trace=routing_traces(), window=st.integers(1, 9))
def test_a_routing_trace_and_its_counts_have_equal_loads(trace: RoutingTrace, window: int) -> None:
    found = describe(trace, window_tokens=window)
    json.dumps(found.to_dict(), allow_nan=False)
    counts = CountTrace(counts=trace.counts()[None], layer_ids=trace.layer_ids)
    summed = describe(counts, top=trace.top_k)
    for left, right, load in zip(found.layers, summed.layers, trace.counts(), strict=True):
        assert (left.layer, left.imbalance, left.gini) == (right.layer, right.imbalance, right.gini)
        assert left.imbalance == pytest.approx(load.max() * load.size / load.sum())
        assert left.cv == pytest.approx(np.std(load) / np.mean(load))
        expected = sum(sorted(load.tolist())[-trace.top_k :]) / load.sum()
        assert left.top_share == right.top_share == pytest.approx(expected)


@settings(max_examples=40)
@given(trace=count_traces())
def test_any_counts_can_be_described(trace: CountTrace) -> None:
    text = json.dumps(describe(trace).to_dict(), allow_nan=False)
    for layer in json.loads(text)["layers"]:
        assert layer["imbalance"] >= 1 and 0 <= layer["gini"] < 1 and layer["coactivation"] is None
        assert layer["drift"] is None or 0 <= layer["drift"] <= 1


def test_the_largest_counts_are_summed_without_a_wrap() -> None:
    counts = np.array([[[2**61, 0]], [[2**60, 2**60]]])
    tokens = np.array([2**61, 2**61])
    found = describe(CountTrace(counts=counts, layer_ids=(0,), tokens_per_window=tokens), top=1)
    assert found.num_tokens == 2**62
    layer = found.layers[0]
    assert (layer.imbalance, layer.top_share) == pytest.approx((1.5, 0.75))


def test_disjoint_windows_drift_by_one_and_equal_ones_by_zero() -> None:
    found = drift(np.array([[5, 5, 0, 0], [0, 0, 8, 2], [0, 0, 4, 1]]))
    assert found is not None
    assert found[0] == pytest.approx(0.5)  # 1 for the first pair, 0 for the second
    assert drift(np.array([[1, 2], [0, 0]])) is None


def test_steady_load_drifts_by_its_stated_noise() -> None:
    rng = np.random.default_rng(0)
    shares = rng.dirichlet(np.ones(64))
    found = drift(rng.multinomial(4000, shares, size=200))
    assert found is not None
    assert found[0] == pytest.approx(found[1], rel=0.05)


def test_independent_pairs_coactivate_by_their_stated_noise() -> None:
    rng = np.random.default_rng(0)
    weight = rng.dirichlet(np.ones(32) * 2)
    pair = np.outer(weight, weight)
    np.fill_diagonal(pair, 0)
    flat = rng.choice(32 * 32, size=20_000, p=(pair / pair.sum()).ravel())
    found, noise = coactivation(pair_counts(np.stack([flat // 32, flat % 32], axis=1), 32))
    assert found == pytest.approx(noise, rel=0.1)


def test_fixed_partners_are_seen_as_coactivation() -> None:
    first = np.random.default_rng(0).integers(0, 16, 4000) * 2
    found, noise = coactivation(pair_counts(np.stack([first, first + 1], axis=1), 32))
    # Each expert has one partner instead of 31: all but 1 / 31 of the pairs are where they would
    # not be by chance.
    assert found == pytest.approx(1 - 1 / 31, abs=0.01)
    assert noise < 0.2


def test_a_top_outside_the_experts_is_refused() -> None:
    trace = CountTrace(counts=np.ones((1, 1, 4), int), layer_ids=(0,))
    for top in (0, 5):
        with pytest.raises(TraceError, match="top = "):
            describe(trace, top=top)
