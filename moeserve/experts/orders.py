"""Orders to move experts, as one rank decides them and all ranks carry them out."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import msgspec

from moeserve.experts.mapping import SlotMap
from moeserve_placement import Move


class Transfer(msgspec.Struct, frozen=True, array_like=True):
    """One slot gets another content.

    expert: what slot ``slot`` of rank ``rank`` holds afterwards, None: nothing. source_rank,
    source_slot: the copy that the bytes come from; -1 where nothing is copied.
    """

    layer: int
    rank: int
    slot: int
    expert: int | None
    source_rank: int = -1
    source_slot: int = -1


class Order(msgspec.Struct, frozen=True, array_like=True):
    """Groups of transfers, in order; each group takes effect at once, on all ranks in one step.

    A group is of one layer. After every group each expert has a copy, so an order may end anywhere.
    """

    order_id: int
    groups: list[list[Transfer]]

    @property
    def num_copies(self) -> int:
        """Experts that are copied."""
        return sum(transfer.expert is not None for group in self.groups for transfer in group)


def order_from_moves(order_id: int, moves: Sequence[Move], slot_map: SlotMap) -> Order:
    """The order that carries out a plan's moves from where experts are now.

    Raises:
        ValueError: a move does not fit the current slots; the text names it.
    """
    tables = {layer: [list(slots) for slots in ranks] for layer, ranks in slot_map.layers.items()}
    return Order(order_id, [list(_group(move, tables)) for move in moves])


def _group(move: Move, tables: Mapping[int, list[list[int | None]]]) -> Iterator[Transfer]:
    table = tables.get(move.layer)
    if table is None:
        raise ValueError(f"move: there is no MoE layer {move.layer}")
    found = []
    for write in move.writes:
        inside = 0 <= write.rank < len(table) and 0 <= write.slot < len(table[write.rank])
        if not inside or table[write.rank][write.slot] != write.replaces:
            raise ValueError(
                f"move: layer {move.layer}, rank {write.rank}, slot {write.slot} does not hold "
                f"{write.replaces}"
            )
        source = (
            (-1, -1) if write.expert is None else _source(write.expert, write.source_rank, table)
        )
        found.append(
            Transfer(move.layer, write.rank, write.slot, write.expert, source[0], source[1])
        )
    for write in move.writes:
        table[write.rank][write.slot] = write.expert
    yield from found


def _source(expert: int, rank: int | None, table: list[list[int | None]]) -> tuple[int, int]:
    """Where a copy of ``expert`` is: on ``rank`` if it has one, else on the first that has."""
    ranks = [rank] if rank is not None else []
    for holder in (*ranks, *range(len(table))):
        if expert in table[holder]:
            return holder, table[holder].index(expert)
    raise ValueError(f"move: no rank holds expert {expert}")
