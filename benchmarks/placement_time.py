"""Planning time per layer at 256 experts x 64 ranks, and shares for 64 layers at once."""

from __future__ import annotations

import time
from collections.abc import Callable

import numpy as np

from benchmarks.placement_data import zipf_loads
from benchmarks.placement_lines import Line
from moeserve_placement.load import LoadHistory
from moeserve_placement.planners import Budget, get_planner
from moeserve_placement.planners.eplb import eplb_table
from moeserve_placement.shares import ShareSolver
from moeserve_placement.slot_table import slot_table
from moeserve_placement.topology import Topology

_EXPERTS, _RANKS, _SLOTS, _LAYERS = 256, 64, 5, 64
_REPEATS = 5


def run() -> list[Line]:
    """The time lines: CPU time of one thread, the least of several repetitions."""
    topology = Topology.uniform(_RANKS, _SLOTS)
    history, drifted = _history()
    load = history.mean
    eplb_ms = _least(lambda: eplb_table(load, topology)) / _LAYERS
    planner = get_planner("scenario")
    cold = planner.plan(history, topology)
    cold_ms = _least(lambda: planner.plan(history, topology), repeats=2) / _LAYERS
    budget = Budget(max_copies=16 * _LAYERS)
    step = planner.plan(drifted, topology, current=cold.placement, budget=budget)
    step_ms = (
        _least(
            lambda: planner.plan(drifted, topology, current=cold.placement, budget=budget),
            repeats=5,
        )
        / _LAYERS
    )
    setting = f"{_EXPERTS} experts, {_RANKS} x {_SLOTS}, {_LAYERS} layers at once"
    return [
        Line(
            section="time",
            what="incremental plan, ms a layer",
            setting=setting,
            value=step_ms,
            limit=2.0,
            eplb=eplb_ms,
            details={"copies_a_layer": step.num_copies / _LAYERS, "ratio": step_ms / eplb_ms},
        ),
        Line(
            section="time",
            what="cold start, ms a layer",
            setting=setting,
            value=cold_ms,
            limit=10.0,
            eplb=eplb_ms,
            details={"ratio": cold_ms / eplb_ms},
        ),
        *_share_lines(topology, slot_table(cold.placement, history.layer_ids), load, setting),
    ]


def _share_lines(
    topology: Topology, table: np.ndarray, load: np.ndarray, setting: str
) -> list[Line]:
    """Shares of batches drawn from the load; of another load; and preparing a placement."""
    rng = np.random.default_rng(2)
    batch = np.stack([rng.multinomial(4096 * 8, row / row.sum()) for row in load])
    other = np.stack(
        [rng.multinomial(4096 * 8, row) for row in zipf_loads(_EXPERTS, 1.0, _LAYERS, rng)]
    )
    solver = ShareSolver(table, _EXPERTS, nominal=load)
    found = solver.solve(batch)
    gap = float((found.rank_loads.max(1) / found.bound).max() - 1)
    eplb_solver = ShareSolver(eplb_table(load, topology), _EXPERTS, nominal=load)
    prepare = _least(lambda: ShareSolver(table, _EXPERTS, nominal=load), repeats=2)
    return [
        Line(
            section="time",
            what="shares of a batch, ms in all",
            setting=setting,
            split="batch",
            value=_least(lambda: solver.solve(batch)),
            limit=10.0,
            details={
                "on_eplb_placement_ms": _least(lambda: eplb_solver.solve(batch)),
                "gap_to_bound": gap,
            },
        ),
        Line(
            section="time",
            what="shares of a batch of unforeseen traffic, ms in all",
            setting=setting,
            split="batch",
            value=_least(lambda: solver.solve(other), repeats=2),
        ),
        Line(
            section="time",
            what="preparing shares for a placement, ms in all",
            setting=setting,
            split="batch",
            value=prepare,
        ),
    ]


def _history() -> tuple[LoadHistory, LoadHistory]:
    """Eight distinct windows (as many scenarios as the planner may get), and some drift after."""
    rng = np.random.default_rng(0)
    base = zipf_loads(_EXPERTS, 0.9, _LAYERS, rng)
    kinds = [base * rng.lognormal(0.0, 0.4, base.shape) for _ in range(6)]
    histories = []
    for drift in (0.0, 0.15):
        history = LoadHistory(range(_LAYERS), _EXPERTS)
        for turn in range(3):
            for kind in kinds:
                noise = rng.lognormal(0.0, drift, base.shape) if turn == 2 else 1.0
                history.observe(np.floor(1e6 * kind * noise / kind.sum(1, keepdims=True)))
        histories.append(history)
    return histories[0], histories[1]


def _least(work: Callable[[], object], *, repeats: int = _REPEATS) -> float:
    """CPU milliseconds of the fastest of several runs, less disturbed by other work."""
    times = []
    for _ in range(repeats):
        start = time.process_time()
        work()
        times.append(time.process_time() - start)
    return 1e3 * min(times)
