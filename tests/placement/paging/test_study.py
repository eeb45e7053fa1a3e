from pathlib import Path

import numpy as np
import pytest
from helpers_paging import trace_of

from moeserve_placement.paging import StudyOptions, run_study
from moeserve_placement.paging.reuse import MAX_EXPERTS as REUSE_LIMIT
from moeserve_placement.paging.study import default_policies
from moeserve_placement.traces import open_trace

REAL = Path(__file__).resolve().parents[4] / "shared/data/routing/gptoss20b_top4_decode.npz"


def small_trace(seed=0):
    rng = np.random.default_rng(seed)
    scores = rng.random((120, 3, 8)) * np.linspace(0.3, 1, 8)
    return trace_of(np.argsort(-scores, axis=2)[:, :, :2], 8, [30, 30, 30, 30])


def test_study_has_a_row_for_every_combination_and_ends_are_zero_and_one():
    options = StudyOptions(capacities=(3, 5), batches=(1, 2), horizon=1)
    calls = []
    rows = run_study(small_trace(), options, progress=lambda *args: calls.append(args))
    assert len(rows) == 2 * 2 * (6 + 4 + 3)
    for row in rows:
        if row.result.predictor is None and row.result.policy == "lru":
            assert (row.gap_closed, row.stall_us_ratio) == (0, 1)
        if row.result.policy == "belady":
            assert row.gap_closed == 1
        assert row.to_dict()["capacity"] == row.result.capacity
    labels = {label for label, _, _ in calls}
    for label in labels:
        done = [(done, total) for name, done, total in calls if name == label]
        assert done[-1][0] == done[-1][1]


def test_scored_sequences_do_not_change_what_was_learned_before_them():
    # The same study twice gives the same counts: nothing hangs on state left behind.
    options = StudyOptions(capacities=(4,), batches=(2,), horizon=1)
    first, second = (run_study(small_trace(), options) for _ in range(2))
    for one, other in zip(first, second, strict=True):
        assert one.result.hits == other.result.hits
        assert one.result.stall_us == other.result.stall_us


def test_no_gap_is_reported_where_every_expert_fits():
    rows = run_study(small_trace(), StudyOptions(capacities=(8,), batches=(1,), horizon=1))
    assert all(row.gap_closed is None for row in rows if not row.result.predictor)


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ({"capacities": ()}, "capacity"),
        ({"capacities": (0,)}, "capacity = 0"),
        ({"capacities": (1,), "batches": (0,)}, "batch = 0"),
        ({"capacities": (1,), "policies": ("mru",)}, "policy = 'mru'"),
        ({"capacities": (1,), "predictors": ("magic",)}, "predictor = 'magic'"),
        ({"capacities": (1,), "horizon": 0}, "horizon = 0"),
        ({"capacities": (1,), "train_share": 1.0}, "train_share = 1.0"),
    ],
)
def test_bad_settings_are_named(settings, text):
    with pytest.raises(ValueError, match=text):
        run_study(small_trace(), StudyOptions(**settings))


def test_reuse_is_a_default_only_where_it_can_run():
    assert "reuse" in default_policies(REUSE_LIMIT)
    assert "reuse" not in default_policies(REUSE_LIMIT + 1)


@pytest.mark.skipif(not REAL.exists(), reason=f"needs the recorded trace {REAL.name}")
def test_reuse_and_prefetch_beat_lru_on_a_recorded_trace():
    trace = open_trace(REAL).sequences([3, 4, 5, 6, 10, 12])
    options = StudyOptions(
        capacities=(16,),
        batches=(1,),
        policies=("reuse",),
        predictors=("none", "neighbours", "oracle"),
        shared_pool=False,
    )
    found = {row.result.name: row for row in run_study(trace, options)}
    assert found["reuse"].gap_closed > 0.2
    stalled = {name: row.stall_us_ratio for name, row in found.items()}
    assert stalled["reuse + oracle"] < stalled["reuse + neighbours"] < 0.8 * stalled["lru"]
    assert stalled["lru + neighbours"] < 0.8 * stalled["lru"]
