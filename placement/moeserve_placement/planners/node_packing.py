"""Experts that fire together on one node: fewer nodes per token, without losing the balance.

First every expert gets a home node: pair swaps, best first, on the smooth maximum of node load less
the gain of the pairs that share a node. Load is a price, not a constraint, so there is always an
answer. Then spare slots of a node take guests: copies of experts at home elsewhere that its own
experts call for most. Last, each node places what it has on its ranks.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from moeserve_placement.fanout import meeting_gains
from moeserve_placement.planners.cold_start import place, worst_share
from moeserve_placement.planners.eplb import pack, replica_counts
from moeserve_placement.planners.problem import Problem, raised
from moeserve_placement.slot_table import FREE, Floats, Ints

_SCREENED = 128  # swaps whose load is computed exactly, of all that were ranked to first order
_MAX_SWAPS = 1000
_STARTS = 6  # swaps end in a local optimum; the first start is balanced, the others are random


def best_homes(problem: Problem) -> Ints:
    """The node (position among the nodes with ranks alive) of each expert: [A, num_experts].

    ``problem.pair_gain`` must be given.
    """
    assert problem.pair_gain is not None
    room, speeds = _node_sizes(problem)
    homes = _balanced_homes(problem, room)
    rng = np.random.default_rng(0)  # the same plan for the same load
    for row in range(len(homes)):
        starts = [homes[row], *(rng.permutation(homes[row]) for _ in range(_STARTS - 1))]
        worth = [
            _swap_homes(
                start,
                problem.loads[row],
                problem.pair_gain[row],
                weights=problem.weights,
                speeds=speeds,
                power=problem.power,
            )
            for start in starts
        ]
        homes[row] = starts[int(np.argmin(worth))]
    return homes


def node_packed_table(problem: Problem, homes: Ints, *, guests: bool) -> Ints:
    """Tables [A, G, max_slots] with every expert on a rank of its home node.

    guests: whether spare slots go to experts at home on other nodes, or to further copies of a
    node's own.
    """
    assert problem.pair_gain is not None
    room, _ = _node_sizes(problem)
    layers, experts = homes.shape
    present = np.zeros((layers, experts, len(room)), dtype=np.bool_)
    for row in range(layers):
        present[row, np.arange(experts), homes[row]] = True
        if guests:
            _invite(present[row], problem.pair_gain[row], room)
    return _place_nodes(problem, present, np.unique(problem.nodes))


def _node_sizes(problem: Problem) -> tuple[Ints, Floats]:
    """Slots and speed of each node that has a rank alive."""
    members = [problem.nodes == node for node in np.unique(problem.nodes)]
    room = np.array([problem.room[mine].sum() for mine in members])
    return room, np.array([problem.speeds[mine].sum() for mine in members])


def _balanced_homes(problem: Problem, room: Ints) -> Ints:
    """The node of each expert, [A, num_experts]: balanced, each node its part of the experts."""
    experts = problem.loads.shape[1]
    quota = np.floor(room * experts / room.sum()).astype(np.int64)
    quota[np.argsort(-(room - quota), kind="stable")[: experts - quota.sum()]] += 1
    peak = worst_share(problem)
    packed = pack(peak, np.ones(peak.shape, dtype=np.int64), quota)
    homes = np.zeros(peak.shape, dtype=np.int64)
    for node in range(len(room)):
        for row in range(len(homes)):
            homes[row, packed[row, node, : quota[node]]] = node
    return homes


def _swap_homes(
    homes: Ints,
    loads: Floats,
    gains: Floats,
    *,
    weights: Floats,
    speeds: Floats,
    power: int,
) -> float:
    """Improves one layer's homes [num_experts] by pair swaps until none helps; the value reached.

    loads: [num_experts, num_scenarios]. speeds: of whole nodes.
    """
    count = len(speeds)
    share = loads / loads.sum(0) * count  # the mean node level is 1
    pace = speeds / speeds.mean()
    value = np.inf
    for _ in range(_MAX_SWAPS):
        member = np.eye(count)[homes]  # [E, N]
        levels = (member.T @ share) / pace[:, None]  # [N, K]
        heat = raised(levels, power) @ weights
        balance = heat.mean() ** (1.0 / power)
        slope = raised(levels, power) / np.maximum(levels, 1e-12) * weights / pace[:, None]
        slope *= balance / max(heat.sum(), 1e-300)
        pull = gains @ member - share @ slope.T  # what an expert wants of each node, [E, N]
        wants = pull[:, homes]  # [e, f]: e at f's node
        own = wants[np.arange(len(homes)), np.arange(len(homes))]
        score = wants + wants.T - own[:, None] - own[None] - 2.0 * gains
        score[homes[:, None] == homes[None]] = -np.inf
        top = np.argpartition(-np.triu(score, 1), min(_SCREENED, score.size - 1), axis=None)
        first, second = np.unravel_index(top[:_SCREENED], score.shape)
        apart = homes[first] != homes[second]
        first, second = first[apart], second[apart]
        value = balance - 0.5 * float((gains @ member * member).sum())
        if not len(first):
            break
        diff = share[first] - share[second]  # [M, K], leaves first's node
        here, there = homes[first], homes[second]
        after = raised(levels[here] - diff / pace[here, None], power)
        after += raised(levels[there] + diff / pace[there, None], power)
        total = heat.sum() + after @ weights - heat[here] - heat[there]
        linear = ((slope[here] - slope[there]) * diff).sum(1)  # already in the score
        gain = (
            score[first, second]
            - linear
            + balance
            - np.maximum(total / count, 0.0) ** (1.0 / power)
        )
        best = int(gain.argmax())
        if gain[best] < 1e-6:
            break
        homes[first[best]], homes[second[best]] = there[best], here[best]
    return value


def _invite(present: NDArray[np.bool_], gains: Floats, room: Ints) -> None:
    """Gives each node's spare slots to the experts that its own call for most, best first."""
    spare = room - present.sum(0)
    while spare.any():
        new, _ = meeting_gains(gains[None], present[None])
        wanted = np.where(present | (spare == 0), -np.inf, new[0])
        expert, node = np.unravel_index(int(wanted.argmax()), wanted.shape)
        if wanted[expert, node] <= 0:
            return
        present[expert, node] = True
        spare[node] -= 1


def _place_nodes(problem: Problem, present: NDArray[np.bool_], nodes: Ints) -> Ints:
    """Places each node's experts on its ranks; spare slots take further copies of its own."""
    layers = len(present)
    table = np.full((layers, len(problem.room), int(problem.room.max())), FREE, dtype=np.int64)
    loads = problem.loads / present.sum(-1)[..., None]  # an expert on two nodes: half on each
    peak = worst_share(problem) / present.sum(-1)
    for index, node in enumerate(nodes):
        ranks = np.flatnonzero(problem.nodes == node)
        part = Problem(
            loads=loads,
            weights=problem.weights,
            speeds=problem.speeds[ranks],
            room=problem.room[ranks],
            power=problem.power,
            nodes=problem.nodes[ranks],
        )
        mine = np.where(present[..., index], peak, -1.0)
        slots = int(part.room.sum())
        counts = replica_counts(mine, slots, most=int((part.room > 0).sum()))
        placed = place(part, counts, peak / np.maximum(counts, 1))
        table[:, ranks, : placed.shape[2]] = placed
    return table
