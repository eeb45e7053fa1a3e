"""Synthetic traces have the imbalance they state; what can not be reached is refused with why."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers_traces import assert_same_routing
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from moeserve_placement.placement import Placement
from moeserve_placement.traces import RoutingTrace, TraceError
from moeserve_placement.traces.mix import (
    MixSpec,
    domain_chances,
    mix_under_clock,
    poisson_clock,
    read_clock,
)
from moeserve_placement.traces.sampling import inclusion, sample_topk, solve_scale
from moeserve_placement.traces.synth import KINDS, SynthSpec, linear_ranks, synthesize


@given(data=st.data(), num_experts=st.integers(2, 40))
def test_inclusion_probabilities_sum_to_top_k_and_keep_the_order(
    data: st.DataObject, num_experts: int
) -> None:
    top_k = data.draw(st.integers(1, num_experts - 1))
    logits = np.array(
        data.draw(st.lists(st.floats(-30, 30), min_size=num_experts, max_size=num_experts))
    )
    found = inclusion(logits, top_k)
    assert found.sum() == pytest.approx(top_k, rel=1e-6)
    assert found.min() > 0 and found.max() < 1
    order = np.argsort(logits)
    assert all(b >= a - 1e-12 for a, b in pairwise(found[order].tolist()))
    free = found < 1 - 1e-6
    ratio = found[free] / np.maximum(np.exp(logits[free] - logits.max()), 1e-12)
    assert ratio.size == 0 or ratio.max() == pytest.approx(ratio.min(), rel=1e-6)


def test_experts_are_drawn_as_often_as_wanted() -> None:
    wanted = inclusion(np.linspace(0, 4, 16), 4)
    drawn = sample_topk(wanted, 40_000, rng=np.random.default_rng(0))
    assert all(len(set(token)) == 4 for token in drawn[:500].tolist())
    share = np.bincount(drawn.ravel(), minlength=16) / 40_000
    deviation = np.sqrt(wanted * (1 - wanted) / 40_000)
    assert (np.abs(share - wanted) <= 4.5 * deviation + 1e-9).all()


@given(num_experts=st.integers(2, 40), num_ranks=st.integers(1, 10))
def test_linear_ranks_are_those_of_the_linear_placement(num_experts: int, num_ranks: int) -> None:
    assume(num_ranks <= num_experts)
    ranks = Placement.linear(num_experts, num_ranks, [0]).layers[0]
    expected = [rank for rank, slots in enumerate(ranks) for _ in slots]
    assert linear_ranks(num_experts, num_ranks).tolist() == expected


def _imbalances(kind: str, trace: RoutingTrace, spec: SynthSpec) -> list[list[float]]:
    """By layer: the imbalance that each kind states, from plain counts of the finished trace."""
    window = spec.num_tokens if kind in ("zipf", "hot-rank") else spec.window_tokens
    spans = [(start, start + window) for start in range(0, spec.num_tokens, window)]
    if kind == "burst":
        bursts = trace.metadata["synth_burst_windows"].split(",")
        spans = [spans[int(burst)] for burst in bursts]
    found: list[list[float]] = [[] for _ in range(spec.num_layers)]
    for start, stop in spans:
        for layer in range(spec.num_layers):
            load = [0] * spec.num_experts
            for expert in trace.topk_ids[start:stop, layer].ravel().tolist():
                load[expert] += 1
            if kind in ("hot-rank", "rotating"):
                ranks = Placement.linear(spec.num_experts, spec.num_ranks, [0]).layers[0]
                load = [sum(load[e] for e in slots if e is not None) for slots in ranks]
            found[layer].append(max(load) * len(load) / sum(load))
    return found


def _by_chance(num_experts: int, choices: int) -> float:
    """About the imbalance of so many choices that are all equally likely."""
    return 1 + float(np.sqrt(2 * np.log(num_experts) * num_experts / choices))


@settings(max_examples=12)
@given(
    kind=st.sampled_from(sorted(KINDS)),
    imbalance=st.floats(1.6, 3.5),
    num_experts=st.sampled_from([24, 32, 60]),
    top_k=st.integers(2, 6),
    seed=st.integers(0, 2**32 - 1),
)
def test_the_stated_imbalance_is_that_of_the_trace(
    kind: str, imbalance: float, num_experts: int, top_k: int, seed: int
) -> None:
    assume(imbalance < 0.9 * num_experts / top_k)
    spec = SynthSpec(
        num_tokens=4096,
        num_layers=2,
        num_experts=num_experts,
        top_k=top_k,
        imbalance=imbalance,
        seed=seed,
        num_ranks=4,
        window_tokens=1024,
    )
    if kind == "burst":  # between bursts it must be possible to be as even as asked
        assume(_by_chance(num_experts, 1024 * top_k) < spec.base_imbalance)
    trace = synthesize(kind, spec)
    for values in _imbalances(kind, trace, spec):
        assert np.mean(values) == pytest.approx(imbalance, rel=spec.tolerance)
    assert trace.metadata["synth_imbalance"] == f"{imbalance:g}"
    assert_same_routing(synthesize(kind, spec), trace)


def test_rotating_hot_spots_visit_every_rank_and_even_out() -> None:
    spec = SynthSpec(num_tokens=8192, num_layers=1, num_ranks=8, window_tokens=1024)
    trace = synthesize("rotating", spec)
    ranks = linear_ranks(spec.num_experts, spec.num_ranks)
    hot = []
    for start in range(0, spec.num_tokens, 1024):
        load = np.bincount(ranks, weights=trace.counts(start, start + 1024)[0])
        hot.append(int(load.argmax()))
    assert sorted(hot) == list(range(8))
    whole = np.bincount(ranks, weights=trace.counts()[0])
    assert whole.max() / whole.mean() < 1.05


def test_slow_drift_moves_popularity_less_than_fast_drift() -> None:
    def moved(rho: float) -> float:
        spec = SynthSpec(num_layers=1, rho=rho, num_tokens=16384, window_tokens=2048)
        trace = synthesize("drift", spec)
        first, last = trace.counts(0, 2048)[0], trace.counts(14336)[0]
        return float(np.abs(first / first.sum() - last / last.sum()).sum() / 2)

    assert moved(1.0) < moved(0.98) < moved(0.0)


@pytest.mark.parametrize(
    ("kind", "changes", "text"),
    [
        ("zipf", {"imbalance": 9.0}, r"at most 8 times.*1/8 of the load.*= 8\)"),
        ("hot-rank", {"imbalance": 8.5}, "the most loaded rank can have at most 8"),
        ("hot-rank", {"imbalance": 4.5, "num_ranks": 4}, "the most loaded rank can have at most 4"),
        ("zipf", {"imbalance": 1.05, "num_tokens": 64}, "by chance alone; ask for more tokens"),
        ("burst", {"imbalance": 1.2}, "must be more than base_imbalance"),
        ("burst", {"num_tokens": 100}, "two windows or more"),
        ("wave", {}, "kind = 'wave'"),
    ],
)
def test_an_imbalance_out_of_reach_is_refused_with_the_reason(
    kind: str, changes: dict[str, Any], text: str
) -> None:
    with pytest.raises(TraceError, match=text):
        synthesize(kind, SynthSpec(**changes))


@pytest.mark.parametrize(
    "changes",
    [
        {"imbalance": 1.0},
        {"imbalance": float("nan")},
        {"tolerance": 0.0},
        {"top_k": 64},
        {"top_k": 0},
        {"num_tokens": 0},
        {"num_ranks": 65},
        {"rho": 1.5},
        {"requests_per_s": 0.0},
    ],
)
def test_settings_out_of_range_are_named(changes: dict[str, float]) -> None:
    with pytest.raises(TraceError, match=next(iter(changes))):
        SynthSpec(**changes)  # type: ignore[arg-type]


def test_a_target_between_no_and_full_strength_is_met_exactly() -> None:
    pattern = np.stack([-np.log(np.arange(1, 65))] * 3)
    target = np.array([1.0001, 2.5, 7.99])
    scale = solve_scale(pattern, target, top_k=8)
    found = inclusion(scale[:, None] * pattern, 8)
    np.testing.assert_allclose(found.max(axis=1) * 64 / 8, target, rtol=1e-6)


def two_domains() -> RoutingTrace:
    """Sequences of two domains with different hot experts."""
    parts = [synthesize("zipf", SynthSpec(num_tokens=4096, num_layers=2, seed=s)) for s in (1, 2)]
    return RoutingTrace(
        topk_ids=np.concatenate([part.topk_ids for part in parts]),
        num_experts=64,
        layer_ids=(0, 1),
        sequence_lengths=np.concatenate([part.sequence_lengths for part in parts]),
        labels=("code",) * 16 + ("law",) * 16,
        metadata={"model": "toy"},
    )


def test_a_mix_draws_whole_sequences_in_order_of_arrival() -> None:
    source = two_domains()
    times = poisson_clock(400, 2.0, seed=3)
    trace = mix_under_clock(source, times, spec=MixSpec(cycle_s=50.0, focus=1.0))
    assert trace.num_sequences == 400
    assert trace.arrival_times_s is not None and trace.labels is not None
    assert (np.diff(trace.arrival_times_s) >= 0).all()
    known = {
        (label, source.tokens(start, start + 256).topk_ids.tobytes())
        for label, start in zip(source.labels or (), source.sequence_starts.tolist(), strict=True)
    }
    for label, start in zip(trace.labels[:50], trace.sequence_starts[:50].tolist(), strict=True):
        assert (label, trace.tokens(start, start + 256).topk_ids.tobytes()) in known
    assert trace.metadata["model"] == "toy" and "synth_imbalance_realised" in trace.metadata


@given(
    times=st.lists(st.floats(0, 1e6), min_size=1, max_size=20),
    num_domains=st.integers(1, 6),
    cycle_s=st.none() | st.floats(0.1, 1e5),
    focus=st.floats(0, 1),
)
def test_domain_chances_are_probabilities(
    times: list[float], num_domains: int, cycle_s: float | None, focus: float
) -> None:
    spec = MixSpec(cycle_s=cycle_s, focus=focus)
    chances = domain_chances(np.array(times), num_domains, spec=spec)
    assert chances.min() >= 0
    np.testing.assert_allclose(chances.sum(axis=1), 1)


def test_a_mix_that_can_not_show_is_refused() -> None:
    with pytest.raises(TraceError, match="3 requests are too few"):
        mix_under_clock(two_domains(), np.arange(3.0), spec=MixSpec(tolerance=1e-6))
    with pytest.raises(TraceError, match="needs a trace whose sequences have labels"):
        mix_under_clock(synthesize("zipf", SynthSpec()), np.arange(3.0))
    with pytest.raises(TraceError, match="one or more finite"):
        mix_under_clock(two_domains(), np.array([]))


def test_clocks_of_both_public_layouts_are_read(tmp_path: Path) -> None:
    path = tmp_path / "clock"
    path.write_text(
        "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:15:46.6805900,374,44\n"
        "2023-11-16 18:15:50.9951690,396,109\n2023-11-16 18:15:50.2222222,1,1\n"
    )
    np.testing.assert_allclose(read_clock(path), [0, 3.5416322, 4.314579], atol=1e-6)
    path.write_text('{"timestamp": 500, "input_length": 3}\n\n{"timestamp": 2000}\n')
    np.testing.assert_allclose(read_clock(path), [0, 1.5])
    np.testing.assert_allclose(read_clock(path, limit=1), [0])


@pytest.mark.parametrize(
    "text",
    [
        "",
        "a,b\n1,2\n",
        "TIMESTAMP\nyesterday\n",
        '{"time": 1}\n',
        "TIMESTAMP\n",
        "TIMESTAMP\nnan\n",
    ],
)
def test_wrong_clocks_are_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "clock").write_text(text)
    with pytest.raises(TraceError):
        read_clock(tmp_path / "clock")
