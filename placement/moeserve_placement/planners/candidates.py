"""The placements that the scenario planner chooses from."""

from __future__ import annotations

import math

import numpy as np

from moeserve_placement.fanout import pair_gains
from moeserve_placement.load import LoadHistory, Scenarios
from moeserve_placement.objective import Objective
from moeserve_placement.planners.cold_start import cold_table
from moeserve_placement.planners.eplb import eplb_table
from moeserve_placement.planners.local_search import search
from moeserve_placement.planners.node_packing import best_homes, node_packed_table
from moeserve_placement.planners.problem import Effort, Problem, Step
from moeserve_placement.planners.sliding_cut import sliding_cut_table
from moeserve_placement.slot_table import FREE, Floats, Ints, copy_counts
from moeserve_placement.topology import Topology

_TOLERANCE = 2e-5  # of the objective per copy, where copies are free
_THOROUGH = Effort(width=16, depth=4, rounds=200)
_QUICK = Effort(width=4, depth=1)
_LARGEST_EXPONENT = 280  # decimal, of a p-th power: leaves room for products with it
_LARGE = 200  # slots of a layer from which a cold start gets the quick search: 10 ms a layer


def balance_problem(
    objective: Objective, scenarios: Scenarios, history: LoadHistory, topology: Topology
) -> Problem:
    """The scenarios as a problem over the ranks that are alive."""
    alive = np.flatnonzero(topology.alive)
    pairs = None
    if objective.counts_nodes(history, topology):
        pairs = objective.remote_weight * pair_gains(history, topology)
    return Problem(
        loads=np.moveaxis(scenarios.loads, 0, -1) * len(alive),
        weights=scenarios.weights,
        speeds=topology.speeds[alive],
        room=topology.usable_slots[alive],
        power=_search_power(int(objective.power), topology.speeds[alive]),
        nodes=topology.nodes[alive],
        pair_gain=pairs,
    )


def _search_power(power: int, speeds: Floats) -> int:
    """The power, halved until a rank that has all the load stays within float64."""
    most = math.log10(len(speeds) / speeds.min())
    while power > 2 and power * most > _LARGEST_EXPONENT:
        power //= 2
    return power


def cold_candidates(
    objective: Objective, scenarios: Scenarios, history: LoadHistory, topology: Topology
) -> dict[str, Ints]:
    """Whole placements by name, EPLB's among them: [num_layers, num_ranks, max_slots] each."""
    problem = balance_problem(objective, scenarios, history, topology)
    found = {"scenario": _refined(problem, cold_table(problem))}
    if problem.pair_gain is not None:
        homes = best_homes(problem)
        found["nodes"] = _refined(problem, node_packed_table(problem, homes, guests=False))
        if topology.num_slots > history.num_experts:
            found["guests"] = _refined(problem, node_packed_table(problem, homes, guests=True))
    tables = {name: _on_all_ranks(table, topology) for name, table in found.items()}
    tables["eplb"] = eplb_table(history.mean, topology)
    if objective.split != "even" and topology.num_slots > history.num_experts:
        cut = sliding_cut_table(scenarios.mean, topology)
        whole = copy_counts(cut, history.num_experts).min(1) > 0
        tables["cut"] = np.where(whole[:, None, None], cut, tables["eplb"])
    return tables


def incremental(
    problem: Problem, base: Ints, topology: Topology, *, copies: float, copy_price: float
) -> list[list[Step]]:
    """Per layer the improving steps from ``base``, with ranks as in the topology.

    copies: budget over all layers; a layer looks for up to a quarter more than its even part of
    it, since layers differ. copy_price: what a copy must gain.
    """
    alive = np.flatnonzero(topology.alive)
    part = 1 << 30 if np.isinf(copies) else int(1.25 * copies / len(base)) + 2
    _, steps = search(
        problem,
        base[:, alive],
        max_copies=part,
        min_gain=max(copy_price, _TOLERANCE),
        freeze=True,
        effort=_QUICK,
    )
    return [
        [
            Step(
                writes=tuple((int(alive[rank]), slot, e) for rank, slot, e in step.writes),
                copies=step.copies,
                gain=step.gain,
            )
            for step in layer
        ]
        for layer in steps
    ]


def apply_steps(table: Ints, steps: list[Step]) -> Ints:
    """One layer's table [num_ranks, max_slots] after these steps."""
    result = table.copy()
    for step in steps:
        for rank, slot, expert in step.writes:
            result[rank, slot] = expert
    return result


def _refined(problem: Problem, table: Ints) -> Ints:
    refined, _ = search(
        problem,
        table,
        max_copies=1 << 30,
        min_gain=_TOLERANCE,
        freeze=False,
        effort=_QUICK if int(problem.room.sum()) >= _LARGE else _THOROUGH,
    )
    return refined


def _on_all_ranks(table: Ints, topology: Topology) -> Ints:
    """A table of the ranks alive, with empty rows for those that are gone."""
    full = np.full((len(table), topology.num_ranks, topology.max_slots), FREE, dtype=np.int64)
    full[:, np.flatnonzero(topology.alive), : table.shape[2]] = table
    return full
