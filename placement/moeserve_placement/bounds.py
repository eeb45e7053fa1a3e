"""What no placement can beat, whatever the split of experts over their copies; exact optima.

``lower_bound`` is fast and valid for every placement; ``exact_optimum`` solves small cases as a
mixed-integer program and needs the extra ``exact`` (highspy).
"""

from __future__ import annotations

from typing import Any

import numpy as np

from moeserve_placement.checks import check_choice
from moeserve_placement.placement import PlacementError
from moeserve_placement.planners.eplb import replica_counts
from moeserve_placement.slot_table import Floats
from moeserve_placement.topology import Topology


def lower_bound(load: Floats, topology: Topology) -> Floats:
    """The least largest level (load over speed) per layer that any placement could have.

    load: [num_layers, num_experts], finite and not negative. Returns float64 [num_layers], the
    maximum of: the mean level; the hottest copy, were all spare slots used against it; and with few
    spare slots the pigeonhole bounds of what must share a rank.

    Raises:
        PlacementError: the load is not such an array, or the experts do not fit.
    """
    _check_load(load, num_dims=2)
    topology.check_fits(load.shape[1])
    room = topology.usable_slots[topology.usable_slots > 0]
    speeds = topology.speeds[topology.usable_slots > 0]
    counts = replica_counts(load, int(room.sum()), most=len(room))
    hottest = (load / counts).max(1) / speeds.max()
    mean = load.sum(1) / speeds.sum()
    bound = np.maximum(mean, hottest)
    if room.sum() == load.shape[1]:
        bound = np.maximum(bound, _without_spares(load, int(room.max()), len(room)) / speeds.max())
    result: Floats = np.maximum(bound, _pigeonhole(load, room, int(room.sum())) / speeds.max())
    return result


def _check_load(load: Floats, *, num_dims: int) -> None:
    if load.ndim != num_dims or not load.size:
        raise PlacementError(f"load: has shape {load.shape}, must have {num_dims} dimensions")
    if not (np.isfinite(load).all() and (load >= 0).all()):
        raise PlacementError("load: must be finite and 0 or more")


def _without_spares(load: Floats, slots: int, ranks: int) -> Floats:
    """Every slot is needed: the hottest expert shares its rank, at least with the coldest.

    Only for equal ranks; with unequal ones its rank may be the one with a single slot.
    """
    ordered = np.sort(load, axis=1)
    if slots * ranks != load.shape[1]:
        hottest: Floats = ordered[:, -1]
        return hottest
    result: Floats = ordered[:, -1] + ordered[:, : slots - 1].sum(1)
    return result


def _pigeonhole(load: Floats, room: Floats | Any, num_slots: int) -> Floats:
    """Of the hottest k * ranks + 1 experts some k + 1 share a rank, at least the coldest of them.

    Valid for whole experts only (of one with several copies a part may be there), so where there
    is no spare slot.
    """
    bound: Floats = np.zeros(len(load))
    if num_slots > load.shape[1]:
        return bound
    ranks = len(room)
    ordered = -np.sort(-load, axis=1)
    for shared in range(1, int(room.max())):
        last = shared * ranks + 1
        if last <= load.shape[1]:
            bound = np.maximum(bound, ordered[:, last - shared - 1 : last].sum(1))
    return bound


def exact_optimum(load: Floats, topology: Topology, *, split: str = "any") -> float:
    """The least largest level of one layer over all placements, by mixed-integer programming.

    load: [num_experts]. split: 'any': an expert's tokens go to its copies in any proportion;
    'even': in equal parts. For small cases: experts x ranks binaries, twice as many for 'even'.

    Raises:
        PlacementError: highspy is not installed, an unknown split, a load that is not finite and 0
            or more, or no solution was found.
    """
    check_choice("split", split, ("any", "even"))
    _check_load(load, num_dims=1)
    topology.check_fits(len(load))
    try:
        import highspy  # type: ignore[import-not-found, unused-ignore]
    except ImportError as error:
        raise PlacementError("exact_optimum: needs highspy, install moeserve[exact]") from error
    model = highspy.Highs()
    model.setOptionValue("output_flag", False)
    model.setOptionValue("mip_rel_gap", 1e-9)
    ranks = [int(rank) for rank in np.flatnonzero(topology.usable_slots)]
    most = 1.0 if split == "any" else float(len(ranks))
    level = model.addVariable(lb=0.0)
    placed = {(e, g): model.addBinary() for e in range(len(load)) for g in ranks}
    share = {key: model.addVariable(lb=0.0, ub=1.0) for key in placed}
    for expert in range(len(load)):
        model.addConstr(sum(share[expert, g] for g in ranks) == 1)
        for g in ranks:
            model.addConstr(share[expert, g] <= placed[expert, g])
        if split == "even":
            _force_even(model, expert, ranks, placed, share, int(most))
    for g in ranks:
        model.addConstr(
            sum(placed[e, g] for e in range(len(load))) <= int(topology.usable_slots[g])
        )
        loads = sum(
            float(load[e]) / float(topology.speeds[g]) * share[e, g] for e in range(len(load))
        )
        model.addConstr(loads <= level)
    model.minimize(level)
    if model.getModelStatus() != highspy.HighsModelStatus.kOptimal:
        raise PlacementError(f"exact_optimum: the solver ended with {model.getModelStatus()}")
    return float(model.getObjectiveValue())


def _force_even(
    model: Any, expert: int, ranks: list[int], placed: Any, share: Any, most: int
) -> None:
    """One binary per number of copies; with n copies each share is 1 / n or 0."""
    number = [model.addBinary() for _ in range(most)]
    model.addConstr(sum(number) == 1)
    model.addConstr(
        sum((n + 1) * number[n] for n in range(most)) == sum(placed[expert, g] for g in ranks)
    )
    part = sum(1.0 / (n + 1) * number[n] for n in range(most))
    for g in ranks:
        model.addConstr(share[expert, g] <= part)
