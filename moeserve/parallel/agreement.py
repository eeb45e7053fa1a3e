"""The agreement at the top of each step: what does every rank bring, does anyone want to stop."""

from __future__ import annotations

import torch

from moeserve.parallel.dispatcher import StepSizes
from moeserve.parallel.groups import ParallelGroups


class Agreement:
    """One small all-gather per step, four int64 per rank; its answer is equal on all ranks."""

    def __init__(self, groups: ParallelGroups) -> None:
        self.step = 0
        """Number of the agreement that comes next."""
        self._groups = groups

    def exchange(self, num_tokens: int, has_work: bool, stop: bool) -> StepSizes:
        """Tells all ranks what this one brings and returns what they all bring.

        Args:
            num_tokens: tokens that this rank computes in the step; 0 is welcome.
            has_work: this rank has an unfinished request, in this step or waiting.
            stop: this rank wants all to leave after this agreement.

        Raises:
            RuntimeError: the ranks are not at the same step (the text names them), or a peer is
                gone or silent.
        """
        mine = torch.tensor([self.step, num_tokens, has_work, stop], dtype=torch.int64)
        ones = [1] * self._groups.world_size
        steps, tokens, works, stops = self._groups.all_gather(mine.unsqueeze(0), ones).t().tolist()
        if any(step != self.step for step in steps):
            places = ", ".join(f"rank {rank} at {step}" for rank, step in enumerate(steps))
            raise RuntimeError(f"ranks are not at the same step: {places}")
        self.step += 1
        return StepSizes(num_tokens=tuple(tokens), has_work=any(works), stop=any(stops))
