"""The figures of merit against plain-Python formulas and hand-made examples."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from moeserve_placement.replay.metrics import balance
from moeserve_placement.replay.score import Levels


def test_the_two_balancednesses_are_the_published_formulas_and_differ() -> None:
    """Two layers: loads 10 10 (perfect) and 30 10, mean 20; one batch."""
    levels = Levels(peak=np.array([[10.0, 30.0]]), mean=np.array([[10.0, 20.0]]))
    found = balance(levels, (4, 9))
    sglang = ((10 + 1e-5) / (10 + 1e-5) + (20 + 1e-5) / (30 + 1e-5)) / 2
    assert found.balancedness_sglang == pytest.approx(sglang)
    assert found.balancedness_vllm == pytest.approx((10 + 20) / (10 + 30))
    assert found.mean == pytest.approx((1.0 + 1.5) / 2)
    assert (found.worst_layer, found.worst_layer_mean) == (9, 1.5)
    assert found.time_lost == pytest.approx(10 / 30)


def test_batches_without_load_are_perfectly_balanced() -> None:
    found = balance(Levels(peak=np.zeros((3, 2)), mean=np.zeros((3, 2))), (0, 1))
    assert (found.mean, found.max, found.time_lost) == (1.0, 1.0, 0.0)
    assert (found.balancedness_sglang, found.balancedness_vllm) == (1.0, 1.0)


@given(st.integers(1, 9), st.integers(1, 4), st.integers(0, 2**32 - 1))
def test_statistics_agree_with_plain_python(batches: int, layers: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    mean = rng.integers(1, 50, (batches, layers)).astype(float)
    peak = mean * (1 + rng.random((batches, layers)))
    found = balance(Levels(peak=peak, mean=mean), tuple(range(10, 10 + layers)))
    ratios = [[peak[b, x] / mean[b, x] for x in range(layers)] for b in range(batches)]
    flat = sorted(value for row in ratios for value in row)
    assert found.mean == pytest.approx(sum(flat) / len(flat))
    assert found.max == pytest.approx(flat[-1])
    by_layer = [sum(row[x] for row in ratios) / batches for x in range(layers)]
    assert found.worst_layer_mean == pytest.approx(max(by_layer))
    assert by_layer[found.worst_layer - 10] == pytest.approx(max(by_layer))
    at = 0.99 * (len(flat) - 1)
    low = int(at)
    high = min(low + 1, len(flat) - 1)
    assert found.p99 == pytest.approx(flat[low] + (at - low) * (flat[high] - flat[low]))
    vllm = sum(sum(mean[b]) / sum(peak[b]) for b in range(batches)) / batches
    assert found.balancedness_vllm == pytest.approx(vllm)
    assert 0 < found.balancedness_sglang <= 1
