"""The part of placement that every rank does alike: hear the news, count, carry, flip.

Rank 0 also has the manager, who decides. All that the ranks do together happens at a point of the
step that they agree on, so no rank waits for one that does not come.
"""

from __future__ import annotations

from typing import Protocol

import torch

from moeserve.control import news, report
from moeserve.control.report import LoadReport
from moeserve.experts.load import LoadCounter
from moeserve.experts.mover import ExpertMover
from moeserve.experts.split import CopyChooser
from moeserve.experts.traffic import Traffic
from moeserve.parallel.agreement import Offer
from moeserve.parallel.dispatcher import StepSizes
from moeserve.parallel.groups import ParallelGroups


class Decider(Protocol):
    """Who decides, on rank 0: see ``manager.Manager``."""

    @property
    def poll_s(self) -> float | None:
        """How soon it wants to be asked again while nothing happens; None: no need."""
        ...

    def next_news(self) -> news.News | None:
        """What to say to all ranks in the step to come."""
        ...

    def took_step(self, num_tokens: int) -> None:
        """A step of so many tokens over all ranks begins."""
        ...

    def took_load(self, load: LoadReport) -> None:
        """The counters it asked for."""
        ...

    def flipped(self, num_groups: int, is_done: bool) -> None:
        """Groups of its order took effect; is_done: the order is over."""
        ...

    def failed(self, reason: str) -> None:
        """Its order could not be carried to its end."""
        ...


class Controller:
    """One rank's hands in placement.

    Args:
        groups: the ranks.
        load, traffic: this rank's counters.
        mover: this rank's slots and the order in progress.
        chooser: who picks a copy for each pair.
        step_bytes: how much may be moved between two steps, over all ranks.
        decider: on rank 0 who decides, or None where nobody does.
    """

    def __init__(
        self,
        *,
        groups: ParallelGroups,
        load: LoadCounter,
        traffic: Traffic,
        mover: ExpertMover,
        chooser: CopyChooser,
        step_bytes: int,
        decider: Decider | None = None,
    ) -> None:
        self._groups = groups
        self._load = load
        self._traffic = traffic
        self._mover = mover
        self._chooser = chooser
        self._step_bytes = step_bytes
        self._decider = decider
        self._outgoing = b""

    @property
    def has_work(self) -> bool:
        """Whether ranks should step although no request is there."""
        return self._mover.is_busy or bool(self._outgoing)

    @property
    def poll_s(self) -> float | None:
        """How long an idle rank may wait for mail before it calls ``prepare`` again."""
        return None if self._decider is None else self._decider.poll_s

    def prepare(self) -> None:
        """Asks the decider for news, where none are waiting to be said."""
        if self._decider is None or self._outgoing:
            return
        message = self._decider.next_news()
        if message is not None:
            self._outgoing = news.encode(message)

    def offer(self) -> Offer:
        """What this rank brings to the step's agreement."""
        return Offer(
            moves_ready=self._mover.num_ready,
            move_failed=self._mover.failure is not None,
            news_bytes=len(self._outgoing),
        )

    def follow(self, sizes: StepSizes) -> None:
        """Does what the ranks have agreed on, before the step computes anything."""
        if self._decider is not None:
            self._decider.took_step(sizes.total)
        if sizes.move_failed:
            self._give_up()
        elif sizes.moves_ready:
            self._mover.flip(sizes.moves_ready)
            if self._decider is not None:
                self._decider.flipped(sizes.moves_ready, not self._mover.is_busy)
        if sizes.news_bytes:
            self._act(news.decode(self._broadcast(sizes.news_bytes)))

    def tick(self) -> None:
        """After a step: moves the order in progress on by a few bytes."""
        self._mover.advance(self._step_bytes)

    def _give_up(self) -> None:
        reason = self._mover.failure or "another rank could not go on"
        self._mover.cancel()
        if self._decider is not None:
            self._decider.failed(reason)

    def _act(self, message: news.News) -> None:
        match message:
            case news.CollectLoad():
                self._collect()
            case news.Begin(order):
                self._mover.begin(order)
            case news.SplitFrom(num_tokens):
                self._chooser.split_from = num_tokens
            case news.Cancel():
                self._mover.cancel()
                if self._decider is not None:
                    self._decider.failed("cancelled")

    def _broadcast(self, size: int) -> bytes:
        """What rank 0 has to say, on every rank."""
        rank, world_size = self._groups.rank, self._groups.world_size
        outgoing, self._outgoing = self._outgoing, b""
        if world_size == 1:
            return outgoing
        mine = torch.frombuffer(bytearray(outgoing), dtype=torch.uint8) if rank == 0 else None
        rows = torch.empty(0, dtype=torch.uint8) if mine is None else mine.repeat(world_size)
        send = [size if rank == 0 else 0] * world_size
        receive = [size] + [0] * (world_size - 1)
        return self._groups.all_to_all(rows, send, receive).numpy().tobytes()

    def _collect(self) -> None:
        """All ranks' counters to rank 0."""
        world_size = self._groups.world_size
        mine = report.pack(self._load, self._traffic)
        send = [len(mine)] + [0] * (world_size - 1)
        is_first = self._groups.rank == 0
        receive = [len(mine) if is_first else 0] * world_size
        rows = self._groups.all_to_all(mine, send, receive)
        if self._decider is not None:
            layers, experts = len(self._load.layers), self._load.num_experts
            gathered = rows.view(world_size, -1).numpy()
            self._decider.took_load(LoadReport.unpack(gathered, layers, experts))


def gather_digests(
    groups: ParallelGroups, store_digests: dict[tuple[int, int], int]
) -> dict[tuple[int, int], int]:
    """Digests of all experts, from those that each rank took of its own when it loaded them.

    Raises:
        RuntimeError: two ranks have loaded different weights for one expert.
    """
    rows = [
        [layer, expert, digest >> 32, digest & 0xFFFFFFFF]
        for (layer, expert), digest in sorted(store_digests.items())
    ]
    mine = torch.tensor(rows, dtype=torch.int64).view(-1, 4)
    ones = [1] * groups.world_size
    counts = groups.all_gather(torch.tensor([len(rows)]), ones).tolist()
    found: dict[tuple[int, int], int] = {}
    for layer, expert, high, low in groups.all_gather(mine, counts).tolist():
        digest = high << 32 | low
        if found.setdefault((layer, expert), digest) != digest:
            raise RuntimeError(
                f"layer {layer}, expert {expert}: ranks have loaded different weights"
            )
    return found
