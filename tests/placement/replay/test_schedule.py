"""Windows of a replay: what is scored, in what order, and what is refused."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from helpers_replay import domain_trace
from helpers_traces import routing_traces
from hypothesis import given
from hypothesis import strategies as st

from moeserve_placement.placement import PlacementError
from moeserve_placement.replay.schedule import all_windows, make_schedule
from moeserve_placement.replay.settings import SEEDED_ORDERS, ReplaySettings, check_seeds
from moeserve_placement.traces import CountTrace, RoutingTrace


def settings(**given: object) -> ReplaySettings:
    return ReplaySettings(**({"batch_sizes": (16,), "window": 32} | given))  # type: ignore[arg-type]


def test_windows_are_consecutive_and_a_shorter_rest_is_left_out() -> None:
    trace = domain_trace(sequences=3)  # 96 tokens
    schedule = make_schedule(trace, settings(window=40, batch_sizes=(20,)))
    assert [len(w.topk_ids) for w in schedule.windows if w.topk_ids is not None] == [40, 40]
    np.testing.assert_array_equal(schedule.windows[1].counts, trace.counts(40, 80))
    assert schedule.num_warmup == 1 and len(schedule.scored) == 1


def test_batches_of_a_window_add_up_to_it() -> None:
    window = make_schedule(domain_trace(), settings()).windows[0]
    assert window.batches(8).shape == (4, 2, 8)
    np.testing.assert_array_equal(window.batches(8).sum(0), window.counts)


@given(routing_traces(), st.integers(1, 9))
def test_all_windows_hold_every_token_once(trace: RoutingTrace, size: int) -> None:
    windows = all_windows(trace, size)
    np.testing.assert_array_equal(sum(w.counts for w in windows), trace.counts())
    owners = np.concatenate([w.sequences for w in windows if w.sequences is not None])
    np.testing.assert_array_equal(np.bincount(owners), trace.sequence_lengths)


@pytest.mark.parametrize("order", ["shuffle", "domains", "drift"])
def test_orders_keep_every_token_and_follow_the_seed(order: str) -> None:
    trace = domain_trace()

    def played(seed: int) -> np.ndarray:
        schedule = make_schedule(trace, settings(order=order, seed=seed))
        return np.concatenate([w.topk_ids for w in schedule.windows if w.topk_ids is not None])

    first, again, other = played(1), played(1), played(2)
    np.testing.assert_array_equal(first, again)
    assert not np.array_equal(first, other)
    as_rows = [np.sort(ids.reshape(len(ids), -1), axis=0) for ids in (first, trace.topk_ids)]
    np.testing.assert_array_equal(*as_rows)


def test_domains_come_one_after_the_other() -> None:
    schedule = make_schedule(domain_trace(), settings(order="domains", seed=3))
    labels = [w.label for w in schedule.windows]
    assert sum(a != b for a, b in itertools.pairwise(labels)) == 1


def test_arrival_orders_sequences_by_time() -> None:
    trace = domain_trace()  # stored in reverse order of arrival
    schedule = make_schedule(trace, settings(order="arrival"))
    assert schedule.windows[0].label == "right"
    assert schedule.windows[0].topk_ids is not None
    np.testing.assert_array_equal(schedule.windows[0].topk_ids[:16], trace.topk_ids[-16:])


def test_holdout_plans_on_first_halves_and_scores_second_halves() -> None:
    trace = domain_trace(sequences=8, length=16)  # 128 tokens a domain
    schedule = make_schedule(trace, settings(order="holdout"))
    labels = [w.label for w in schedule.windows]
    assert labels == ["left", "right"] * 2 + ["left"] * 2 + ["right"] * 2
    assert schedule.num_warmup == 4
    planned = sum(w.counts for w in schedule.windows[:4])
    np.testing.assert_array_equal(planned, trace.counts(0, 64) + trace.counts(128, 192))
    tested = sum(w.counts for w in schedule.scored)
    np.testing.assert_array_equal(tested, trace.counts(64, 128) + trace.counts(192, 256))


def test_a_domain_left_out_is_scored_but_not_planned_on() -> None:
    schedule = make_schedule(domain_trace(), settings(order="holdout", leave_out="right"))
    assert {w.label for w in schedule.windows[: schedule.num_warmup]} == {"left"}
    assert {w.label for w in schedule.scored} == {"left", "right"}


def test_domains_too_small_for_a_window_are_pooled() -> None:
    trace = domain_trace(domains=("a", "b", "c", "d"), sequences=2)
    schedule = make_schedule(trace, settings(order="holdout"))
    assert {w.label for w in schedule.windows} == {"other"}


def test_a_trace_of_counts_is_played_window_by_window() -> None:
    counts = np.arange(24).reshape(3, 2, 4)
    schedule = make_schedule(CountTrace(counts=counts, layer_ids=(0, 1)), settings())
    assert len(schedule.scored) == 2 and schedule.scored[0].topk_ids is None
    np.testing.assert_array_equal(schedule.scored[0].batches(16), counts[1][None])


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"batch_sizes": (0,)}, "batch"),
        ({"batch_sizes": (24,)}, "batch = 24: must divide the window, 32"),
        ({"window": 0}, "window = 0"),
        ({"interval": -1}, "interval = -1"),
        ({"warmup": 0}, "warmup = 0"),
        ({"order": "random"}, "order = 'random': must be one of"),
        ({"start": "cold"}, "start = 'cold'"),
        ({"leave_out": "x"}, "leave_out = 'x': goes with order = 'holdout'"),
    ],
)
def test_wrong_settings_name_the_setting(given: dict[str, object], words: str) -> None:
    with pytest.raises(PlacementError, match=words):
        settings(**given)


def test_a_trace_that_does_not_fit_the_settings_is_refused_with_numbers() -> None:
    trace = domain_trace(sequences=1)  # 32 tokens
    with pytest.raises(PlacementError, match=r"32 tokens give 1 windows .* at least 2"):
        make_schedule(trace, settings())
    with pytest.raises(PlacementError, match="leave_out = 'nobody': must be one of left, right"):
        make_schedule(domain_trace(), settings(order="holdout", leave_out="nobody"))
    counts = CountTrace(counts=np.ones((1, 1, 2), dtype=np.int64), layer_ids=(0,))
    with pytest.raises(PlacementError, match="has 1 windows of counts, must have at least 2"):
        make_schedule(counts, settings())
    with pytest.raises(PlacementError, match="a trace of counts has no sequences"):
        make_schedule(counts, settings(order="shuffle"))


def test_windows_have_2048_tokens_or_the_next_multiple_of_the_largest_batch() -> None:
    sizes = {(16,): 2048, (16, 2048): 2048, (1000,): 3000, (16384,): 16384, (256, 16384): 16384}
    for batches, window in sizes.items():
        assert ReplaySettings(batch_sizes=batches).window_tokens == window


def test_several_seeds_need_an_order_that_they_change() -> None:
    for order in SEEDED_ORDERS:
        check_seeds((0, 1), order)
    with pytest.raises(PlacementError, match="order = 'recorded' is the same for every seed"):
        check_seeds((0, 1), "recorded")
    with pytest.raises(PlacementError, match="seeds"):
        check_seeds((1, 1), "shuffle")
