import dataclasses

import numpy as np
import pytest
from helpers_paging import requests_of, steps_of, trace_of, traces
from hypothesis import given, settings
from hypothesis import strategies as st

from moeserve_placement.paging import (
    Belady,
    PrefetchRule,
    StallModel,
    decode_steps,
    shared_pool,
    simulate,
    split_sequences,
)
from moeserve_placement.paging.policies import Lru
from moeserve_placement.paging.shared_pool import simulate_pool
from moeserve_placement.paging.stall import Link

MODEL = StallModel(
    bytes_per_expert=1e6, bandwidth_gb_per_s=10, parts_per_expert=1, compute_us_per_layer=60
)
"""An expert takes 100 us on the link, a layer computes for 60 us."""


class Told:
    """Predicts with certainty: the given experts for the layer one step ahead of each layer."""

    name = "told"
    horizon = 1

    def __init__(self, told, num_layers, num_experts):
        self._told, self._shape, self._step = told, (1, num_layers, num_experts), -1

    def observe(self, topk_ids, lanes, is_first):
        self._step += 1
        chances = np.zeros(self._shape)
        for layer, experts in enumerate(self._told[self._step]):
            chances[0, layer, experts] = 1.0
        return chances


def lru(steps):
    return Lru(steps.num_layers, steps.num_experts)


def test_transfer_time_is_bytes_over_bandwidth():
    assert MODEL.transfer_us == pytest.approx(100)


def test_demand_waits_for_the_part_under_way_and_the_prefetch_for_the_demand():
    link = Link(StallModel(bytes_per_expert=1e6, bandwidth_gb_per_s=10, parts_per_expert=4))
    assert link.prefetch(0.0) == 100
    # At 30 the second of four parts is on the way: it ends at 50, two experts take 200 more.
    assert link.demand(30.0, 2, overtake=True) == pytest.approx(250)
    assert link.free_at_us == pytest.approx(300)
    # The rest is two parts; the first has just ended at 275 and the second waits.
    assert link.demand(275.0, 1, overtake=True) == pytest.approx(375)
    assert link.free_at_us == pytest.approx(400)
    assert link.demand(380.0, 1, overtake=False) == pytest.approx(500)
    assert link.free_at_us == pytest.approx(500)


def test_demand_waits_for_a_whole_prefetch_that_can_not_be_paused():
    link = Link(MODEL)
    link.prefetch(0.0)
    assert link.demand(30.0, 1, overtake=True) == pytest.approx(200)
    assert link.free_at_us == pytest.approx(200)


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 9), st.floats(0, 99), st.integers(1, 4))
def test_link_never_loses_or_gains_work(parts, now, count):
    link = Link(StallModel(bytes_per_expert=1e6, bandwidth_gb_per_s=10, parts_per_expert=parts))
    link.prefetch(0.0)
    arrival = link.demand(now, count, overtake=True)
    assert link.free_at_us == pytest.approx(100 * (1 + count))
    assert now + 100 * count - 1e-6 <= arrival <= now + 100 * count + 100 / parts + 1e-6


def test_stalls_without_prefetch_are_misses_times_transfer_time():
    steps = steps_of([[0, 1], [1, 2], [0, 1]], 3)
    [[result]] = simulate(steps, [lru(steps)], capacities=[2], stall=MODEL)
    # Misses: 0 and 1; then 2, throwing out 0; then 0.
    assert (result.hits, result.misses, result.stalls) == (2, 4, 3)
    assert result.stall_us == pytest.approx(400)
    assert result.total_us == pytest.approx(400 + 3 * 60)


def test_late_prefetch_stalls_for_the_rest_by_hand():
    # Two layers, two tokens. Token 0 needs expert 0 in both layers, token 1 needs 1 in both.
    steps = decode_steps(trace_of([[[0], [0]], [[1], [1]]], 2))
    told = [[[0], [1]], [[1], []]]
    [[result]] = simulate(
        steps,
        [lru(steps)],
        capacities=[2],
        stall=MODEL,
        predictor=Told(told, 2, 2),
        rule=PrefetchRule(pollution=0),
    )
    # t=0    layer 0 asks for 0 (arrives 100); prefetch of 0 for layer 1 arrives at 200. Stall 100.
    # t=160  layer 1 needs 0: 40 late. Prefetch of 1 for the next token's layer 0 arrives at 300.
    # t=260  layer 0 needs 1: 40 late. Prefetch of 1 for layer 1 arrives at 400.
    # t=360  layer 1 needs 1: 40 late; ends at 460.
    assert (result.hits, result.late, result.misses) == (0, 3, 1)
    assert (result.prefetches, result.useful_prefetches) == (3, 3)
    assert result.stalls == 4
    assert result.stall_us == pytest.approx(100 + 3 * 40)
    assert result.total_us == pytest.approx(460)
    assert result.precision == 1.0
    assert result.coverage == 0.75


