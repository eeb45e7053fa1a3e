"""Load history: what counts as a scenario, and what is refused."""

from __future__ import annotations

import numpy as np
import pytest
from helpers_placement import histories, zipf
from hypothesis import given
from hypothesis import strategies as st

from moeserve_placement.load import LoadHistory


@given(st.integers(1, 6).flatmap(histories))
def test_scenarios_are_distributions(history: LoadHistory) -> None:
    if history.is_empty:
        with pytest.raises(ValueError, match="observe a window with load first"):
            history.scenarios()
        return
    scenarios = history.scenarios()
    assert (scenarios.loads >= 0).all()
    np.testing.assert_allclose(scenarios.loads.sum(-1), 1.0)
    assert scenarios.weights.sum() == pytest.approx(1.0)
    assert len(scenarios.names) == len(scenarios.loads) == len(scenarios.weights)


@pytest.mark.parametrize(
    ("counts", "text"),
    [
        ([[1.0, np.nan]], "NaN or infinite"),
        ([[1.0, np.inf]], "NaN or infinite"),
        ([[1, -1]], "must be 0 or more"),
        ([[1, 2, 3]], "shape"),
        ([["1", "2"]], "dtype"),
        ([[2.0**62, 2.0**62]], "at most 2"),
    ],
)
def test_windows_that_are_not_counts_are_refused(counts: list[list[object]], text: str) -> None:
    history = LoadHistory([0], 2)
    with pytest.raises(ValueError, match=text):
        history.observe(np.array(counts))
    assert history.is_empty


def test_averages_start_as_plain_means() -> None:
    history = LoadHistory([0], 2, slow_weight=0.01)
    history.observe(np.array([[1, 3]]))
    np.testing.assert_allclose(history.slow, [[1, 3]])
    np.testing.assert_allclose(history.fast, [[1, 3]])
    history.observe(np.array([[3, 1]]))
    np.testing.assert_allclose(history.slow, [[2, 2]], atol=0.01)
    np.testing.assert_allclose(history.mean, [[2, 2]])


def test_samples_of_one_distribution_are_one_kind() -> None:
    rng = np.random.default_rng(0)
    history = LoadHistory([0], 64)
    for _ in range(12):
        history.observe(rng.multinomial(2000, zipf(64, 1.0, 1, 0)[0])[None])
    assert sum(name.startswith("past") for name in history.scenarios().names) == 1


def test_kinds_that_alternate_are_all_kept() -> None:
    kinds = [1e4 * zipf(32, 1.0, 2, seed) for seed in range(3)]
    history = LoadHistory([0, 1], 32)
    for turn in range(12):
        history.observe(kinds[turn % 3])
    scenarios = history.scenarios()
    past = scenarios.loads[[name.startswith("past") for name in scenarios.names]]
    assert len(past) == 3
    for kind in kinds:
        share = kind / kind.sum(1, keepdims=True)
        assert np.abs(past - share).sum(-1).mean(-1).min() < 0.05


def test_windows_that_never_return_are_not_planned_for() -> None:
    rng = np.random.default_rng(0)
    state = rng.normal(0, 1, (2, 64))
    history = LoadHistory([0, 1], 64)
    for _ in range(20):
        history.observe(1e4 * np.exp(state))
        state = 0.97 * state + np.sqrt(1 - 0.97**2) * rng.normal(0, 1, state.shape)
    assert not history.kinds_return
    assert "fast" in history.scenarios().names


def test_a_sparse_window_is_pulled_to_the_slow_average() -> None:
    history = LoadHistory([0], 4, prior_tokens=10.0)
    for _ in range(3):
        history.observe(np.array([[1000, 1000, 1000, 1000]]))
    few, many = history.shrunk(np.array([[[2.0, 0, 0, 0]], [[2e6, 0, 0, 0]]]))[:, 0]
    assert few.max() < 0.3
    assert many.max() > 0.99


def test_pairs_are_held_against_the_windows_they_came_with() -> None:
    """Windows without pairs change the averages, not how many pairs a token is known to make."""
    history = LoadHistory([0], 3, slow_weight=0.5)
    assert not history.has_coactivation and history.coactivation_load is None
    load = np.array([[4.0, 4.0, 8.0]])
    pairs = np.array([[[0.0, 4, 4], [4, 0, 4], [4, 4, 0]]])
    history.observe(load, pairs)
    for _ in range(5):
        history.observe(load * 100)
    assert history.has_coactivation
    np.testing.assert_allclose(history.coactivation_load, load)
    np.testing.assert_allclose(history.coactivation, pairs)
    history.observe(load * 3, pairs * 3)
    found, together = history.coactivation_load, history.coactivation
    assert found is not None and together is not None
    np.testing.assert_allclose(together / found.sum(), pairs / load.sum())


@pytest.mark.parametrize("layers", [[0, 0], [-1], [], [1.5], ["0"]])
def test_layers_that_are_no_model_layers_are_refused(layers: list[int]) -> None:
    with pytest.raises(ValueError, match="layer_ids"):
        LoadHistory(layers, 2)


@pytest.mark.parametrize(
    "options",
    [
        {"fast_weight": 0},
        {"fast_weight": float("nan")},
        {"slow_weight": 2},
        {"window": 0},
        {"window": 2.5},
        {"reservoir_size": -1},
        {"novelty": -1},
        {"novelty": float("nan")},
        {"prior_tokens": float("nan")},
        {"prior_tokens": float("inf")},
    ],
)
def test_options_out_of_range_are_refused(options: dict[str, float]) -> None:
    with pytest.raises(ValueError, match=next(iter(options))):
        LoadHistory([0], 2, **options)
