"""The choice of a transport."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moeserve.parallel.choose import (
    DispatcherChooser,
    LinkCost,
    TokenShape,
    all_gather_seconds,
    all_to_all_seconds,
    choose,
)
from moeserve.parallel.dispatcher import StepSizes
from moeserve.parallel.groups import ParallelGroups
from moeserve_kernels.ops import get_ops

SHAPE = TokenShape(hidden_size=1024, top_k=2, element_size=2)
OPS = get_ops("invariant")


def step(*num_tokens: int) -> StepSizes:
    """The sizes of a step with these tokens by rank."""
    return StepSizes(num_tokens=num_tokens, has_work=True, stop=False)


def make(world_size: int, dispatcher: str = "auto") -> DispatcherChooser:
    """A chooser of rank 0; its transports are not used."""
    backend = None if world_size == 1 else object()
    groups = ParallelGroups(0, world_size, backend)  # type: ignore[arg-type]
    return DispatcherChooser(groups, slots_per_rank=4, shape=SHAPE, ops=OPS, dispatcher=dispatcher)


def test_few_tokens_are_gathered_and_many_are_routed() -> None:
    """One collective less wins while messages are small, fewer bytes win afterwards."""
    chooser = make(4)
    assert chooser(step(1, 1, 1, 0)).name == "all_gather"
    assert chooser(step(4096, 4096, 4096, 4096)).name == "all_to_all"


def test_a_setting_overrides_the_cost_model() -> None:
    """Whatever the sizes."""
    for name in ("all_to_all", "all_gather"):
        assert make(2, name)(step(1, 0)).name == name
        assert make(2, name)(step(9999, 9999)).name == name


def test_one_rank_is_local_whatever_the_setting() -> None:
    """A world of one needs no transport."""
    for name in ("auto", "all_to_all", "all_gather"):
        assert make(1, name)(step(7)).name == "local"


def test_an_unknown_dispatcher_is_refused() -> None:
    """The text says which there are."""
    with pytest.raises(ValueError, match="'nvlink': must be one of auto, all_to_all, all_gather"):
        make(2, "nvlink")


@given(
    num_tokens=st.lists(st.integers(0, 10**6), min_size=2, max_size=320),
    top_k=st.integers(1, 16),
    message_s=st.floats(0, 1),
    bytes_per_s=st.floats(1e6, 1e12),
)
def test_the_choice_is_the_cheaper_estimate(
    num_tokens: list[int], top_k: int, message_s: float, bytes_per_s: float
) -> None:
    """Estimates are finite and not negative; free messages never favour the gather."""
    sizes = step(*num_tokens)
    shape = TokenShape(hidden_size=64, top_k=top_k, element_size=4)
    link = LinkCost(message_s=message_s, bytes_per_s=bytes_per_s)
    routed = all_to_all_seconds(sizes, shape, link)
    gathered = all_gather_seconds(sizes, shape, link)
    assert 0 <= routed < float("inf")
    assert 0 <= gathered < float("inf")
    assert choose(sizes, shape, link) == ("all_gather" if gathered < routed else "all_to_all")
    free = LinkCost(message_s=0.0, bytes_per_s=bytes_per_s)
    assert choose(sizes, shape, free) == "all_to_all"
