"""From one slot table to another: slot writes, ordered so that no expert is ever lost."""

from __future__ import annotations

from collections import Counter

import numpy as np

from moeserve_placement.plan import Move, SlotWrite
from moeserve_placement.slot_table import Floats, Ints, holds
from moeserve_placement.topology import Topology

Cell = tuple[int, int]
"""A rank and a slot of one layer."""


def num_copies(current: Ints, target: Ints) -> Ints:
    """Experts that each layer must copy to a rank that lacks them: int64 [num_layers]."""
    held = (target[..., :, None] == current[..., None, :]).any(-1)
    result: Ints = ((target >= 0) & ~held).sum((-1, -2))
    return result


def layer_moves(layer: int, current: Ints, target: Ints, *, topology: Topology) -> list[Move]:
    """Moves that turn one layer's table [num_ranks, max_slots] into another, safe in this order.

    Slots of ranks that are gone come last: they are only struck from the table, and what they
    held does not count as a copy.

    ``target`` must be aligned to ``current`` (an expert that stays on a rank keeps its slot). After
    every move each expert that had a copy still has one and no rank holds one twice: a write comes
    first if what it overwrites has another copy or is not needed, of these the writes of experts
    that no rank alive holds; what remains are cycles, and each becomes one move.
    """
    table = current.copy()
    alive = np.asarray(topology.alive)
    differs = [(int(rank), int(slot)) for rank, slot in np.argwhere(current != target)]
    pending: dict[Cell, int] = {cell: int(target[cell]) for cell in differs if alive[cell[0]]}
    counts = Counter(int(expert) for expert in table[alive].ravel() if expert >= 0)
    moves: list[Move] = []
    while pending:
        free = [cell for cell in pending if _is_free(table, cell, counts)]
        free.sort(key=lambda cell: not _restores(pending[cell], counts))
        for cell in free:
            if _is_free(table, cell, counts):  # an earlier one may have taken the last copy
                moves.append(_apply(layer, [cell], table, pending, counts, topology))
        if not free:
            cycle = _cycle(table, pending)
            moves.append(_apply(layer, cycle, table, pending, counts, topology))
    for cell in differs:
        if not alive[cell[0]]:
            moves.append(Move(layer=layer, writes=(slot_write(cell, -1, table, topology),)))
    return moves


def _is_free(table: Ints, cell: Cell, counts: Counter[int]) -> bool:
    old = int(table[cell])
    return old < 0 or counts[old] > 1


def _restores(expert: int, counts: Counter[int]) -> bool:
    return expert >= 0 and not counts[expert]


def _cycle(table: Ints, pending: dict[Cell, int]) -> list[Cell]:
    """Writes that overwrite last copies of each other's experts, in a closed chain."""
    incoming: dict[int, Cell] = {}
    for cell, expert in pending.items():
        incoming.setdefault(expert, cell)
    start = next(iter(pending))
    chain = [start]
    while True:
        following = incoming[int(table[chain[-1]])]
        if following in chain:
            return chain[chain.index(following) :]
        chain.append(following)


def _apply(
    layer: int,
    cells: list[Cell],
    table: Ints,
    pending: dict[Cell, int],
    counts: Counter[int],
    topology: Topology,
) -> Move:
    writes = tuple(slot_write(cell, pending[cell], table, topology) for cell in cells)
    for cell in cells:
        old, new = int(table[cell]), pending.pop(cell)
        if old >= 0:
            counts[old] -= 1
        if new >= 0:
            counts[new] += 1
        table[cell] = new
    return Move(layer=layer, writes=writes)


def slot_write(cell: Cell, expert: int, table: Ints, topology: Topology) -> SlotWrite:
    """The write of ``expert`` (-1: none) into a slot of a layer's table [num_ranks, max_slots]."""
    rank, slot = cell
    old = int(table[cell])
    replaces = old if old >= 0 else None
    if expert < 0:
        return SlotWrite(
            rank=rank,
            slot=slot,
            expert=None,
            replaces=replaces,
            source_rank=None,
            link="none",
            num_bytes=0,
        )
    source = _nearest(expert, rank, table, topology)
    return SlotWrite(
        rank=rank,
        slot=slot,
        expert=expert,
        replaces=replaces,
        source_rank=source,
        link=topology.link(source, rank),
        num_bytes=topology.bytes_per_expert,
    )


def _nearest(expert: int, rank: int, table: Ints, topology: Topology) -> int | None:
    """The rank to copy from: one of the same node if there is one."""
    holders = [h for h in (table == expert).nonzero()[0].tolist() if topology.alive[h]]
    home = topology.node_of_rank[rank]
    near = [holder for holder in holders if topology.node_of_rank[holder] == home]
    return next(iter(near or holders), None)


def copy_costs(current: Ints, target: Ints, *, topology: Topology, num_experts: int) -> Floats:
    """What the copies of each layer cost, in copies inside a node: float64 [num_layers].

    current, target: [num_layers, num_ranks, max_slots], without what ranks that are gone hold. A
    copy comes from the nearest rank that has the expert now, from host memory if none has.
    """
    held = holds(current, num_experts)
    near = np.zeros((*held.shape[:2], topology.num_nodes), dtype=np.bool_)
    for node in range(topology.num_nodes):
        near[..., node] = held[..., topology.nodes == node].any(-1)
    here = (target[..., :, None] == current[..., None, :]).any(-1)
    layer, rank, slot = np.nonzero((target >= 0) & ~here)
    expert = target[layer, rank, slot]
    links = topology.link_costs
    cost = np.where(held[layer, expert].any(-1), links.fabric, links.host)
    cost = np.where(near[layer, expert, topology.nodes[rank]], links.node, cost)
    result: Floats = np.bincount(layer, weights=cost, minlength=len(target)).astype(np.float64)
    return result
