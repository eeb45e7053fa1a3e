"""What bench_skew runs: one server per workload and planner, all its loads, and their records."""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks import skew_workloads
from benchmarks.bench_serve import result
from benchmarks.load import Cell, Run, Target
from benchmarks.skew_measure import (
    Cost,
    Sample,
    asked,
    check,
    check_sources,
    computed_balancedness,
    measured,
    moved,
    windows,
)
from benchmarks.skew_server import Watched, watched_server
from benchmarks.skew_workloads import Workload
from moeserve import config
from moeserve.model.layers.forced_router import ForcedRouting, make_routing
from moeserve.model.spec import ModelSpec, read_spec

_SOURCE_TOLERANCE = 0.15  # waves of requests start and end at different times
_READY_TIMEOUT_S = 300.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """The settings of a whole benchmark; planners: ``off`` or what --planner takes; spare: slots
    in every layer, over all ranks; extra: more arguments for the server."""

    model: str
    ep: int
    spare: int
    planners: tuple[str, ...]
    workloads: tuple[Workload, ...]
    concurrency: tuple[int, ...]
    input_len: int
    output_len: int
    waves: int
    repetitions: int
    settle_s: float
    poll_s: float
    window_tokens: int
    interval_s: float
    tolerance: float
    server_log: Path
    extra: tuple[str, ...] = ()

    @property
    def spec(self) -> ModelSpec:
        """What is known of the model."""
        return read_spec(config.resolve_model_path(self.model))

    def cell(self, concurrency: int) -> Cell:
        """The load of one measurement."""
        return Cell(
            concurrency=concurrency,
            num_prompts=self.waves * concurrency,
            input_len=self.input_len,
            output_len=self.output_len,
        )

    def arguments(self, workload: Workload, planner: str) -> list[str]:
        """The server's command line, after ``moeserve serve`` and its port."""
        force = [] if workload.forced is None else ["--force-routing", workload.forced]
        manager = [] if planner == "off" else ["--enable-eplb", "--planner", planner]
        return [
            self.model,
            *("--ep", str(self.ep), "--threads-per-rank", "1", "--no-enable-prefix-caching"),
            *("--num-redundant-experts", str(self.spare)),
            *("--window-tokens", str(self.window_tokens)),
            *("--rebalance-interval", f"{self.interval_s:g}"),
            *force,
            *manager,
            *self.extra,
        ]

    def routing(self, workload: Workload) -> ForcedRouting | None:
        """What the workload forces on this model."""
        if workload.forced is None:
            return None
        spec = self.spec
        return make_routing(
            workload.forced,
            layers=spec.moe_layers,
            num_experts=spec.num_experts,
            top_k=spec.top_k,
            num_ranks=self.ep,
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class Measured:
    """One load on one server. balancedness: of the choices under the linear placement and, as the
    ranks computed them, ``computed``; moves: since the server started, and during the load."""

    run: Run
    cost: Cost
    linear: float | None
    computed: float
    expert_share: float | None
    moves: dict[str, Any]
    moves_during: dict[str, Any]


@dataclass(frozen=True, kw_only=True, slots=True)
class Served:
    """One server's whole life: its loads by concurrency, and its balance over time as pairs of
    seconds since the first snapshot and balancedness as computed."""

    loads: dict[int, Measured]
    series: list[tuple[float, float]]


async def serve_and_measure(plan: Plan, workload: Workload, planner: str, seed: str) -> Served:
    """Starts a server, lets its placement settle, measures all loads, and stops it.

    Raises:
        SkewError: the load was not what was asked for, or a request failed.
        ServerFailedError: the server did not start.
    """
    async with watched_server(
        plan.arguments(workload, planner),
        log=plan.server_log,
        timeout_s=_READY_TIMEOUT_S,
        poll_s=plan.poll_s,
    ) as server:
        target = Target(
            address=server.address,
            endpoint="completions",
            model=(await server.get("/v1/models"))["data"][0]["id"],
            vocab_size=plan.spec.vocab_size,
        )
        await _settle(plan, server, workload, planner, target, seed)
        loads = {}
        for concurrency in plan.concurrency:
            cell = plan.cell(concurrency)
            streams = workload.streams(target, cell, plan.ep, f"{seed}/{concurrency}")
            began_s = time.time()
            run, samples = await server.run(streams)
            history = await server.get("/experts/history")
            loads[concurrency] = _measured(plan, workload, cell, run, samples, history, began_s)
        start_s = server.samples[0].time_s
        series = [
            (round(window.time_s - start_s, 2), round(computed_balancedness([window]), 4))
            for window in windows(server.samples)
        ]
        return Served(loads=loads, series=series)


async def _settle(
    plan: Plan, server: Watched, workload: Workload, planner: str, target: Target, seed: str
) -> None:
    """Warms the server up; with a planner until it has decided something, or time is up."""
    largest = max(plan.concurrency)
    cell = plan.cell(largest)
    end = time.perf_counter() + plan.settle_s
    for wave in range(1 << 20):
        await server.run(workload.streams(target, cell, plan.ep, f"{seed}/settle{wave}"))
        if planner == "off" or time.perf_counter() > end:
            return
        entries = (await server.get("/experts/history"))["entries"]
        states = {entry["state"] for entry in entries}
        if states and not states & {"planning", "moving"}:
            return


def _measured(
    plan: Plan,
    workload: Workload,
    cell: Cell,
    run: Run,
    samples: list[Sample],
    history: dict[str, Any],
    began_s: float,
) -> Measured:
    found = windows(samples)
    routing = plan.routing(workload)
    linear = None
    if routing is not None:
        moves = moved(history)
        check(routing, found, tolerance=plan.tolerance, is_static=moves["experts"] == 0)
        shown = measured(routing, found).values()
        linear = statistics.fmean(balance.ranks for balance in shown)
    if workload.streams is skew_workloads.ragged:
        wanted = skew_workloads.source_balancedness(cell.concurrency, plan.ep)
        check_sources(found, wanted, tolerance=_SOURCE_TOLERANCE)
    return Measured(
        run=run,
        cost=Cost.of(found, run.wall_s),
        linear=linear,
        computed=computed_balancedness(found),
        expert_share=history["expert_share"],
        moves=moved(history),
        moves_during=moved(history, began_s),
    )


def record(
    plan: Plan, workload: Workload, planner: str, concurrency: int, loads: Sequence[Measured]
) -> dict[str, Any]:
    """The measured part of a JSON line: medians over the repetitions.

    floor_tokens_per_s: what perfect balance would give, the same run without the time lost.
    """
    routing = plan.routing(workload)
    rates = [load.run.output_tokens_per_s for load in loads]
    floors = [rate * load.cost.floor_factor for rate, load in zip(rates, loads, strict=True)]
    steps = [load.cost.steps for load in loads]
    lost = [load.cost.lost_s for load in loads]
    walls = [load.cost.wall_s for load in loads]
    wanted = None if routing is None else [balance.ranks for balance in asked(routing)]
    return {
        "workload": workload.name,
        "force_routing": workload.forced,
        "planner": planner,
        "ep": plan.ep,
        "spare_slots": plan.spare,
        **result(plan.cell(concurrency), [load.run for load in loads]),
        "balancedness_asked": None if wanted is None else round(statistics.fmean(wanted), 4),
        "balancedness_linear": _median([load.linear for load in loads]),
        "balancedness_computed": _median([load.computed for load in loads]),
        "steps": round(statistics.median(steps)),
        "step_ms": _median([1e3 * w / max(s, 1) for w, s in zip(walls, steps, strict=True)]),
        "lost_ms_per_step": _median(
            [1e3 * x / max(s, 1) for x, s in zip(lost, steps, strict=True)]
        ),
        "lost_share": _median([x / w for x, w in zip(lost, walls, strict=True)]),
        "expert_share": _median([load.expert_share for load in loads]),
        "floor_tokens_per_s": round(statistics.median(floors), 2),
        "share_of_floor": _median([r / f for r, f in zip(rates, floors, strict=True)]),
        "moves": loads[-1].moves,
        "moves_during": loads[-1].moves_during,
    }


def _median(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return round(statistics.median(known), 4) if known else None
