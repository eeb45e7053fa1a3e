"""What a study refuses or leaves out before it takes time and memory."""

from __future__ import annotations

import numpy as np
import pytest
from helpers_paging import trace_of

from moeserve_placement.paging import StallModel, StudyOptions, decode_steps, run_study
from moeserve_placement.paging.limits import MAX_BYTES, reason_against
from moeserve_placement.paging.steps import MAX_BATCH
from moeserve_placement.paging.study import PREDICTORS, left_out_predictors


def one_layer_trace():
    ids = np.argsort(np.random.default_rng(0).random((80, 1, 8)), axis=2)[:, :, :2]
    return trace_of(ids, 8, [20, 20, 20, 20])


def test_a_trace_with_one_layer_is_studied_without_prediction():
    trace = one_layer_trace()
    options = StudyOptions(capacities=(4,), batches=(1, 2))
    found = left_out_predictors(trace, options)
    assert set(found) == set(PREDICTORS) - {"none"}
    assert all("needs a next layer" in reason for reason in found.values())
    with pytest.raises(ValueError, match="predictor = 'count-tables': it needs a next layer"):
        run_study(trace, options)
    rows = run_study(trace, StudyOptions(capacities=(4,), batches=(1, 2), predictors=("none",)))
    assert {row.result.policy for row in rows} >= {"lru", "belady", "reuse", "layer-lru"}


def test_a_horizon_that_takes_too_much_memory_is_refused_in_words():
    sizes = {"num_layers": 64, "num_experts": 512, "lanes": 1}
    assert reason_against("count-tables", horizon=4, **sizes) is None
    reason = reason_against("count-tables", horizon=63, **sizes)
    assert reason.startswith("with horizon = 63, 64 layers and 512 experts it needs 16.")
    assert reason_against("count-tables", horizon=10**30, **sizes) == reason
    sizes["num_experts"] = 65536
    for name in set(PREDICTORS) - {"none"}:
        assert "choose a smaller horizon" in reason_against(name, horizon=63, **sizes)
    assert reason_against("none", horizon=63, **sizes) is None
    assert MAX_BYTES == 4 << 30


def test_a_recorded_model_is_well_within_the_limits():
    sizes = {"num_layers": 64, "num_experts": 256, "horizon": 4, "lanes": 64}
    assert all(reason_against(name, **sizes) is None for name in PREDICTORS)


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ({"batches": (10**8,)}, f"batch = 100000000: must be at most {MAX_BATCH}"),
        ({"capacities": (10**9,)}, "capacity = 1000000000: must be at most 65536"),
        ({"seed": -1}, "seed = -1: must be 0 or more"),
    ],
)
def test_sizes_out_of_range_are_named(settings, text):
    with pytest.raises(ValueError, match=text):
        StudyOptions(**({"capacities": (4,)} | settings))


def test_steps_check_the_batch_and_their_own_size():
    with pytest.raises(ValueError, match="batch = 100000000: must be in"):
        decode_steps(one_layer_trace(), batch=10**8)
    ids = np.zeros((40_000, 1, 1), dtype=np.uint8)
    with pytest.raises(ValueError, match="40,000 steps, 1 layers, 65536 experts need"):
        decode_steps(trace_of(ids, 65536, [40_000]))


def test_a_stall_model_takes_no_giant_number_of_parts():
    for parts in (10**400, 2**21):
        with pytest.raises(ValueError, match="parts_per_expert = "):
            StallModel(parts_per_expert=parts)
