"""What the sentences say, checked against a hand-made layer."""

from __future__ import annotations

import numpy as np
import pytest

from moeserve_placement.placement import Placement, PlacementError
from moeserve_placement.plan import Move, SlotWrite
from moeserve_placement.report.explain import explain
from moeserve_placement.report.plan_file import PlanFile
from moeserve_placement.topology import Topology

BEFORE = ((0, 1, None), (2, 3, None))
AFTER = ((0, 1, None), (2, 3, 0))


def layer_plan(gain: float | None, *, current: bool = True, load: object = None) -> PlanFile:
    """Loads 8 4 2 2: rank 0 has 12 of 16, 1.5 x the mean; a copy of expert 0 makes it 8 and 8."""
    write = SlotWrite(
        rank=1, slot=2, expert=0, replaces=None, source_rank=0, link="fabric", num_bytes=10
    )
    return PlanFile(
        planner="scenario",
        reason="a test",
        split="even",
        topology=Topology.uniform(2, 3, num_nodes=2, bytes_per_expert=10),
        placement=Placement(num_experts=4, layers={6: AFTER}),
        current=Placement(num_experts=4, layers={6: BEFORE}) if current else None,
        moves=(Move(layer=6, writes=(write,), gain=gain),) if current else (),
        load=np.array([[8, 4, 2, 2]] if load is None else load, dtype=float),
        before=1.5,
        after=1.0,
    )


def test_a_move_is_explained_by_the_fullest_rank() -> None:
    reason, sentence = explain(layer_plan(0.5))
    assert reason == "scenario: a test"
    assert sentence == (
        "1. layer 6: expert 0 (2.00 x the mean expert, 1 copy so far) is copied from rank 0 on "
        "another node to rank 1 (slot 2), a free slot. Why: rank 0 was the fullest, 1.500 x the "
        "mean, and is now at 1.000; imbalance 1.500 -> 1.000."
    )


def test_a_move_that_helps_other_traffic_says_so() -> None:
    """With loads 1 1 4 4 the copy only adds to the fullest rank, but the planner saw a gain."""
    *_, sentence = explain(layer_plan(0.25, load=[[1, 1, 4, 4]]))
    assert "for fewer nodes per token or for traffic other than the average" in sentence
    assert "objective gains 0.2500" in sentence and "imbalance 1.600 -> 1.700" in sentence


def test_a_move_without_a_gain_is_a_step() -> None:
    *_, sentence = explain(layer_plan(None, load=[[1, 1, 4, 4]]))
    assert "A step on the way to the planned placement, alone it costs balance" in sentence


def test_a_cold_start_says_which_experts_got_copies() -> None:
    _, sentence = explain(layer_plan(None, current=False))
    assert sentence == (
        "layer 6: copies for experts 0 (2.00 x the mean, 2 copies). 1 expert carries 1.5 x the "
        "mean or more; the fullest rank is 0 at 1.000 x the mean."
    )


def test_only_layers_asked_for_are_explained() -> None:
    assert len(list(explain(layer_plan(0.5), layers={6}))) == 2
    with pytest.raises(PlacementError, match="layer 7: the plan has layers 6"):
        list(explain(layer_plan(0.5), layers={7}))
