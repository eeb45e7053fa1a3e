"""Experts on their way from slot to slot: in pieces, between steps, alike on all ranks.

All ranks hold the same order and the same positions in it, so each knows what every other sends and
no sizes are exchanged: a piece is one all-to-all in which most ranks send nothing. What arrives is
kept beside the slots until its digest has been compared with the checkpoint's; then the rank
reports, in the next step's agreement, how far it is, and what all have is put into the slots by all
in the same step. A slot is never written while a step may read it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field

import torch

from moeserve.experts.orders import Order, Transfer
from moeserve.experts.store import ExpertStore, SlotChange, digest_of

# (rows, send counts, receive counts) -> what arrived: ``ParallelGroups.all_to_all``.
Exchange = Callable[[torch.Tensor, list[int], list[int]], torch.Tensor]

MAX_STAGED = 8  # experts that may wait beside their slots, over all ranks


@dataclass(frozen=True, slots=True)
class Piece:
    """Bytes ``start`` to ``stop`` of one transfer."""

    transfer: Transfer
    start: int
    stop: int

    def __len__(self) -> int:
        return self.stop - self.start


@dataclass(frozen=True, slots=True, kw_only=True)
class Parcel:
    """What one rank sends and gets between two steps.

    rows: uint8, for rank 0 first. send, receive: bytes to and from each rank. pieces: what comes,
    in that order. num_bytes: bytes that travel between all ranks; 0: nobody sends anything.
    """

    rows: torch.Tensor
    send: list[int]
    receive: list[int]
    pieces: list[Piece]
    num_bytes: int


@dataclass(slots=True)
class _Group:
    """Transfers that take effect together, and how far their bytes are."""

    transfers: list[Transfer]
    sent: list[int]  # bytes of each transfer that have travelled
    staged: dict[int, torch.Tensor] = field(default_factory=dict)  # by place in ``transfers``


@dataclass(slots=True)
class MoveCounts:
    """What this rank has seen since start; the numbers only grow."""

    num_bytes_sent: int = 0
    num_copies: int = 0
    num_flips: int = 0
    num_failures: int = 0


class ExpertMover:
    """The order in progress, on one rank.

    Args:
        store: this rank's slots.
        exchange: moves bytes between the ranks.
        world_size: number of ranks.
        digests: xxh3 of every expert of the checkpoint, by (layer, expert); who holds a copy knows
            it, and all ranks were told at start.
    """

    def __init__(
        self,
        store: ExpertStore,
        exchange: Exchange,
        world_size: int,
        digests: Mapping[tuple[int, int], int],
    ) -> None:
        self.counts = MoveCounts()
        self._store = store
        self._exchange = exchange
        self._world_size = world_size
        self._digests = digests
        self._rank = store.slot_map.rank
        self._groups: deque[_Group] = deque()
        self._failure: str | None = None

    @property
    def is_busy(self) -> bool:
        """Whether an order is in progress; equal on all ranks."""
        return bool(self._groups)

    @property
    def num_ready(self) -> int:
        """Leading groups of which this rank has everything; goes into the step's agreement."""
        ready = 0
        for group in self._groups:
            if not self._is_ready(group):
                break
            ready += 1
        return ready

    @property
    def failure(self) -> str | None:
        """Why this rank can not go on with the order, or None; goes into the step's agreement."""
        return self._failure

    def begin(self, order: Order) -> None:
        """Takes an order up.

        Raises:
            RuntimeError: another is in progress.
        """
        if self._groups:
            raise RuntimeError(f"order {order.order_id}: another is in progress")
        self._groups.extend(_Group(group, [0] * len(group)) for group in order.groups if group)

    def cancel(self) -> None:
        """Forgets what has not taken effect; the slots are valid as they are."""
        self._groups.clear()
        self._failure = None

    def flip(self, num_groups: int) -> None:
        """Puts the first ``num_groups`` groups into the slots; the agreement said all have them."""
        for _ in range(num_groups):
            group = self._groups.popleft()
            layer = group.transfers[0].layer
            changes = [
                SlotChange(rank=t.rank, slot=t.slot, expert=t.expert, data=group.staged.get(place))
                for place, t in enumerate(group.transfers)
            ]
            self._store.flip(layer, changes)
            self.counts.num_flips += 1
            self.counts.num_copies += len(group.staged)

    def advance(self, budget: int) -> int:
        """Moves up to ``budget`` bytes on, over all ranks; returns how many.

        All ranks must call it in the same step with the same budget; where there is nothing to
        send, none takes part in anything.
        """
        parcel = self.pack(budget)
        if parcel.num_bytes:
            self.unpack(parcel, self._exchange(parcel.rows, parcel.send, parcel.receive))
        return parcel.num_bytes

    def pack(self, budget: int) -> Parcel:
        """What this rank sends and gets next; the bytes count as travelled from now on."""
        pieces = list(self._next_pieces(budget))
        ranks = range(self._world_size)
        by_target = [[p for p in pieces if p.transfer.rank == rank] for rank in ranks]
        mine = [[p for p in part if p.transfer.source_rank == self._rank] for part in by_target]
        rows = [
            self._store.read(p.transfer.layer, p.transfer.source_slot, p.start, p.stop)
            for part in mine
            for p in part
        ]
        by_source = [
            [p for p in by_target[self._rank] if p.transfer.source_rank == rank] for rank in ranks
        ]
        return Parcel(
            rows=torch.cat(rows) if rows else torch.empty(0, dtype=torch.uint8),
            send=[sum(map(len, part)) for part in mine],
            receive=[sum(map(len, part)) for part in by_source],
            pieces=[piece for part in by_source for piece in part],
            num_bytes=sum(map(len, pieces)),
        )

    def unpack(self, parcel: Parcel, arrived: torch.Tensor) -> None:
        """Takes the bytes that were to come with ``parcel``."""
        self.counts.num_bytes_sent += sum(parcel.send)
        data = torch.split(arrived, [len(piece) for piece in parcel.pieces])
        for piece, part in zip(parcel.pieces, data, strict=True):
            self._receive(piece, part)

    def _next_pieces(self, budget: int) -> Iterator[Piece]:
        """The next bytes to travel, equal on all ranks; notes them as travelled."""
        size, staged = self._store.expert_bytes, 0
        written: set[tuple[int, int, int]] = set()
        for group in self._groups:
            for place, transfer in enumerate(group.transfers):
                source = (transfer.layer, transfer.source_rank, transfer.source_slot)
                if transfer.expert is None or group.sent[place] == size:
                    staged += transfer.expert is not None
                    continue
                if budget <= 0 or staged >= MAX_STAGED or source in written:
                    return  # what it is copied from has yet to be written itself
                start = group.sent[place]
                stop = min(size, start + budget)
                group.sent[place] = stop
                budget -= stop - start
                staged += 1
                yield Piece(transfer, start, stop)
            written |= {(t.layer, t.rank, t.slot) for t in group.transfers}

    def _receive(self, piece: Piece, data: torch.Tensor) -> None:
        group, place = self._find(piece.transfer)
        buffer = group.staged.get(place)
        if buffer is None:
            buffer = torch.empty(self._store.expert_bytes, dtype=torch.uint8)
            group.staged[place] = buffer
        buffer[piece.start : piece.stop] = data
        if piece.stop == self._store.expert_bytes:
            self._compare(piece.transfer, buffer)

    def _find(self, transfer: Transfer) -> tuple[_Group, int]:
        for group in self._groups:
            for place, one in enumerate(group.transfers):
                if one is transfer:
                    return group, place
        raise AssertionError(f"{transfer} is not in progress")

    def _compare(self, transfer: Transfer, data: torch.Tensor) -> None:
        assert transfer.expert is not None
        if digest_of(data) != self._digests[transfer.layer, transfer.expert]:
            self.counts.num_failures += 1
            self._failure = (
                f"layer {transfer.layer}, expert {transfer.expert}: what came from rank "
                f"{transfer.source_rank} is not what the checkpoint holds"
            )

    def _is_ready(self, group: _Group) -> bool:
        """Whether all bytes of the group have travelled and those for this rank are good."""
        size = self._store.expert_bytes
        done = all(
            t.expert is None or sent == size
            for t, sent in zip(group.transfers, group.sent, strict=True)
        )
        return done and self._failure is None
