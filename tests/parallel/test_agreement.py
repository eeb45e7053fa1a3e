"""The per-step agreement."""

from __future__ import annotations

from typing import Any

import pytest

from moeserve.parallel.agreement import Agreement
from moeserve.parallel.dispatcher import StepSizes
from moeserve.parallel.groups import ParallelGroups


def test_every_rank_learns_what_all_bring(world: Any) -> None:
    """Token counts by rank; one rank's work or stop is everyone's."""

    def three_steps(groups: ParallelGroups) -> list[StepSizes]:
        agreement = Agreement(groups)
        is_last = groups.rank == groups.world_size - 1
        return [
            agreement.exchange(groups.rank * 10, has_work=False, stop=False),
            agreement.exchange(0, has_work=is_last, stop=False),
            agreement.exchange(1, has_work=True, stop=is_last),
        ]

    size = world.size
    for first, second, third in world.run(three_steps):
        counts = tuple(rank * 10 for rank in range(size))
        assert first == StepSizes(num_tokens=counts, has_work=False, stop=False)
        assert first.total == sum(counts)
        assert second == StepSizes(num_tokens=(0,) * size, has_work=True, stop=False)
        assert third == StepSizes(num_tokens=(1,) * size, has_work=True, stop=True)


def test_ranks_at_different_steps_are_named_on_every_rank(world: Any) -> None:
    """Out of step is an error everywhere, never a silent mix of two steps."""

    def out_of_step(groups: ParallelGroups) -> str:
        agreement = Agreement(groups)
        agreement.step = 8 if groups.rank == 1 else 7
        with pytest.raises(RuntimeError) as caught:
            agreement.exchange(1, has_work=True, stop=False)
        return str(caught.value)

    for text in world.run(out_of_step):
        assert "rank 0 at 7, rank 1 at 8" in text


def test_one_rank_agrees_with_itself() -> None:
    """No group, no waiting; steps are counted all the same."""
    agreement = Agreement(ParallelGroups(0, 1))
    sizes = agreement.exchange(5, has_work=True, stop=False)
    assert sizes == StepSizes(num_tokens=(5,), has_work=True, stop=False)
    assert agreement.step == 1
