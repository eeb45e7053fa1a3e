"""The replay loop: at every window plan on the past, score what comes, then observe it."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from moeserve_placement.load import LoadHistory
from moeserve_placement.placement import Placement
from moeserve_placement.plan import Plan
from moeserve_placement.planners.base import Planner
from moeserve_placement.replay.results import (
    BATCH,
    FIXED,
    REFERENCE,
    Comparison,
    PlanRecord,
    Run,
)
from moeserve_placement.replay.schedule import Schedule, Window, make_schedule
from moeserve_placement.replay.score import Levels, Scorer, sampled
from moeserve_placement.replay.settings import (
    BudgetSpec,
    PlannerSpec,
    ReplaySettings,
    check_seeds,
)
from moeserve_placement.replay.traffic import Traffic, measure_traffic
from moeserve_placement.slot_table import Floats, slot_table
from moeserve_placement.topology import Topology
from moeserve_placement.traces.info import pair_counts
from moeserve_placement.traces.trace import CountTrace, RoutingTrace

Progress = Callable[[int, int, str], None]
"""Called with steps done, steps in all and what comes next."""


def compare(
    trace: RoutingTrace | CountTrace,
    planners: Sequence[PlannerSpec],
    *,
    topology: Topology,
    settings: ReplaySettings,
    budgets: Sequence[BudgetSpec] = (BudgetSpec(),),
    seeds: Sequence[int] = (0,),
    name: str = "trace",
    facts: Mapping[str, str] | None = None,
    progress: Progress | None = None,
) -> Comparison:
    """Plays the trace against every planner with every budget, and the linear placement.

    Raises:
        PlacementError: an unknown planner, settings that do not fit the trace, or experts that do
            not fit the topology.
    """
    check_seeds(tuple(seeds), settings.order)
    topology.check_fits(trace.num_experts)
    for spec in planners:
        spec.make()  # a wrong name or option shows before any work
    runs: list[Run] = []
    labels: dict[int, tuple[str | None, ...]] = {}
    load = np.zeros((trace.num_layers, trace.num_experts), dtype=np.int64)
    notes: dict[str, None] = {}
    for index, seed in enumerate(seeds):
        schedule = make_schedule(trace, replace(settings, seed=seed))
        labels[seed] = tuple(window.label for window in schedule.scored)
        if not index:
            load = np.sum([window.counts for window in schedule.scored], axis=0)
        notes |= dict.fromkeys(schedule.notes)
        runs += replay(
            schedule,
            planners,
            topology=topology,
            settings=replace(settings, seed=seed),
            budgets=budgets,
            progress=_part_of(progress, index, len(seeds)),
        )
    return Comparison(
        trace=name,
        facts=dict(facts or {}),
        topology=topology,
        settings=settings,
        seeds=tuple(seeds),
        layer_ids=trace.layer_ids,
        expert_load=load,
        window_labels=labels,
        runs=tuple(sorted(runs, key=lambda run: run.planner != REFERENCE)),
        notes=tuple(notes),
    )


def replay(
    schedule: Schedule,
    planners: Sequence[PlannerSpec],
    *,
    topology: Topology,
    settings: ReplaySettings,
    budgets: Sequence[BudgetSpec] = (BudgetSpec(),),
    progress: Progress | None = None,
) -> list[Run]:
    """One run per planner and budget over a schedule, the linear placement first."""
    players = [_Player(PlannerSpec(name=REFERENCE), BudgetSpec(), topology, settings)]
    players += [
        _Player(spec, budget, topology, settings)
        for spec in planners
        for budget in budgets
        if spec.label != REFERENCE
    ]
    history = LoadHistory(
        schedule.layer_ids,
        schedule.num_experts,
        window=max(settings.history, schedule.num_warmup if settings.order == "holdout" else 1),
    )
    interval = 0 if settings.order == "holdout" else settings.interval
    total, done = len(schedule.windows) * len(players), 0
    for index, window in enumerate(schedule.windows):
        scored = index - schedule.num_warmup
        for player in players:
            if scored >= 0:
                if scored == 0 or (interval and scored % interval == 0):
                    player.plan(history, scored)
                player.score(window, scored)
            done += 1
            if progress is not None:
                progress(done, total, f"window {index + 1} of {len(schedule.windows)}")
        observe(history, window, topology)
    return [player.result() for player in players]


def observe(history: LoadHistory, window: Window, topology: Topology) -> None:
    """Counts, and which experts meet where that can matter: with several nodes."""
    if window.topk_ids is None or topology.num_nodes == 1 or window.topk_ids.shape[2] == 1:
        history.observe(window.counts)
        return
    layers = range(window.topk_ids.shape[1])
    pairs = [pair_counts(window.topk_ids[:, layer], history.num_experts) for layer in layers]
    history.observe(window.counts, np.stack(pairs).astype(np.float64))


@dataclass(slots=True)
class _Player:
    """A planner with what it has in place and what was measured of it."""

    spec: PlannerSpec
    budget: BudgetSpec
    topology: Topology
    settings: ReplaySettings
    current: Placement | None = None
    scorer: Scorer | None = None
    plans: list[PlanRecord] = field(default_factory=list)
    levels: dict[tuple[str, int], list[Levels]] = field(default_factory=dict)
    batch_windows: dict[int, list[int]] = field(default_factory=dict)
    rank_levels: list[Floats] = field(default_factory=list)
    traffic: list[Traffic] = field(default_factory=list)

    def plan(self, history: LoadHistory, window: int) -> None:
        """Plans on the history; the plan is in force from scored window ``window`` on."""
        planner: Planner = self.spec.make()
        if self.current is None and self.settings.start == "linear":
            linear = PlannerSpec(name=REFERENCE).make()
            self.current = linear.plan(history, self.topology).placement
        began = time.perf_counter()
        plan = planner.plan(history, self.topology, current=self.current, budget=self.budget.budget)
        self.plans.append(_record(plan, window, time.perf_counter() - began))
        if self.scorer is None or plan.shares is not None or not plan.is_stay:
            table = slot_table(plan.placement, history.layer_ids, topology=self.topology)
            self.scorer = Scorer(
                table,
                history.num_experts,
                topology=self.topology,
                shares=plan.shares,
                nominal=None if history.is_empty else history.scenarios().mean,
            )
        self.current = plan.placement

    def score(self, window: Window, index: int) -> None:
        """Measures a window under what is in place."""
        assert self.scorer is not None
        sizes = self.settings.batch_sizes if window.topk_ids is not None else (0,)
        for size in sizes:
            batches = window.batches(size) if size else window.counts[None]
            fixed = self.scorer.fixed(batches)
            self.levels.setdefault((FIXED, size), []).append(fixed)
            self.batch_windows.setdefault(size, []).extend([index] * len(batches))
            if self.settings.batch_split:
                some = sampled(batches, self.settings.max_solved)
                self.levels.setdefault((BATCH, size), []).append(self.scorer.per_batch(some))
        self.rank_levels.append(self._rank_levels(window))
        if window.topk_ids is not None and window.sequences is not None:
            self.traffic.append(
                measure_traffic(
                    window.topk_ids,
                    self.scorer.table,
                    sequences=window.sequences,
                    topology=self.topology,
                )
            )

    def _rank_levels(self, window: Window) -> Floats:
        """Level over mean of each rank: [num_layers, num_ranks]; 0 for ranks that are gone."""
        assert self.scorer is not None
        loads = self.scorer.rank_loads(window.counts[None])[0]
        mean = loads.sum(-1, keepdims=True) / sum(self.topology.alive)
        result: Floats = loads / self.topology.divisors / np.where(mean > 0, mean, 1.0)
        return result

    def result(self) -> Run:
        """The run."""
        return Run(
            planner=self.spec.label,
            budget=self.budget.label,
            seed=self.settings.seed,
            levels={key: Levels.joined(parts) for key, parts in self.levels.items()},
            batch_windows={size: np.array(at) for size, at in self.batch_windows.items()},
            rank_levels=np.stack(self.rank_levels),
            plans=tuple(self.plans),
            traffic=tuple(self.traffic),
        )


def _record(plan: Plan, window: int, seconds: float) -> PlanRecord:
    by_link: dict[str, int] = {}
    for move in plan.moves:
        for write in move.writes:
            if write.num_bytes:
                by_link[write.link] = by_link.get(write.link, 0) + write.num_bytes
    return PlanRecord(
        window=window,
        seconds=seconds,
        split=plan.split,
        num_copies=plan.num_copies,
        num_bytes=plan.num_bytes,
        bytes_by_link=by_link,
        predicted=plan.after.mean if plan.after else None,
        predicted_worst=plan.after.worst if plan.after else None,
        reason=plan.reason,
    )


def _part_of(progress: Progress | None, index: int, count: int) -> Progress | None:
    """Progress of one of several replays, told as part of all."""
    if progress is None:
        return None

    def report(done: int, total: int, text: str) -> None:
        progress(index * total + done, count * total, text)

    return report
