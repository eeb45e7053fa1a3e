"""The agreement at the top of each step: what does every rank bring, does anyone want to stop."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from moeserve.parallel.dispatcher import StepSizes
from moeserve.parallel.groups import ParallelGroups


@dataclass(frozen=True, slots=True, kw_only=True)
class Offer:
    """What a rank brings of experts on their way.

    moves_ready: groups of the order in progress that it has everything of. move_failed: it can not
    go on with the order. news_bytes: size of what rank 0 has to say to all; 0 from the others.
    """

    moves_ready: int = 0
    move_failed: bool = False
    news_bytes: int = 0


NOTHING = Offer()


class Agreement:
    """One small all-gather per step, a few int64 per rank; its answer is equal on all ranks."""

    def __init__(self, groups: ParallelGroups) -> None:
        self.step = 0
        """Number of the agreement that comes next."""
        self._groups = groups

    def exchange(
        self,
        num_tokens: int,
        has_work: bool,
        stop: bool,
        offer: Offer = NOTHING,
    ) -> StepSizes:
        """Tells all ranks what this one brings and returns what they all bring.

        Args:
            num_tokens: tokens that this rank computes in the step; 0 is welcome.
            has_work: this rank has an unfinished request, in this step or waiting, or an order.
            stop: this rank wants all to leave after this agreement.
            offer: how far this rank is with the order in progress.

        Raises:
            RuntimeError: the ranks are not at the same step (the text names them), or a peer is
                gone or silent.
        """
        moving = (offer.moves_ready, offer.move_failed, offer.news_bytes)
        mine = [self.step, num_tokens, has_work, stop, *moving]
        row = torch.tensor(mine, dtype=torch.int64).unsqueeze(0)
        ones = [1] * self._groups.world_size
        steps, tokens, works, stops, ready, failed, news = (
            self._groups.all_gather(row, ones).t().tolist()
        )
        if any(step != self.step for step in steps):
            places = ", ".join(f"rank {rank} at {step}" for rank, step in enumerate(steps))
            raise RuntimeError(f"ranks are not at the same step: {places}")
        self.step += 1
        return StepSizes(
            num_tokens=tuple(tokens),
            has_work=any(works),
            stop=any(stops),
            moves_ready=min(ready),
            move_failed=any(failed),
            news_bytes=news[0],
        )
