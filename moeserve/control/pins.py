"""Pinned experts: their copies stay where they are, whatever a planner proposes."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from moeserve_placement import Move
from moeserve_placement.placement import Slots

Pin = tuple[int, int]
"""A model layer and a logical expert."""


def without_pinned(
    moves: Sequence[Move], pins: Collection[Pin], layers: Mapping[int, tuple[Slots, ...]]
) -> list[Move]:
    """The moves that leave pinned experts alone, and that still fit what they then find.

    A move that would overwrite a pinned copy or add one falls away, and with it each later move
    that builds on it. What is left is as safe as the whole: an expert keeps its last copy.
    """
    if not pins:
        return list(moves)
    tables = {layer: [list(slots) for slots in ranks] for layer, ranks in layers.items()}
    kept = []
    for move in moves:
        touched = {(move.layer, e) for w in move.writes for e in (w.expert, w.replaces)}
        if touched & set(pins) or not _fits(move, tables[move.layer]):
            continue
        for write in move.writes:
            tables[move.layer][write.rank][write.slot] = write.expert
        kept.append(move)
    return kept


def _fits(move: Move, table: list[list[int | None]]) -> bool:
    """Whether each slot holds what the move replaces and the result is a valid layer."""
    if any(table[w.rank][w.slot] != w.replaces for w in move.writes):
        return False
    before = {expert for slots in table for expert in slots if expert is not None}
    after = [list(slots) for slots in table]
    for write in move.writes:
        after[write.rank][write.slot] = write.expert
    held = [[expert for expert in slots if expert is not None] for slots in after]
    return before <= {e for slots in held for e in slots} and all(
        len(set(slots)) == len(slots) for slots in held
    )
