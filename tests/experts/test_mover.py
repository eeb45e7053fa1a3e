"""Experts that move between ranks: any valid target is reached, and no step sees half a move."""

from __future__ import annotations

import random

from helpers_moves import LAYERS, LocalRanks, random_layers
from hypothesis import given, settings
from hypothesis import strategies as st

from moeserve.control.targets import moves_between
from moeserve.experts.orders import Order, order_from_moves
from moeserve_placement import Placement


def order_to(ranks: LocalRanks, target: Placement) -> Order:
    """The order from where experts are to ``target``."""
    slot_map = ranks.stores[0].slot_map
    return order_from_moves(1, moves_between(slot_map, target, ranks.expert_bytes), slot_map)


@settings(deadline=None, max_examples=500)
@given(seed=st.integers(0, 2**32), num_ranks=st.integers(2, 4), budget=st.integers(100, 2000))
def test_any_placement_is_reached_from_any_other(seed: int, num_ranks: int, budget: int) -> None:
    """After each flip every expert has its weights somewhere; at the end all is as was asked."""
    rng = random.Random(seed)
    ranks = LocalRanks(random_layers(rng, num_ranks))
    target = ranks.random_target(rng)
    order = order_to(ranks, target)
    ranks.carry_out(order, budget, after_flip=ranks.check)
    for layer in LAYERS:
        for rank in range(num_ranks):
            held = set(ranks.stores[0].slot_map.layers[layer][rank]) - {None}
            assert held == set(target.layers[layer][rank]) - {None}


def test_a_thousand_rebalances_leave_every_checksum_right() -> None:
    rng = random.Random(1)
    ranks = LocalRanks(random_layers(rng, 3))
    for _ in range(1000):
        ranks.carry_out(order_to(ranks, ranks.random_target(rng)), 10**6)
    ranks.check()


def test_a_wrong_byte_on_the_way_stops_the_order_and_changes_nothing() -> None:
    rng = random.Random(2)
    ranks = LocalRanks(random_layers(rng, 2))
    target = ranks.random_target(rng)
    while not order_to(ranks, target).num_copies:
        target = ranks.random_target(rng)
    before = ranks.stores[0].slot_map.layers
    ranks.corrupt_next = True
    reasons = ranks.carry_out(order_to(ranks, target), 10**6)
    assert "is not what the checkpoint holds" in reasons[0]
    assert ranks.stores[0].slot_map.layers == before or ranks.num_flips
    ranks.check()
    ranks.carry_out(order_to(ranks, target), 10**6)  # the next one goes through
    ranks.check()
