"""Topology and plans: what they accept and what they say."""

from __future__ import annotations

import numpy as np
import pytest
from helpers_placement import topologies
from hypothesis import given
from hypothesis import strategies as st

from moeserve_placement.placement import Placement
from moeserve_placement.plan import apply_moves
from moeserve_placement.planners.base import linear_table
from moeserve_placement.slot_table import slot_table, to_placement
from moeserve_placement.topology import LinkCosts, Topology


@given(st.integers(1, 9).flatmap(lambda n: st.tuples(st.just(n), topologies(n))))
def test_linear_fits_every_topology_and_round_trips(case: tuple[int, Topology]) -> None:
    experts, topology = case
    table = linear_table(experts, topology)[None]
    placement = to_placement(table, [3], num_experts=experts, topology=topology)
    assert (slot_table(placement, [3], topology=topology) == table).all()
    assert ((table[0] >= 0).sum(1) <= topology.usable_slots).all()


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"slots_per_rank": ()}, "slots_per_rank"),
        ({"slots_per_rank": (1, -1)}, "slots_per_rank"),
        ({"slots_per_rank": (1, 1), "node_of_rank": (0, 2)}, "numbered 0, 1, 2"),
        ({"slots_per_rank": (1, 1), "node_of_rank": (0,)}, "one per rank"),
        ({"slots_per_rank": (1,), "speed_of_rank": (0.0,)}, "speed_of_rank"),
        ({"slots_per_rank": (1,), "alive": (False,)}, "at least one rank"),
        ({"slots_per_rank": (1,), "bytes_per_expert": 0}, "bytes_per_expert"),
        ({"slots_per_rank": (1,), "bytes_per_expert": 1.5}, "bytes_per_expert = 1.5"),
        ({"slots_per_rank": (2.5, 2)}, r"slots_per_rank\[0\] = 2.5: must be an integer"),
        ({"slots_per_rank": (2, True)}, r"slots_per_rank\[1\] = True"),
        ({"slots_per_rank": (1,), "node_of_rank": (0.0,)}, r"node_of_rank\[0\] = 0.0"),
        ({"slots_per_rank": (1,), "speed_of_rank": (float("nan"),)}, r"speed_of_rank\[0\] = nan"),
        ({"slots_per_rank": (1,), "speed_of_rank": ("1",)}, r"speed_of_rank\[0\] = '1'"),
        (
            {"slots_per_rank": (1, 1), "speed_of_rank": (1.0, 1.1e4)},
            "from 1 to 11000, the fastest rank must be at most 10,000 times as fast",
        ),
    ],
)
def test_impossible_topologies_are_named(options: dict[str, object], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        Topology(**options)  # type: ignore[arg-type]


def test_speeds_have_mean_one_over_ranks_alive() -> None:
    topology = Topology(
        slots_per_rank=(1, 1, 1), speed_of_rank=(1.0, 3.0, 9.0), alive=(True, True, False)
    )
    np.testing.assert_allclose(topology.speeds, [0.5, 1.5, 0.0])
    assert topology.divisors.tolist() == [0.5, 1.5, 1.0]
    assert topology.without([0]).usable_slots.tolist() == [0, 1, 0]


@pytest.mark.parametrize("rank", [77, 2, -1, 0.5])
def test_only_ranks_that_there_are_can_go(rank: int) -> None:
    with pytest.raises(ValueError, match=f"ranks gone = {rank}: must be an integer from 0 to 1"):
        Topology.uniform(2, 2).without([rank])


@pytest.mark.parametrize("cost", [-1.0, float("nan"), float("inf"), 1e9])
def test_impossible_link_costs_are_refused(cost: float) -> None:
    with pytest.raises(ValueError, match=r"link_costs\.fabric"):
        LinkCosts(fabric=cost)


def test_moves_of_another_placement_are_refused() -> None:
    from moeserve_placement.plan import Move, SlotWrite

    write = SlotWrite(rank=0, slot=0, expert=1, replaces=1, source_rank=1, link="node", num_bytes=1)
    with pytest.raises(ValueError, match="does not hold 1"):
        apply_moves(Placement.linear(2, 2, [0]), [Move(layer=0, writes=(write,))])
