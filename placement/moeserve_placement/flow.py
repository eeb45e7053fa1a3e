"""The exact min-max split of one layer by maximum flow: slow, sure, and the last resort.

The best possible largest level is max over sets T of ranks of (tokens of experts whose copies all
lie in T) / (speed of T). Newton's method on that ratio (Dinkelbach) starts below it; each maximum
flow either serves everything at the present level or its minimum cut is a set with a larger ratio.
"""

from __future__ import annotations

from collections import deque

import numpy as np

from moeserve_placement.slot_table import Floats, Ints


def exact_split(
    demand: Floats, group: Ints, rank: Ints, *, base: Floats, speeds: Floats
) -> tuple[Floats, float]:
    """Tokens per edge and the least possible largest level.

    demand: tokens of each expert with several copies [num_groups]. group, rank: the expert and rank
    of each copy [num_edges]. base: load of the other experts by rank [num_ranks].
    """
    level = float(max((base / speeds).max(), (demand.sum() + base.sum()) / speeds.sum()))
    tokens = np.zeros(len(group))
    room = np.maximum(level * speeds - base, 0.0)
    slack = 1e-12 * max(float(demand.sum() + base.sum()), 1e-300)
    while True:
        missing, cut = _augment(demand, group, rank, tokens, room, slack=slack)
        if missing <= slack * len(demand):
            return tokens, level
        captive = np.ones(len(demand), dtype=np.bool_)
        np.logical_and.at(captive, group, cut[rank])
        held = demand[captive].sum() + base[cut].sum()
        raised = float(held / speeds[cut].sum())
        if raised <= level * (1 + 1e-15):
            return tokens + _leftover(demand, group, tokens), level
        level = raised
        room = np.maximum(level * speeds - base, 0.0) - np.bincount(
            rank, weights=tokens, minlength=len(base)
        )


def _augment(
    demand: Floats, group: Ints, rank: Ints, tokens: Floats, room: Floats, *, slack: float
) -> tuple[float, np.ndarray]:
    """Pushes what fits, changing ``tokens`` and ``room``; what is left, and the cut's ranks."""
    edges_of_group: list[list[int]] = [[] for _ in demand]
    edges_of_rank: list[list[int]] = [[] for _ in room]
    for edge, (g, r) in enumerate(zip(group.tolist(), rank.tolist(), strict=True)):
        edges_of_group[g].append(edge)
        edges_of_rank[r].append(edge)
    left = demand - np.bincount(group, weights=tokens, minlength=len(demand))
    groups, ranks = group.tolist(), rank.tolist()
    while True:
        sources = np.flatnonzero(left > slack).tolist()
        came, end = _search(
            sources, edges_of_group, edges_of_rank, groups, ranks, tokens, room, slack
        )
        if end is None:
            cut = np.zeros(len(room), dtype=np.bool_)
            cut[[r for kind, r in came if kind == "r"]] = True
            return float(left[left > slack].sum()), cut
        _push(came, end, groups, ranks, tokens, room, left)


Vertex = tuple[str, int]


def _search(
    sources: list[int],
    edges_of_group: list[list[int]],
    edges_of_rank: list[list[int]],
    groups: list[int],
    ranks: list[int],
    tokens: Floats,
    room: Floats,
    slack: float,
) -> tuple[dict[Vertex, int | None], int | None]:
    """Breadth first from experts with tokens left to a rank with room; how each was reached."""
    came: dict[Vertex, int | None] = {("e", g): None for g in sources}
    queue: deque[Vertex] = deque(came)
    while queue:
        kind, at = queue.popleft()
        if kind == "e":
            for edge in edges_of_group[at]:
                step = ("r", ranks[edge])
                if step not in came:
                    came[step] = edge
                    if room[ranks[edge]] > slack:
                        return came, ranks[edge]
                    queue.append(step)
        else:
            for edge in edges_of_rank[at]:
                step = ("e", groups[edge])
                if step not in came and tokens[edge] > slack:
                    came[step] = edge
                    queue.append(step)
    return came, None


def _push(
    came: dict[Vertex, int | None],
    end: int,
    groups: list[int],
    ranks: list[int],
    tokens: Floats,
    room: Floats,
    left: Floats,
) -> None:
    forward: list[int] = []
    backward: list[int] = []
    at: Vertex = ("r", end)
    while (edge := came[at]) is not None:
        if at[0] == "r":
            forward.append(edge)
            at = ("e", groups[edge])
        else:
            backward.append(edge)
            at = ("r", ranks[edge])
    amount = min(float(room[end]), float(left[at[1]]), *(float(tokens[e]) for e in backward))
    tokens[forward] += amount
    tokens[backward] -= amount
    room[end] -= amount
    left[at[1]] -= amount


def _leftover(demand: Floats, group: Ints, tokens: Floats) -> Floats:
    """Rounding remains of each expert, put on its first copy."""
    left = demand - np.bincount(group, weights=tokens, minlength=len(demand))
    result = np.zeros(len(group))
    first = np.unique(group, return_index=True)[1]
    result[first] = np.maximum(left[group[first]], 0.0)
    return result
