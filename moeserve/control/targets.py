"""Moves that lead from where experts are to a given placement."""

from __future__ import annotations

from moeserve.experts.mapping import SlotMap
from moeserve_placement import Move, Placement, Topology
from moeserve_placement.moves import layer_moves
from moeserve_placement.slot_table import aligned, slot_table


def moves_between(slot_map: SlotMap, target: Placement, expert_bytes: int) -> list[Move]:
    """The moves to ``target``, each of which leaves every expert a copy.

    An expert that stays on a rank keeps its slot there, whatever slot ``target`` names.

    Raises:
        ValueError: ``target`` is for other layers, experts or ranks, or needs more slots.
    """
    layer_ids = tuple(slot_map.layers)
    for name, have, want in (
        ("num_experts", target.num_experts, slot_map.num_experts),
        ("ranks", target.num_ranks, len(slot_map.rank_offsets)),
        ("layers", tuple(target.layers), layer_ids),
    ):
        if have != want:
            raise ValueError(f"placement: {name} = {have}, must be {want}")
    current = slot_map.placement
    moves: list[Move] = []
    for layer in layer_ids:
        sizes = tuple(len(slots) for slots in slot_map.layers[layer])
        topology = Topology(slots_per_rank=sizes, bytes_per_expert=expert_bytes)
        now = slot_table(current, [layer], topology=topology)
        wanted = aligned(slot_table(target, [layer], topology=topology), now, topology=topology)
        moves += layer_moves(layer, now[0], wanted[0], topology=topology)
    return moves
