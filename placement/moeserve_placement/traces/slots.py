"""Flat slot lists, as other engines write placements, from and to ``Placement``.

Engines list the logical expert of every slot, rank by rank, with as many slots on every rank and
none free. A second copy of an expert on one rank, which some planners make, is of no use and not
allowed here: it is read as a free slot, and a free slot is written as a repeat of an expert that
the rank has.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from moeserve_placement.placement import Placement, PlacementError, Slots
from moeserve_placement.traces.trace import TraceError


def placement_of(
    layers: Mapping[int, Sequence[int]], num_ranks: int, *, num_experts: int | None
) -> Placement:
    """The placement of flat slot lists, all of one length, by model layer index.

    num_experts: None: highest id plus one.

    Raises:
        TraceError: no layers, lists of different lengths, slots that do not divide by the ranks,
            or not a valid placement.
    """
    if not layers:
        raise TraceError("placement: has no layers")
    num_slots = len(next(iter(layers.values())))
    for layer, slots in layers.items():
        if len(slots) != num_slots:
            raise TraceError(f"layer {layer}: has {len(slots)} slots, must be {num_slots}")
    if num_ranks < 1 or num_slots < num_ranks or num_slots % num_ranks:
        raise TraceError(f"num_ranks = {num_ranks}: must divide the {num_slots} slots of a layer")
    experts = num_experts if num_experts is not None else 1 + max(map(max, layers.values()))
    per_rank = num_slots // num_ranks
    try:
        return Placement(
            num_experts=experts,
            layers={
                layer: tuple(
                    _unique(slots[start : start + per_rank])
                    for start in range(0, num_slots, per_rank)
                )
                for layer, slots in sorted(layers.items())
            },
        )
    except PlacementError as error:
        raise TraceError(str(error)) from error


def flat_slots(placement: Placement, layer: int) -> list[int]:
    """The slots of one layer, rank by rank, free ones filled with an expert of the same rank.

    Raises:
        TraceError: ranks with different numbers of slots, or a rank without any expert.
    """
    flat: list[int] = []
    for rank, slots in enumerate(placement.layers[layer]):
        if len(slots) != placement.max_slots:
            raise TraceError(
                f"layer {layer}, rank {rank}: has {len(slots)} slots and another has "
                f"{placement.max_slots}; this format needs as many on every rank and layer"
            )
        held = [expert for expert in slots if expert is not None]
        if not held:
            raise TraceError(f"layer {layer}, rank {rank}: is empty, which this format can not say")
        # After the rank's own experts have been seen, so that reading frees this slot again.
        flat += [_fill(slots, i) if expert is None else expert for i, expert in enumerate(slots)]
    return flat


def parse_slot_list(name: str, value: Any) -> list[int]:
    """A list of expert ids, 0 or more.

    Raises:
        TraceError: it is not that.
    """
    if not isinstance(value, list) or not value:
        raise TraceError(f"{name}: must be a list of expert ids, not empty")
    for item in value:
        if type(item) is not int or not 0 <= item < 1 << 16:
            raise TraceError(f"{name}: {str(item)[:40]!r} is not an expert id")
    return value


def _unique(slots: Sequence[int]) -> Slots:
    seen: set[int] = set()
    unique: list[int | None] = []
    for expert in slots:
        unique.append(None if expert in seen else expert)
        seen.add(expert)
    return tuple(unique)


def _fill(slots: Slots, index: int) -> int:
    """An expert for free slot ``index``: one that stands before it, else one that stands after."""
    before = [expert for expert in slots[:index] if expert is not None]
    after = [expert for expert in slots[index:] if expert is not None]
    return (before or after)[0]
