"""EPLB: copies for the hottest experts, then the fullest copy to the emptiest rank.

Written from the published description of DeepSeek's Expert Parallelism Load Balancer, vectorised
over layers. It looks at one load vector per layer and takes an even split. Two differences, both
needed for a valid placement: a copy never goes to a rank that has the expert already (the
published packing wastes such slots; ``repeats`` gives it for comparison), and experts, copies and
ranks need not divide.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, get_args

import numpy as np

from moeserve_placement.load import LoadHistory
from moeserve_placement.placement import Placement, PlacementError
from moeserve_placement.plan import Plan
from moeserve_placement.planners.base import (
    UNLIMITED,
    Budget,
    current_table,
    finished_plan,
    keep_idle_layers,
    register,
)
from moeserve_placement.slot_table import FREE, Floats, Ints, holds, surviving
from moeserve_placement.topology import Topology

Average = Literal["recent", "fast", "slow"]


@register("eplb")
class EplbPlanner:
    """EPLB; hierarchical where ``num_groups`` is above 1 and divides over the nodes, else global.

    average: the load vector: mean of the 'recent' windows (as engines do), the 'fast' or the 'slow'
    average. num_groups: expert groups kept whole on a node (hierarchical policy).
    sticky: rename ranks so that most of what they hold stays.

    Raises:
        PlacementError: an option is out of range.
    """

    def __init__(
        self, *, average: Average = "recent", num_groups: int = 1, sticky: bool = False
    ) -> None:
        if average not in get_args(Average):
            raise PlacementError(f"average = {average!r}: must be recent, fast or slow")
        if num_groups < 1:
            raise PlacementError(f"num_groups = {num_groups}: must be at least 1")
        self.name = "eplb-sticky" if sticky else "eplb"
        self.average = average
        self.num_groups = num_groups
        self.sticky = sticky

    def plan(
        self,
        history: LoadHistory,
        topology: Topology,
        *,
        current: Placement | None = None,
        budget: Budget = UNLIMITED,
    ) -> Plan:
        """The plan for one average load; layers without load stay as they are."""
        load = average_load(history, self.average)
        target = eplb_table(load, topology, num_groups=self.num_groups)
        target = keep_idle_layers(target, history, topology, current=current)
        now = current_table(current, history, topology)
        if self.sticky and now is not None:
            here = surviving(now, topology)
            target = np.stack(
                [relabelled(t, h, topology) for t, h in zip(target, here, strict=True)]
            )
        reason = f"{self.name}: packed for the {self.average} average of the load"
        if history.is_empty:
            reason = f"{self.name}: no load observed yet"
        return finished_plan(
            self.name, target, history, topology, current=current, budget=budget, reason=reason
        )


@register("eplb-sticky")
def _sticky(*, average: Average = "recent", num_groups: int = 1) -> EplbPlanner:
    return EplbPlanner(average=average, num_groups=num_groups, sticky=True)


@register("eplb-hierarchical")
def _hierarchical(*, average: Average = "recent", num_groups: int = 8) -> EplbPlanner:
    planner = EplbPlanner(average=average, num_groups=num_groups)
    planner.name = "eplb-hierarchical"
    return planner


def average_load(history: LoadHistory, average: Average) -> Floats:
    """The load vector per layer that a single-load planner sees: [num_layers, num_experts]."""
    return {"recent": history.mean, "fast": history.fast, "slow": history.slow}[average]


def eplb_table(
    load: Floats, topology: Topology, *, num_groups: int = 1, repeats: bool = False
) -> Ints:
    """EPLB's table for loads [num_layers, num_experts]: [num_layers, num_ranks, max_slots].

    repeats: whether a rank may hold an expert twice, as in the published code; such a table is for
    comparison only, no ``Placement`` takes it.

    Raises:
        PlacementError: the experts do not fit, or do not divide into ``num_groups``.
    """
    layers, num_experts = load.shape
    topology.check_fits(num_experts)
    if num_experts % num_groups:
        raise PlacementError(
            f"num_groups = {num_groups}: must divide {num_experts}, the number of experts"
        )
    nodes = [topology.ranks_of_node(node) for node in range(topology.num_nodes)]
    table = np.full((layers, topology.num_ranks, topology.max_slots), FREE, dtype=np.int64)
    if num_groups > 1 and num_groups % topology.num_nodes == 0:
        homes = _groups_to_nodes(load, num_groups, topology.num_nodes)
        for node, ranks in enumerate(nodes):
            _fill(table, load, homes == node, topology, ranks, repeats=repeats)
    else:
        everything = np.ones(load.shape, dtype=np.bool_)
        everywhere = [rank for ranks in nodes for rank in ranks]
        _fill(table, load, everything, topology, everywhere, repeats=repeats)
    return table


def replica_counts(load: Floats, num_slots: int, *, most: int) -> Ints:
    """Copies per expert that minimise the hottest copy: int64, shaped as ``load``.

    load: [num_layers, num_experts]; negative entries get no copy. Every other expert gets one, then
    each spare slot goes to the expert with the largest load per copy, up to ``most`` copies.
    """
    counts = (load >= 0).astype(np.int64)
    rows = np.arange(len(load))
    spare = num_slots - int(counts.sum(1).max())
    heat = np.where(counts > 0, load, -1.0)
    for _ in range(spare):
        hottest = heat.argmax(1)
        rows_left = heat[rows, hottest] >= 0
        row, expert = rows[rows_left], hottest[rows_left]
        counts[row, expert] += 1
        full = counts[row, expert] >= most
        heat[row, expert] = np.where(full, -1.0, load[row, expert] / counts[row, expert])
    return counts


def pack(unit: Floats, counts: Ints, room: Ints, *, repeats: bool = False) -> Ints:
    """Heaviest copy first to the emptiest rank with room: table [num_layers, ranks, max room].

    unit, counts: load per copy and copies, [num_layers, num_experts]. room: slots by rank. A copy
    for which no rank has room and lacks the expert is left out; an expert's first copy never is.
    repeats: whether a rank may get a copy of what it has.
    """
    layers, num_experts = unit.shape
    ranks = len(room)
    table = np.full((layers, ranks, int(room.max())), FREE, dtype=np.int64)
    loads, used = np.zeros((layers, ranks)), np.zeros((layers, ranks), dtype=np.int64)
    held = np.zeros((layers, num_experts, ranks), dtype=np.bool_)
    rows = np.arange(layers)
    for expert in heaviest_first(unit, counts).T:
        row = rows[expert >= 0]
        expert = expert[expert >= 0]
        blocked = (used[row] >= room) | held[row, expert]
        rank = np.where(blocked, np.inf, loads[row]).argmin(1)
        fits = ~blocked[np.arange(len(row)), rank]
        row, expert, rank = row[fits], expert[fits], rank[fits]
        table[row, rank, used[row, rank]] = expert
        used[row, rank] += 1
        loads[row, rank] += unit[row, expert]
        held[row, expert, rank] = not repeats
    return table


def heaviest_first(unit: Floats, counts: Ints) -> Ints:
    """Expert of each copy, heaviest first; first copies before spare ones of no load; -1 pads."""
    layers = len(unit)
    width = int(counts.sum(1).max())
    result = np.full((layers, width), -1, dtype=np.int64)
    for row in range(layers):
        order = np.argsort(-unit[row], kind="stable")
        items = np.repeat(order, counts[row, order])
        result[row, : len(items)] = items
    return result


def _fill(
    table: Ints,
    load: Floats,
    mine: np.ndarray,
    topology: Topology,
    ranks: Sequence[int],
    *,
    repeats: bool,
) -> None:
    """Packs the experts of ``mine`` [num_layers, num_experts] on these ranks, into ``table``."""
    room = topology.usable_slots[list(ranks)]
    slots, experts = int(room.sum()), int(mine.sum(1).max())
    if slots < experts:
        raise PlacementError(f"slots: a node has {slots} usable slots for {experts} experts")
    most = slots if repeats else int((room > 0).sum())
    counts = replica_counts(np.where(mine, load, -1.0), slots, most=most)
    unit = load / np.maximum(counts, 1)
    packed = pack(unit, counts, room, repeats=repeats)
    table[:, list(ranks), : packed.shape[-1]] = packed


def _groups_to_nodes(load: Floats, num_groups: int, num_nodes: int) -> Ints:
    """The node of each expert: whole groups, heaviest to the emptiest node, equally many each."""
    layers, num_experts = load.shape
    sums = load.reshape(layers, num_groups, -1).sum(-1)
    room = np.full(num_nodes, num_groups // num_nodes)
    packed = pack(sums, np.ones(sums.shape, dtype=np.int64), room)
    homes = np.zeros((layers, num_groups), dtype=np.int64)
    for node in range(num_nodes):
        homes[np.arange(layers)[:, None], packed[:, node]] = node
    return np.repeat(homes, num_experts // num_groups, axis=1)


def relabelled(target: Ints, current: Ints, topology: Topology) -> Ints:
    """One layer's ``target`` with ranks renamed so that most of what they hold stays.

    Greedy: the pair of ranks with most experts in common first; only ranks of one node and of
    equally many slots may swap names, so neither node loads nor sizes change.
    """
    overlap = overlaps(target[None], current[None], topology)[0]
    result = target.copy()
    for _ in range(int(np.count_nonzero(topology.alive))):
        source, rank = np.unravel_index(int(overlap.argmax()), overlap.shape)
        result[rank] = target[source]
        overlap[source] = overlap[:, rank] = -np.inf
    return result


def overlaps(target: Ints, current: Ints, topology: Topology) -> Floats:
    """Experts in common of a target rank and a current one, where they may swap names.

    [num_layers, num_ranks of target, num_ranks of current]; -inf where they may not: different
    nodes or slot counts, or a rank that is gone.
    """
    experts = int(max(target.max(), current.max())) + 1
    new = holds(target, experts).astype(np.float32)
    old = holds(current, experts).astype(np.float32)
    common = (np.swapaxes(new, 1, 2) @ old).astype(np.float64)
    kinds = np.stack([topology.nodes, np.asarray(topology.slots_per_rank)], axis=1)
    common[:, (kinds[:, None] != kinds[None]).any(-1)] = -np.inf
    dead = ~np.asarray(topology.alive)
    common[:, dead] = common[:, :, dead] = -np.inf
    return common


def least_copies(target: Ints, current: Ints, topology: Topology) -> Ints:
    """Copies that no renaming of ranks can save: int64 [num_layers]."""
    alive = np.asarray(topology.alive)
    best = overlaps(target, current, topology).max(2)[:, alive]
    result: Ints = ((target[:, alive] >= 0).sum(2) - best).sum(1).astype(np.int64)
    return result
