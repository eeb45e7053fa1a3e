"""Balance: on the load that was planned for, on later tokens, and on a domain never seen."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from benchmarks.placement_data import (
    ESFT_DOMAINS,
    Routing,
    count,
    esft,
    observed,
    windows,
    zipf_loads,
)
from benchmarks.placement_lines import Line
from benchmarks.placement_table import EPLB_TABLE
from moeserve_placement.load import LoadHistory
from moeserve_placement.plan import Plan
from moeserve_placement.planners import get_planner
from moeserve_placement.planners.eplb import eplb_table
from moeserve_placement.shares import ShareSolver
from moeserve_placement.slot_table import imbalance, rank_loads, slot_table
from moeserve_placement.topology import Topology

_SEEDS = 8
_LAYERS = 4  # as in the table


def run() -> list[Line]:
    """The planning lines; those on real routing only where the data is."""
    lines = [*eplb_rows(), *own_load_rows()]
    routing = esft()
    if routing is not None:
        lines += [*held_out(routing), *left_out(routing)]
    return lines


def eplb_rows() -> list[Line]:
    """Our ``eplb`` against the table: mean difference, and rows outside the spread of the seeds."""
    excess, outside, close = [], 0, 0
    for (experts, exponent, ranks, spare), value in EPLB_TABLE.items():
        topology = Topology.uniform(ranks, (experts + spare) // ranks)
        means = []
        for seed in range(_SEEDS):
            load = zipf_loads(experts, exponent, _LAYERS, np.random.default_rng(seed))
            means.append(imbalance(rank_loads(load, eplb_table(load, topology))).mean())
        difference = float(np.mean(means)) - value
        spread = float(np.std(means, ddof=1))
        close += abs(difference) <= 0.01
        outside += abs(difference) > max(0.01, 2.5 * spread)
        excess.append(difference / value)
    setting = f"{len(EPLB_TABLE)} rows x {_SEEDS} seeds"
    return [
        Line(
            section="planning",
            what="eplb: rows off by > 0.01 and > 2.5 sd of the seeds",
            setting=setting,
            value=float(outside),
            limit=0.02 * len(EPLB_TABLE),
            details={"rows_within_0.01": close},
        ),
        Line(
            section="planning",
            what="eplb: mean relative difference",
            setting=setting,
            value=abs(float(np.mean(excess))),
            limit=0.01,
        ),
    ]


def own_load_rows() -> list[Line]:
    """Imbalance on the load planned for, every row with as many spare slots as ranks."""
    values: dict[str, list[tuple[float, str]]] = {"planned": [], "even": [], "eplb": []}
    for experts, exponent, ranks, spare in EPLB_TABLE:
        if spare < ranks:
            continue
        load = zipf_loads(experts, exponent, _LAYERS, np.random.default_rng(1))
        topology = Topology.uniform(ranks, (experts + spare) // ranks)
        history = LoadHistory(range(_LAYERS), experts)
        history.observe(1e9 * load)
        name = f"{experts} experts, Zipf {exponent}, {ranks} x {(experts + spare) // ranks}"
        for split in ("planned", "even"):
            plan = get_planner("scenario", split=split).plan(history, topology)
            table = slot_table(plan.placement, history.layer_ids)
            ours = imbalance(rank_loads(load, table, shares=plan.shares)).max()
            values[split].append((float(ours), name))
        theirs = imbalance(rank_loads(load, eplb_table(load, topology))).max()
        values["eplb"].append((float(theirs), name))
    eplb_worst = max(values["eplb"])[0]
    return [
        Line(
            section="planning",
            what="own load, worst layer of all rows",
            setting=f"{len(values[split])} rows; {max(values[split])[1]}",
            split=split,
            value=max(values[split])[0],
            limit=1.01 if split == "planned" else None,
            eplb=eplb_worst,
            details={"mean_of_rows": float(np.mean([v for v, _ in values[split]]))},
        )
        for split in ("planned", "even")
    ]


def held_out(routing: Routing) -> list[Line]:
    """Seen domains, later tokens, every window by itself; worst domain against the limit."""
    lines = []
    history = observed(routing, ESFT_DOMAINS)
    for ranks, slots, limits in (
        (8, 9, (1.12, 1.05)),
        (16, 5, (1.20, 1.11)),
        (8, 12, (None, None)),
        (32, 3, (None, None)),
    ):
        topology = Topology.uniform(ranks, slots)
        plans = {
            name: get_planner(name).plan(history, topology)
            for name in ("scenario", "eplb", "flashlb", "linear")
        }
        found = {name: by_domain(plan, routing, ESFT_DOMAINS) for name, plan in plans.items()}
        for index, split in enumerate(("even", "batch")):
            worst = {name: max(value[index] for value in f.values()) for name, f in found.items()}
            lines.append(
                Line(
                    section="planning",
                    what="ESFT later tokens, worst of 4 domains",
                    setting=f"{ranks} x {slots}",
                    split=split,
                    value=worst["scenario"],
                    limit=limits[index],
                    eplb=worst["eplb"],
                    details={
                        "flashlb": worst["flashlb"],
                        "linear": worst["linear"],
                        "by_domain": {d: v[index] for d, v in found["scenario"].items()},
                        "eplb_by_domain": {d: v[index] for d, v in found["eplb"].items()},
                    },
                )
            )
    return lines


def left_out(routing: Routing) -> list[Line]:
    """A domain that the plan has not seen: our imbalance less EPLB's."""
    lines = []
    for ranks, slots, limit in ((8, 9, 0.05), (16, 5, None), (8, 12, None), (32, 3, None)):
        topology = Topology.uniform(ranks, slots)
        pairs = {}
        for domain in ESFT_DOMAINS:
            history = observed(routing, [d for d in ESFT_DOMAINS if d != domain])
            plans = [get_planner(name).plan(history, topology) for name in ("scenario", "eplb")]
            pairs[domain] = [by_domain(plan, routing, [domain])[domain] for plan in plans]
        for index, split in enumerate(("even", "batch")):
            worse = {d: ours[index] - theirs[index] for d, (ours, theirs) in pairs.items()}
            domain = max(worse, key=lambda d: worse[d])
            lines.append(
                Line(
                    section="planning",
                    what="unseen domain: ours less EPLB, worst of 4",
                    setting=f"{ranks} x {slots}, {domain}",
                    split=split,
                    value=worse[domain],
                    limit=limit if split == "even" else None,
                    eplb=pairs[domain][1][index],
                    details={"difference_by_domain": worse},
                )
            )
    return lines


def by_domain(
    plan: Plan, routing: Routing, domains: Sequence[str]
) -> dict[str, tuple[float, float]]:
    """Mean imbalance over windows and layers of the second halves: even split, per-batch shares."""
    table = slot_table(plan.placement, routing.layer_ids)
    solver = ShareSolver(table, routing.num_experts)
    found = {}
    for domain in domains:
        counts = [count(part, routing.num_experts) for part in windows(routing.second[domain])]
        even = np.mean([imbalance(rank_loads(c.astype(float), table)).mean() for c in counts])
        batch = np.mean([imbalance(solver.solve(c).rank_loads).mean() for c in counts])
        found[domain] = (float(even), float(batch))
    return found
