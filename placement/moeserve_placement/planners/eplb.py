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

from moeserve_placement.checks import check_choice, check_integer
from moeserve_placement.load import LoadHistory
from moeserve_placement.placement import Placement
from moeserve_placement.plan import Plan
from moeserve_placement.planners.base import (
    UNLIMITED,
    Budget,
    current_table,
    finished_plan,
    keep_idle_layers,
    register,
)
from moeserve_placement.slot_table import FREE, Floats, Ints, copy_counts, holds, surviving
from moeserve_placement.topology import Topology

Average = Literal["recent", "fast", "slow"]


@register("eplb")
class EplbPlanner:
    """EPLB; hierarchical where the groups divide over the nodes alive and fit, else global.

    average: the load vector: mean of the 'recent' windows (as engines do), the 'fast' or the 'slow'
    average. num_groups: expert groups kept whole on a node (hierarchical policy); 1: global.
    sticky: rename ranks so that most of what they hold stays.

    Raises:
        PlacementError: an option is out of range.
    """

    def __init__(
        self, *, average: Average = "recent", num_groups: int = 1, sticky: bool = False
    ) -> None:
        check_average(average)
        check_integer("num_groups", num_groups, low=1)
        check_choice("sticky", sticky, (True, False))
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


def check_average(average: str) -> None:
    """Raises PlacementError unless ``average_load`` knows it."""
    check_choice("average", average, get_args(Average))


def average_load(history: LoadHistory, average: Average) -> Floats:
    """The load vector per layer that a single-load planner sees: [num_layers, num_experts]."""
    return {"recent": history.mean, "fast": history.fast, "slow": history.slow}[average]


def eplb_table(
    load: Floats, topology: Topology, *, num_groups: int = 1, repeats: bool = False
) -> Ints:
    """EPLB's table for loads [num_layers, num_experts]: [num_layers, num_ranks, max_slots].

    repeats: whether a rank may hold an expert twice, as in the published code; such a table is for
    comparison only, no ``Placement`` takes it. num_groups: kept whole on a node where the experts
    divide into them, they divide over the nodes that have slots, and each node has enough.

    Raises:
        PlacementError: the experts do not fit.
    """
    layers, num_experts = load.shape
    topology.check_fits(num_experts)
    table = np.full((layers, topology.num_ranks, topology.max_slots), FREE, dtype=np.int64)
    by_node = [topology.ranks_of_node(node) for node in range(topology.num_nodes)]
    nodes = [ranks for ranks in by_node if topology.usable_slots[list(ranks)].sum()]
    if _can_keep_groups(num_experts, num_groups, nodes, topology):
        homes = _groups_to_nodes(load, num_groups, len(nodes))
        for node, ranks in enumerate(nodes):
            _fill(table, load, homes == node, topology, ranks, repeats=repeats)
    else:
        everything = np.ones(load.shape, dtype=np.bool_)
        everywhere = [rank for ranks in nodes for rank in ranks]
        _fill(table, load, everything, topology, everywhere, repeats=repeats)
    return table


def _can_keep_groups(
    num_experts: int, num_groups: int, nodes: Sequence[Sequence[int]], topology: Topology
) -> bool:
    if num_groups == 1 or num_groups % len(nodes) or num_experts % num_groups:
        return False
    room = min(int(topology.usable_slots[list(ranks)].sum()) for ranks in nodes)
    return num_experts // len(nodes) <= room


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
    slots = int(room.sum())
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

    Greedy: the pair of ranks with most experts in common first; only ranks of one node, of equally
    many slots and of one speed may swap names, so that levels, node loads and sizes stay.
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
    nodes, slot counts or speeds, or a rank that is gone.
    """
    experts = int(max(target.max(), current.max())) + 1
    new = holds(target, experts).astype(np.float32)
    old = holds(current, experts).astype(np.float32)
    common = (np.swapaxes(new, 1, 2) @ old).astype(np.float64)
    kinds = np.stack([topology.nodes, topology.slots_per_rank, topology.speed_of_rank], axis=1)
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


def least_new_copies(load: Floats, current: Ints, topology: Topology) -> Ints:
    """Copies that EPLB needs wherever it puts them, told before packing: int64 [num_layers].

    Those it wants beyond the number that an expert has, less those that packing might leave out: a
    copy surely finds a rank while more ranks have room than can hold the expert already.
    """
    room = topology.usable_slots
    wanted = replica_counts(load, topology.num_slots, most=int((room > 0).sum()))
    missing = (wanted - copy_counts(current, load.shape[1])).clip(min=0).sum(1)
    order = np.argsort(-load / wanted, axis=1, kind="stable")
    copies = np.take_along_axis(wanted, order, axis=1)
    left = topology.num_slots - copies.cumsum(1) + 1  # slots before the last copy of each expert
    unsure = copies > -(-left // room.max())
    result: Ints = missing - np.where(unsure, copies - 1, 0).sum(1)
    return result