def test_useless_prefetch_is_counted_and_delays_the_next_miss():
    steps = decode_steps(trace_of([[[0], [0]]], 3))
    told = [[[2], []]]
    [[result]] = simulate(
        steps, [lru(steps)], capacities=[2], stall=MODEL, predictor=Told(told, 2, 3)
    )
    # t=0 asks for 0 (100), prefetches 2 (200). t=160: layer 1 asks for 0, behind: arrives at 300.
    assert (result.prefetches, result.useful_prefetches, result.misses) == (1, 0, 2)
    assert result.stall_us == pytest.approx(100 + 140)


def play_two_layers(told, *, parts):
    """One token that needs expert 0 in layer 0 and 1 in layer 1; ``told`` is said of layer 1."""
    steps = decode_steps(trace_of([[[0], [1]]], 6))
    model = dataclasses.replace(MODEL, parts_per_expert=parts)
    predictor = Told([[told, []]], 2, 6)
    [[result]] = simulate(steps, [lru(steps)], capacities=[6], stall=model, predictor=predictor)
    return result


def test_demand_overtakes_a_prefetch_after_the_part_under_way():
    # t=0 fetches 0 (100), prefetches 2 in parts of 25. t=160: layer 1 needs 1, a part ends at 175.
    result = play_two_layers([2], parts=4)
    assert result.stall_us == pytest.approx(100 + 115)


@pytest.mark.parametrize(("parts", "delay_us"), [(1, 40), (4, 15)])
def test_prefetches_that_have_not_begun_delay_nothing_and_are_not_counted(parts, delay_us):
    # As before, but 5, 4 and 3 are foretold as well: only the first begins before t=160.
    result = play_two_layers([2, 3, 4, 5], parts=parts)
    assert (result.prefetches, result.useful_prefetches, result.misses) == (1, 0, 2)
    assert result.stall_us == pytest.approx(100 + 100 + delay_us)


@pytest.mark.parametrize(("parts", "delay_us"), [(1, 40), (4, 15)])
def test_a_needed_expert_whose_prefetch_waits_is_fetched_next(parts, delay_us):
    # 2 goes first, 1 waits behind it when layer 1 starts at t=160.
    result = play_two_layers([1, 2], parts=parts)
    assert (result.prefetches, result.useful_prefetches, result.misses) == (1, 0, 2)
    assert result.stall_us == pytest.approx(100 + 100 + delay_us)


def test_prefetch_is_not_issued_where_it_does_not_pay():
    rule = PrefetchRule(pollution=0.1)
    terms = {"victim_chance": 0.0, "lateness_us": -1, "link_delay_us": 0, "transfer_us": 100.0}
    assert rule.gain_us(chance=0.5, **terms) == pytest.approx(50 - 5)
    assert rule.gain_us(chance=0.05, **terms) < 0
    assert rule.gain_us(chance=0.5, **{**terms, "victim_chance": 0.6}) < 0
    assert rule.gain_us(chance=0.5, **{**terms, "lateness_us": 95.0}) < 0
    assert rule.gain_us(chance=0.5, **{**terms, "link_delay_us": 46.0}) < 0


@settings(max_examples=40, deadline=None)
@given(traces(max_layers=3), st.integers(1, 3), st.integers(1, 5), st.integers(0, 2**31))
def test_counts_add_up_whatever_the_predictor_says(trace, batch, capacity, seed):
    steps = decode_steps(trace, batch=batch)
    rng = np.random.default_rng(seed)

    class Guess:
        name, horizon = "guess", 1

        def observe(self, topk_ids, lanes, is_first):
            return rng.random((1, steps.num_layers, steps.num_experts))

    [[result]] = simulate(
        steps, [lru(steps)], capacities=[capacity], stall=MODEL, predictor=Guess()
    )
    assert result.requests == int(steps.used.sum())
    assert result.requests == result.hits + result.late + result.misses
    assert 0 <= result.useful_prefetches <= result.prefetches
    busy = result.num_steps * result.num_layers * MODEL.compute_us_per_layer
    assert result.total_us == pytest.approx(busy + result.stall_us)
    assert result.stalls <= result.num_steps * result.num_layers


