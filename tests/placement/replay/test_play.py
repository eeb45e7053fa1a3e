"""The replay loop against a slow one, and what must hold for any planner."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from helpers_replay import domain_trace
from hypothesis import given, settings
from hypothesis import strategies as st

from moeserve_placement.load import LoadHistory
from moeserve_placement.placement import Placement, PlacementError
from moeserve_placement.planners import PLANNERS, Budget, get_planner
from moeserve_placement.replay import (
    BudgetSpec,
    Comparison,
    PlannerSpec,
    ReplaySettings,
    compare,
    save_json,
)
from moeserve_placement.replay.results import BATCH, FIXED
from moeserve_placement.replay.summary import (
    balance_rows,
    baseline,
    cost_rows,
    findings,
    label_rows,
)
from moeserve_placement.topology import Topology
from moeserve_placement.traces import CountTrace, RoutingTrace

TOPOLOGY = Topology.uniform(4, 3, num_nodes=2, bytes_per_expert=1000)
SETTINGS = ReplaySettings(batch_sizes=(16, 32), window=32, token_bytes=10)
ALL = tuple(PlannerSpec(name=name) for name in sorted(PLANNERS))


def play(trace: RoutingTrace | CountTrace, *names: str, **given: object) -> Comparison:
    options = {"topology": TOPOLOGY, "settings": SETTINGS} | given
    return compare(trace, [PlannerSpec(name=name) for name in names], **options)  # type: ignore[arg-type]


def imbalance_by_hand(ids: np.ndarray, placement: Placement, layer: int) -> float:
    """Fullest over mean rank of tokens [num_tokens, top_k] with an even split, one by one."""
    copies = placement.copies(layer)
    loads = [0.0] * placement.num_ranks
    for expert, count in Counter(ids.ravel().tolist()).items():
        for rank, _ in copies[expert]:
            loads[rank] += count / len(copies[expert])
    return max(loads) / (sum(loads) / len(loads))


def test_eplb_replay_equals_planning_and_scoring_by_hand() -> None:
    """Window i is scored under the plan made from windows 0 to i - 1, batch by batch."""
    trace = domain_trace()
    run = play(trace, "eplb").groups["eplb", "none"][0]
    history = LoadHistory(trace.layer_ids, trace.num_experts, window=16)
    slow = []
    for window in range(8):
        start = 32 * window
        if window:
            placement = get_planner("eplb").plan(history, TOPOLOGY).placement
            for batch in (start, start + 16):
                ids = trace.topk_ids[batch : batch + 16]
                slow.append(
                    [imbalance_by_hand(ids[:, x], placement, trace.layer_ids[x]) for x in (0, 1)]
                )
        history.observe(trace.counts(start, start + 32))
    np.testing.assert_allclose(run.levels[FIXED, 16].imbalance, slow)
    by_window = np.array(slow).reshape(7, 2, 2).mean((1, 2))
    np.testing.assert_allclose(run.window_imbalance(16), by_window)


def test_linear_is_always_there_first_and_moves_nothing() -> None:
    comparison = play(domain_trace(), "eplb")
    assert [run.planner for run in comparison.runs] == ["linear", "eplb"]
    assert comparison.runs[0].num_copies == 0
    assert [run.planner for run in play(domain_trace(), "linear").runs] == ["linear"]


@settings(max_examples=15, deadline=None)
@given(st.integers(0, 2**16), st.integers(0, 3), st.sampled_from([0, 1, 2]))
def test_what_holds_for_every_planner(seed: int, copies: int, interval: int) -> None:
    """Levels, copies, bytes and budgets agree, whatever the planner."""
    trace = domain_trace(seed=seed, sequences=6)
    playing = ReplaySettings(batch_sizes=(16, 32), window=32, interval=interval)
    budget = BudgetSpec(label="few", budget=Budget(max_copies=copies))
    comparison = compare(trace, ALL, topology=TOPOLOGY, settings=playing, budgets=[budget])
    scored = len(comparison.window_labels[0])
    for run in comparison.runs:
        for (split, size), levels in run.levels.items():
            assert (levels.imbalance >= 1 - 1e-9).all()
            total = size * trace.top_k / TOPOLOGY.num_ranks
            np.testing.assert_allclose(levels.mean, total)
            if split == FIXED:
                assert len(levels.mean) == scored * 32 // size
        best, even = run.levels[BATCH, 32].peak, run.levels[FIXED, 32].peak
        assert (best <= even * (1 + 1e-5)).all()
        np.testing.assert_allclose(run.rank_levels.sum(-1), TOPOLOGY.num_ranks)
        assert run.num_bytes == 1000 * run.num_copies
        assert len(run.plans) == (1 if not interval else -(-scored // interval))
        for plan in run.plans[1:]:
            assert plan.num_copies <= copies
            assert plan.num_bytes == sum(plan.bytes_by_link.values())


def test_copies_are_experts_that_a_rank_did_not_hold_before() -> None:
    """Copies of EPLB counted from the placements themselves."""
    trace = domain_trace()
    run = play(trace, "eplb").groups["eplb", "none"][0]
    history = LoadHistory(trace.layer_ids, trace.num_experts, window=16)
    before: Placement | None = None
    counted = []
    for window in range(8):
        if window:
            now = get_planner("eplb").plan(history, TOPOLOGY).placement
            pairs = [
                (set(old), set(new))
                for layer in trace.layer_ids
                for old, new in zip((before or now).layers[layer], now.layers[layer], strict=True)
            ]
            counted.append(sum(len(new - old - {None}) for old, new in pairs))
            before = now
        history.observe(trace.counts(32 * window, 32 * window + 32))
    assert [plan.num_copies for plan in run.plans] == counted


def test_a_start_from_linear_counts_the_first_moves() -> None:
    cold = play(domain_trace(), "eplb").groups["eplb", "none"][0]
    linear = ReplaySettings(batch_sizes=(32,), window=32, start="linear")
    warm = play(domain_trace(), "eplb", settings=linear).groups["eplb", "none"][0]
    assert cold.plans[0].num_copies == 0 < warm.plans[0].num_copies


def test_a_planner_that_plans_once_beats_linear_on_steady_traffic() -> None:
    """One domain only: what was seen comes again."""
    trace = domain_trace(domains=("one",), sequences=32)
    once = ReplaySettings(batch_sizes=(64,), window=64, interval=0, warmup=3)
    comparison = play(trace, "eplb", "scenario", settings=once)
    rows = {r.label: r.mean.mean for r in balance_rows(comparison) if r.split == FIXED}
    assert rows["eplb"] < rows["linear"] and rows["scenario"] < rows["linear"]
    assert all(len(run.plans) == 1 for run in comparison.runs)


def test_plan_error_is_realised_less_predicted_under_the_planned_split() -> None:
    """By hand from the forecasts of the plans: the split per batch where that was planned for."""
    specs = [PlannerSpec(name="scenario", options={"split": split}) for split in ("even", "batch")]
    comparison = compare(domain_trace(), specs, topology=TOPOLOGY, settings=SETTINGS)
    rows = {row.label: row for row in cost_rows(comparison)}
    for run in comparison.runs[1:]:
        split = BATCH if run.planner.endswith("batch") else FIXED
        realised = run.levels[split, 32].imbalance.mean(1)
        predicted = [plan.predicted for plan in run.plans]
        error = rows[run.label].plan_error
        assert error is not None and None not in predicted
        assert error.mean == pytest.approx(np.mean(realised - np.array(predicted, dtype=float)))


def test_counts_are_replayed_without_tokens() -> None:
    rng = np.random.default_rng(0)
    counts = CountTrace(counts=rng.integers(0, 99, (5, 2, 8)), layer_ids=(0, 1))
    comparison = play(counts, "eplb")
    run = comparison.runs[1]
    assert set(run.levels) == {(FIXED, 0), (BATCH, 0)} and not run.traffic
    np.testing.assert_allclose(run.levels[FIXED, 0].mean, counts.counts[1:].sum(2) / 4)
    assert cost_rows(comparison)[1].nodes_per_token is None


def test_seeds_are_summarised_with_their_range() -> None:
    playing = ReplaySettings(batch_sizes=(32,), window=32, order="shuffle")
    comparison = play(domain_trace(), "eplb", settings=playing, seeds=(0, 1, 2))
    runs = comparison.groups["eplb", "none"]
    means = [float(run.levels[FIXED, 32].imbalance.mean()) for run in runs]
    row = next(r for r in balance_rows(comparison) if (r.label, r.split) == ("eplb", FIXED))
    assert (row.mean.low, row.mean.high) == pytest.approx((min(means), max(means)))
    assert row.mean.mean == pytest.approx(sum(means) / 3)


def test_findings_say_which_planner_is_worse_and_by_how_much() -> None:
    comparison = play(domain_trace(), "eplb", "linear", "scenario")
    assert baseline(comparison, "scenario", "none") == "eplb"
    assert baseline(comparison, "eplb", "none") is None
    rows = {r.label: r for r in balance_rows(comparison) if r.split == FIXED and r.batch_size == 32}
    difference = rows["scenario"].mean.mean - rows["eplb"].mean.mean
    sentence = findings(comparison)[0]
    word = "equal" if abs(difference) < 0.005 else "better" if difference < 0 else "WORSE"
    assert sentence.startswith(f"scenario against eplb: imbalance {word}")
    domains = label_rows(comparison)
    for name in ("left", "right"):
        worse = domains["scenario"][name] - domains["eplb"][name] > 0.05
        said = any(f"worse than eplb on domain {name!r}" in text for text in findings(comparison))
        assert worse == said


def test_each_run_is_held_against_eplb_with_its_own_budget() -> None:
    budgets = [BudgetSpec(label=f"{n} copies", budget=Budget(max_copies=n)) for n in (2, 9)]
    comparison = play(domain_trace(), "eplb", "scenario", budgets=[*budgets, BudgetSpec()])
    found = findings(comparison)
    for budget in (" (2 copies)", " (9 copies)", ""):
        start = f"scenario{budget} against eplb{budget}: imbalance"
        assert sum(text.startswith(start) for text in found) == 1
    assert not any(text.startswith("eplb") for text in found)


def test_without_eplb_of_the_same_budget_the_largest_one_is_the_measure() -> None:
    budgets = [BudgetSpec(label=f"{n} copies", budget=Budget(max_copies=n)) for n in (2, 9)]
    comparison = play(domain_trace(), "eplb", "scenario", budgets=[*budgets, BudgetSpec()])
    runs = comparison.runs

    def without(*labels: str) -> Comparison:
        return replace(comparison, runs=tuple(run for run in runs if run.label not in labels))

    assert baseline(without("eplb (2 copies)"), "scenario", "2 copies") == "eplb"
    left = without("eplb", "eplb (2 copies)")
    assert baseline(left, "scenario", "2 copies") == "eplb (9 copies)"
    assert baseline(left, "scenario", "none") == "eplb (9 copies)"
    assert baseline(without("eplb"), "scenario", "none") == "eplb (9 copies)"
    none = without("eplb", "eplb (2 copies)", "eplb (9 copies)")
    assert [baseline(none, "scenario", b) for b in ("2 copies", "none")] == [None, None]
    assert baseline(without(*(run.label for run in runs[1:])), "linear", "none") is None


def test_domains_average_to_the_whole() -> None:
    comparison = play(domain_trace(), "eplb")
    labels = Counter(comparison.window_labels[0])
    for run in comparison.runs:
        parts = comparison.by_label(run)
        whole = sum(parts[str(name)] * count for name, count in labels.items()) / 7
        assert whole == pytest.approx(run.levels[FIXED, 32].imbalance.mean())


def test_results_are_strict_json_with_all_figures(tmp_path: Path) -> None:
    comparison = play(domain_trace(), "eplb", "scenario")
    save_json(comparison, tmp_path / "r.json")
    text = (tmp_path / "r.json").read_text()
    found = json.loads(text)
    assert (found["format"], found["version"]) == ("moeserve-placement-comparison", 1)
    assert found["settings"]["seeds"] == [0] and found["settings"]["window"] == 32
    assert {row["label"] for row in found["balance"]} == {"linear", "eplb", "scenario"}
    eplb = next(run for run in found["runs"] if run["planner"] == "eplb")
    assert len(eplb["imbalance_by_window"]) == 7 and len(eplb["plans"]) == 7
    sent = np.array(eplb["traffic"]["rank_to_rank_bytes"])
    touched = np.sum(eplb["traffic"]["ranks_per_token_by_layer"]) * 7 * 32
    assert sent.sum() == pytest.approx(10 * touched, rel=1e-5)
    cost = next(row for row in found["cost"] if row["label"] == "eplb")
    across = np.array([0, 0, 1, 1])[:, None] != np.array([0, 0, 1, 1])
    per_token = sent[across].sum() / (7 * 32 * 2)
    assert cost["fabric_bytes"]["mean"] == pytest.approx(per_token)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"topology": Topology.uniform(2, 3)}, "6 usable slots on 2 ranks can not hold 8"),
        ({"seeds": (0, 1)}, "the same for every seed"),
    ],
)
def test_what_can_not_be_played_is_refused(change: dict[str, object], words: str) -> None:
    with pytest.raises(PlacementError, match=words):
        play(domain_trace(), "eplb", **change)


def test_a_wrong_planner_or_option_is_refused_before_any_work() -> None:
    wrong = PlannerSpec(name="scenario", options={"speed": 3})
    with pytest.raises(PlacementError, match="speed"):
        compare(domain_trace(), [wrong], topology=TOPOLOGY, settings=SETTINGS)
    with pytest.raises(PlacementError, match="planner = 'magic'"):
        play(domain_trace(), "magic")
