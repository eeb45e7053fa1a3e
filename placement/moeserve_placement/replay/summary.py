"""From runs to the rows that people read: per planner, budget and batch size, over all seeds."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from moeserve_placement.replay.metrics import Balance
from moeserve_placement.replay.results import (
    BATCH,
    FIXED,
    REFERENCE,
    Comparison,
    PlanRecord,
    Run,
    Spread,
)
from moeserve_placement.replay.traffic import Traffic

_NOTICEABLE = 0.005  # imbalance differences below this are not worth a sentence
_BAD = 0.05  # how much worse than the baseline on one domain is called out


@dataclass(frozen=True, slots=True, kw_only=True)
class BalanceRow:
    """Balance of one planner, budget, batch size and split; each figure over the seeds.

    batch_size: 0 for the windows of a trace of counts. worst_layer: layer that is worst in most
    seeds.
    """

    label: str
    split: str
    batch_size: int
    num_batches: int
    mean: Spread
    p99: Spread
    worst_layer: int
    worst_layer_mean: Spread
    balancedness_sglang: Spread
    balancedness_vllm: Spread
    time_lost: Spread


@dataclass(frozen=True, slots=True, kw_only=True)
class CostRow:
    """What one planner and budget costs; each figure over the seeds.

    num_plans: plans made, the first one (from nothing) included. copies, num_bytes: per plan that
    could move, so without a first plan from nothing. most_copies: of one plan. plan_ms: time of a
    plan that could move (of the only plan, where there is one), plan_ms_per_layer, first_plan_ms.
    plan_error: realised less predicted imbalance; None where nothing was predicted. nodes_per_token
    and below: None for a trace of counts. fabric_bytes, node_bytes: sent per token and layer
    between and inside nodes.
    """

    label: str
    num_plans: int
    copies: Spread
    num_bytes: Spread
    most_copies: int
    plan_ms: Spread
    plan_ms_per_layer: Spread
    first_plan_ms: Spread
    plan_error: Spread | None
    nodes_per_token: Spread | None
    nodes_per_token_fewest: Spread | None
    node_imbalance: Spread | None
    node_imbalance_fewest: Spread | None
    ranks_per_token: Spread | None
    fabric_bytes: Spread | None
    node_bytes: Spread | None


def balance_rows(comparison: Comparison) -> list[BalanceRow]:
    """A row per planner and budget, batch size and split."""
    rows = []
    for runs in comparison.groups.values():
        for split, size in sorted(runs[0].levels, key=lambda key: (key[1], key[0] == BATCH)):
            found = [comparison.statistics(run, split, size) for run in runs]
            rows.append(_balance_row(runs[0].label, split, size, found))
    return rows


def _balance_row(label: str, split: str, size: int, found: list[Balance]) -> BalanceRow:
    def spread(get: Callable[[Balance], float]) -> Spread:
        return Spread.of([get(item) for item in found])

    worst = [item.worst_layer for item in found]
    return BalanceRow(
        label=label,
        split=split,
        batch_size=size,
        num_batches=sum(item.num_batches for item in found),
        mean=spread(lambda item: item.mean),
        p99=spread(lambda item: item.p99),
        worst_layer=max(sorted(set(worst)), key=worst.count),
        worst_layer_mean=spread(lambda item: item.worst_layer_mean),
        balancedness_sglang=spread(lambda item: item.balancedness_sglang),
        balancedness_vllm=spread(lambda item: item.balancedness_vllm),
        time_lost=spread(lambda item: item.time_lost),
    )


def moving_plans(comparison: Comparison, run: Run) -> tuple[PlanRecord, ...]:
    """The plans of a run that started from something in place."""
    return run.plans if comparison.settings.start == "linear" else run.plans[1:]


def cost_rows(comparison: Comparison) -> list[CostRow]:
    """A row per planner and budget."""
    return [_cost_row(comparison, runs) for runs in comparison.groups.values()]


def _cost_row(comparison: Comparison, runs: tuple[Run, ...]) -> CostRow:
    moving = [moving_plans(comparison, run) for run in runs]
    timed = [plans or run.plans for plans, run in zip(moving, runs, strict=True)]
    plan_ms = [1e3 * float(np.mean([plan.seconds for plan in plans])) for plans in timed]
    errors = [error for run in runs if (error := _plan_error(comparison, run)) is not None]

    def per_plan(get: Callable[[PlanRecord], int]) -> Spread:
        return Spread.of([sum(map(get, plans)) / max(len(plans), 1) for plans in moving])

    return CostRow(
        label=runs[0].label,
        num_plans=sum(len(run.plans) for run in runs),
        copies=per_plan(lambda plan: plan.num_copies),
        num_bytes=per_plan(lambda plan: plan.num_bytes),
        most_copies=max((plan.num_copies for plans in moving for plan in plans), default=0),
        plan_ms=Spread.of(plan_ms),
        plan_ms_per_layer=Spread.of([ms / len(comparison.layer_ids) for ms in plan_ms]),
        first_plan_ms=Spread.of([1e3 * run.plans[0].seconds for run in runs]),
        plan_error=Spread.of(errors) if len(errors) == len(runs) else None,
        **_traffic_figures(comparison, runs),
    )


def _plan_error(comparison: Comparison, run: Run) -> float | None:
    """Realised less predicted imbalance, mean over the scored windows.

    Under the split that the plans are for; None where that was not scored for all batches.
    """
    size = comparison.batch_of(run)
    split = BATCH if run.plans[0].split == BATCH else FIXED
    if (split, size) not in run.levels:
        return None
    if len(run.levels[split, size].mean) < len(run.levels[FIXED, size].mean):
        return None
    realised = run.window_imbalance(size, split=split)
    ends = [*(plan.window for plan in run.plans[1:]), len(realised)]
    errors = []
    for plan, stop in zip(run.plans, ends, strict=True):
        if plan.predicted is None:
            return None
        errors += (realised[plan.window : stop] - plan.predicted).tolist()
    return float(np.mean(errors))


def _traffic_figures(comparison: Comparison, runs: tuple[Run, ...]) -> dict[str, Spread | None]:
    found = [Traffic.joined(list(run.traffic)) for run in runs if run.traffic]
    names: dict[str, Callable[[Traffic], float]] = {
        "nodes_per_token": lambda t: t.nodes.mean(),
        "nodes_per_token_fewest": lambda t: t.nodes_fewest.mean(),
        "node_imbalance": lambda t: t.node_imbalance.mean(),
        "node_imbalance_fewest": lambda t: t.node_imbalance_fewest.mean(),
        "ranks_per_token": lambda t: t.ranks.mean(),
        "fabric_bytes": lambda t: sent_bytes(comparison, t)[1],
        "node_bytes": lambda t: sent_bytes(comparison, t)[0],
    }
    if not found:
        return dict.fromkeys(names)
    return {name: Spread.of([float(get(t)) for t in found]) for name, get in names.items()}


def sent_bytes(comparison: Comparison, traffic: Traffic) -> tuple[float, float]:
    """Bytes sent per token and layer to other ranks: inside the node, and to other nodes."""
    nodes = comparison.topology.nodes
    across = nodes[:, None] != nodes[None, :]
    other = ~np.eye(len(nodes), dtype=np.bool_)
    scale = comparison.settings.token_bytes / (traffic.num_tokens * len(comparison.layer_ids))
    inside = float(traffic.sent[other & ~across].sum()) * scale
    return inside, float(traffic.sent[across].sum()) * scale


def label_rows(comparison: Comparison) -> dict[str, dict[str, float]]:
    """Planner and budget -> domain -> mean imbalance over the seeds (fixed split, main batch)."""
    rows = {}
    for runs in comparison.groups.values():
        by_seed = [comparison.by_label(run) for run in runs]
        names = sorted({name for found in by_seed for name in found})
        rows[runs[0].label] = {
            name: float(np.mean([found[name] for found in by_seed if name in found]))
            for name in names
        }
    return rows


def baseline(comparison: Comparison, planner: str, budget: str) -> str | None:
    """The label that a planner with this budget is held against; None where that is itself.

    EPLB with the same budget. Where EPLB was not played with it: with the largest, which is none at
    all or else the one that let it copy most. Without any EPLB the first planner takes its place.
    """
    groups = {key: runs for key, runs in comparison.groups.items() if key[0] != REFERENCE}
    names = [name for name, _ in groups]
    eplb = [name for name in names if name.startswith("eplb")]
    measure = next(iter(eplb + names), None)
    known = [key for key in groups if key[0] == measure]
    known.sort(key=lambda key: (key[1] != budget, key[1] != "none", -groups[key][0].num_copies))
    if not known or known[0] == (planner, budget):
        return None
    return groups[known[0]][0].label


def findings(comparison: Comparison) -> list[str]:
    """Sentences: better or worse than the baseline, by how much, and where it is worse."""
    rows = {
        (row.label, row.split): row
        for row in balance_rows(comparison)
        if row.batch_size == comparison.batch_of(comparison.runs[0])
    }
    costs = {row.label: row for row in cost_rows(comparison)}
    domains = label_rows(comparison)
    sentences = []
    for (planner, budget), runs in comparison.groups.items():
        label, base = runs[0].label, baseline(comparison, planner, budget)
        if planner == REFERENCE or base is None:
            continue
        sentences.append(_verdict(label, base, rows, costs))
        sentences += _worse_domains(comparison, label, base, domains)
    return sentences


def _worse_domains(
    comparison: Comparison, label: str, base: str, domains: dict[str, dict[str, float]]
) -> list[str]:
    """A sentence for each of the three domains where it is worst against the baseline."""
    worse = {
        name: value - domains[base][name]
        for name, value in domains[label].items()
        if value - domains[base].get(name, value) > _BAD
    }
    sentences = []
    for name, difference in sorted(worse.items(), key=lambda item: -item[1])[:3]:
        windows = sum(labels.count(name) for labels in comparison.window_labels.values())
        sentences.append(
            f"{label} is worse than {base} on domain {name!r} by {difference:.3f} "
            f"({windows} window{'' if windows == 1 else 's'})."
        )
    return sentences


def _verdict(
    label: str,
    base: str,
    rows: dict[tuple[str, str], BalanceRow],
    costs: dict[str, CostRow],
) -> str:
    parts = []
    for split, words in ((FIXED, "fixed split"), (BATCH, "split per batch")):
        if (label, split) in rows and (base, split) in rows:
            ours, theirs = rows[label, split].mean.mean, rows[base, split].mean.mean
            both = f"({ours:.3f} against {theirs:.3f})"
            parts.append(f"{_compared(ours - theirs)} {both} with {words}")
    ours, theirs = costs[label].copies.mean, costs[base].copies.mean
    moved = f"; {ours:.1f} copies per plan against {theirs:.1f}" if ours or theirs else ""
    return f"{label} against {base}: imbalance {', '.join(parts)}{moved}."


def _compared(difference: float) -> str:
    if abs(difference) < _NOTICEABLE:
        return "equal"
    return f"{'better' if difference < 0 else 'WORSE'} by {abs(difference):.3f}"