def test_a_step_that_needs_more_than_fits_misses_but_runs():
    steps = steps_of([[0, 1, 2], [0, 1, 2]], 3)
    [[result]] = simulate(steps, [lru(steps)], capacities=[2])
    assert (result.hits, result.misses) == (2, 4)


@pytest.mark.parametrize("capacity", [0, -1])
def test_capacity_below_one_is_refused(capacity):
    steps = steps_of([[0]], 1)
    with pytest.raises(ValueError, match=f"capacity = {capacity}"):
        simulate(steps, [lru(steps)], capacities=[capacity])
    with pytest.raises(ValueError, match=f"capacity = {capacity}"):
        simulate_pool(steps, "lru", capacities=[capacity])


@pytest.mark.parametrize(
    "setting",
    ["bytes_per_expert", "bandwidth_gb_per_s", "parts_per_expert", "compute_us_per_layer"],
)
@pytest.mark.parametrize("value", [-1.0, float("nan"), float("inf")])
def test_stall_model_names_the_setting_at_fault(setting, value):
    with pytest.raises(ValueError, match=setting):
        StallModel(**{setting: value})


@settings(max_examples=40, deadline=None)
@given(traces(), st.integers(1, 4))
def test_steps_keep_every_token_once_and_sequences_in_order(trace, batch):
    steps = decode_steps(trace, batch=batch)
    assert steps.num_tokens == trace.num_tokens
    assert int(steps.is_first.sum()) == trace.num_sequences
    seen = np.sort(steps.topk_ids.reshape(steps.num_tokens, -1), axis=0)
    assert np.array_equal(seen, np.sort(trace.topk_ids.reshape(steps.num_tokens, -1), axis=0))
    for step in range(steps.num_steps):
        lanes = steps.lanes[steps.tokens(step)]
        assert 1 <= len(lanes) <= batch and len(set(lanes.tolist())) == len(lanes)
        for layer in range(steps.num_layers):
            chosen = set(steps.topk_ids[steps.tokens(step), layer].ravel().tolist())
            assert set(requests_of(steps, layer)[step]) == chosen


@settings(max_examples=40, deadline=None)
@given(st.integers(2, 9), st.floats(0.05, 0.95), st.integers(0, 99))
def test_training_and_scored_sequences_are_disjoint_and_complete(number, share, seed):
    trace = trace_of([[[n]] for n in range(number)], number, [1] * number)
    training, scored = split_sequences(trace, train_share=share, seed=seed)
    both = np.concatenate([training.topk_ids, scored.topk_ids]).ravel()
    assert sorted(both.tolist()) == list(range(number))
    assert training.num_sequences and scored.num_sequences


@settings(max_examples=30, deadline=None)
@given(traces(max_tokens=15, max_experts=4), st.integers(1, 4))
def test_pool_bound_is_above_per_layer_bound_and_both_lrus(trace, capacity):
    steps = decode_steps(trace)
    bound = simulate_pool(steps, "belady", capacities=[capacity])[0].hits
    for policy in ("lru", "layer-lru"):
        assert simulate_pool(steps, policy, capacities=[capacity])[0].hits <= bound
    # A pool can always act as one cache per layer.
    if capacity >= steps.top_k:
        assert simulate(steps, [Belady(steps)], capacities=[capacity])[0][0].hits <= bound


def test_layer_aware_lru_keeps_what_the_next_layer_needs():
    # Four layers in a cycle, one expert each, three slots for four: LRU always evicts the next.
    steps = decode_steps(trace_of([[[0], [0], [0], [0]]] * 20, 2))

    # A whole number per layer would hold all or nothing of interest, so the slots are set by hand.
    def hits(policy):
        pool = shared_pool._Pool(steps, 1)
        pool._num_slots = 3
        rank = {"lru": shared_pool._lru, "layer": shared_pool._layer_lru}[policy](steps)
        for step in range(steps.num_steps):
            for layer in range(steps.num_layers):
                pool.visit(layer, steps.used[step, layer], rank(step, layer))
        return pool._tally.hits

    assert hits("lru") == 0
    assert hits("layer") >= 19 * 2
