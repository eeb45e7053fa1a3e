"""Why each expert moved, in words, from a plan file alone.

The facts come from the load that the plan was made for with an even split: how hot an expert is,
which rank was fullest before a move and how full it is afterwards.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from moeserve_placement.placement import PlacementError
from moeserve_placement.plan import Move, SlotWrite
from moeserve_placement.report.plan_file import PlanFile
from moeserve_placement.report.words import counted
from moeserve_placement.slot_table import (
    FREE,
    Floats,
    Ints,
    copy_counts,
    rank_loads,
    slot_table,
    surviving,
)

_SAME = 0.0005  # imbalance that rounds away in the text
_TOGETHER = 3  # slots that change in one sentence; more get a line each
_HOT = 1.5  # load over mean from which an expert is called hot


def explain(plan: PlanFile, *, layers: set[int] | None = None) -> Iterator[str]:
    """The reason, then a text per move in order; for a cold start one per layer.

    A text is a sentence or two, with a line for each slot where many change in one step.

    layers: only what concerns these model layers; None: all.

    Raises:
        PlacementError: the plan has no such layer.
    """
    unknown = (layers or set()) - set(plan.layer_ids)
    if unknown:
        raise PlacementError(f"layer {min(unknown)}: the plan has layers {_listed(plan.layer_ids)}")
    named = plan.reason.startswith(f"{plan.planner}:")
    yield plan.reason if named else f"{plan.planner}: {plan.reason}"
    if plan.current is None:
        for row, layer in enumerate(plan.layer_ids):
            if layers is None or layer in layers:
                yield _cold_sentence(plan, row, layer)
        return
    tables = slot_table(plan.current, plan.layer_ids, topology=plan.topology)
    rows = {layer: row for row, layer in enumerate(plan.layer_ids)}
    for number, move in enumerate(plan.moves, start=1):
        row = rows[move.layer]
        before = tables[row].copy()
        for write in move.writes:
            tables[row][write.rank, write.slot] = FREE if write.expert is None else write.expert
        if layers is None or move.layer in layers:
            yield f"{number}. {_sentence(plan, move, row, before, tables[row])}"


def _sentence(plan: PlanFile, move: Move, row: int, before: Ints, after: Ints) -> str:
    """What one move does, and why."""
    heat = _heat(plan, row)
    deeds = [_deed(write, before, heat) for write in move.writes]
    why = _why(plan, move, row, before, after)
    if len(deeds) <= _TOGETHER:
        return f"layer {move.layer}: {'; '.join(deeds)}. {why}"
    lines = [f"layer {move.layer}: {len(deeds)} slots change in one step. {why}"]
    return "\n".join([*lines, *(f"   - {deed}" for deed in deeds)])


def _deed(write: SlotWrite, before: Ints, heat: Floats) -> str:
    place = f"rank {write.rank} (slot {write.slot})"
    if write.expert is None:
        return f"{place} gives up expert {write.replaces}"
    copies = int((before == write.expert).sum())
    source = "host memory" if write.source_rank is None else f"rank {write.source_rank}"
    have = f"{copies} {'copy' if copies == 1 else 'copies'} so far"
    deed = f"expert {write.expert} ({heat[write.expert]:.2f} x the mean expert, {have})"
    deed += f" is copied from {source}"
    if write.link == "fabric":
        deed += " on another node"
    return f"{deed} to {place}{_in_place_of(write, before)}"


def _in_place_of(write: SlotWrite, before: Ints) -> str:
    if write.replaces is None:
        return ", a free slot"
    others = int((before == write.replaces).sum()) - 1
    if others < 1:
        return f" in place of expert {write.replaces}, which moves in the same step"
    return f" in place of expert {write.replaces}, which keeps {others} more"


def _why(plan: PlanFile, move: Move, row: int, before: Ints, after: Ints) -> str:
    """The effect on the fullest rank and on the layer; another reason where balance gets worse."""
    was, now = _levels(plan, row, before), _levels(plan, row, after)
    if was is None or now is None:
        return "Why: experts that have no copy on any rank alive come back."
    if not any(write.num_bytes for write in move.writes):
        return "Nothing is copied; the rank is gone or the slot is not needed."
    full = int(was.argmax())
    change = float(now.max() - was.max())
    imbalance = f"imbalance {was.max():.3f} -> {now.max():.3f}"
    if change < -_SAME:
        return (
            f"Why: rank {full} was the fullest, {was[full]:.3f} x the mean, and is now at "
            f"{now[full]:.3f}; {imbalance}."
        )
    if move.gain is not None and move.gain > 0:
        several = plan.topology.num_nodes > 1
        goal = "fewer nodes per token or for traffic" if several else "traffic"
        return (
            f"Why: for {goal} other than the average (objective gains {move.gain:.4f}); on the "
            f"average load {imbalance}."
        )
    if change > _SAME:
        return f"A step on the way to the planned placement, alone it costs balance: {imbalance}."
    return f"A step on the way to the planned placement; {imbalance}."


def _cold_sentence(plan: PlanFile, row: int, layer: int) -> str:
    """How a layer is placed from nothing: which experts got copies, and how full ranks are."""
    table = slot_table(plan.placement, plan.layer_ids, topology=plan.topology)[row]
    copies = copy_counts(table[None], plan.placement.num_experts)[0]
    heat = _heat(plan, row)
    spread = [int(e) for e in np.argsort(-heat, kind="stable") if copies[e] > 1]
    levels = _levels(plan, row, table)
    shown = [f"{e} ({heat[e]:.2f} x the mean, {copies[e]} copies)" for e in spread[:4]]
    more = f" and {len(spread) - 4} more" if len(spread) > 4 else ""
    extra = f"copies for experts {', '.join(shown)}{more}" if shown else "no expert has copies"
    if levels is None:
        return f"layer {layer}: {extra}."
    full = int(levels.argmax())
    hot = int((heat >= _HOT).sum())
    carry = f"{counted(hot, 'expert')} {'carries' if hot == 1 else 'carry'}"
    return (
        f"layer {layer}: {extra}. {carry} {_HOT} x the mean or more; the fullest rank "
        f"is {full} at {levels[full]:.3f} x the mean."
    )


def _heat(plan: PlanFile, row: int) -> Floats:
    """Load of each expert over the mean expert: [num_experts]; 1 where there is no load."""
    mean = plan.load[row].mean()
    result: Floats = plan.load[row] / mean if mean > 0 else np.ones(plan.load.shape[1])
    return result


def _levels(plan: PlanFile, row: int, table: Ints) -> Floats | None:
    """Level of each rank over the mean, even split; None where an expert is nowhere."""
    alive = surviving(table[None], plan.topology)
    if (copy_counts(alive, plan.placement.num_experts) < 1).any():
        return None
    loads = rank_loads(plan.load[row : row + 1], alive)[0]
    speeds = plan.topology.speeds
    mean = loads.sum() / sum(plan.topology.alive)
    if mean <= 0:
        return np.ones(len(loads))
    result: Floats = np.divide(loads / mean, speeds, out=np.zeros(len(loads)), where=speeds > 0)
    return result


def _listed(layers: tuple[int, ...]) -> str:
    return ", ".join(map(str, layers[:8])) + (" ..." if len(layers) > 8 else "")
