"""Plans of every planner: valid, safe after each move, within budget, never worse by objective."""

from __future__ import annotations

import numpy as np
import pytest
from helpers_placement import copies_of, num_lost, situations, zipf
from hypothesis import given, settings
from hypothesis import strategies as st

from moeserve_placement.load import LoadHistory
from moeserve_placement.moves import copy_costs
from moeserve_placement.placement import Placement
from moeserve_placement.plan import Plan
from moeserve_placement.planners import PLANNERS, Budget, get_planner
from moeserve_placement.planners.eplb import eplb_table
from moeserve_placement.planners.scenario import ScenarioPlanner
from moeserve_placement.slot_table import (
    FREE,
    aligned,
    imbalance,
    rank_loads,
    slot_table,
)
from moeserve_placement.topology import Topology

ALL = sorted(PLANNERS)
SLOW = settings(max_examples=40, deadline=None)


def check_moves(plan: Plan, topology: Topology) -> None:
    """Every prefix is a valid placement that loses no expert, and the last one is the result."""
    assert plan.current is not None
    for layer in plan.layer_ids:
        had = copies_of(plan.current, topology, layer)
        for number in range(len(plan.moves) + 1):
            now = copies_of(plan.placement_after(number), topology, layer)
            assert had <= now  # Placement checks by itself that no rank holds one twice
            had = now
    assert plan.placement_after(len(plan.moves)) == plan.placement


def check_gone_ranks_are_empty(plan: Plan, topology: Topology) -> None:
    for rank, alive in enumerate(topology.alive):
        if not alive:
            assert all(set(ranks[rank]) <= {None} for ranks in plan.placement.layers.values())


@pytest.mark.parametrize("name", ALL)
@SLOW
@given(situation=situations())
def test_every_move_leaves_each_expert_a_copy(
    name: str, situation: tuple[LoadHistory, Topology, Placement | None]
) -> None:
    history, topology, current = situation
    plan = get_planner(name).plan(history, topology, current=current)
    check_gone_ranks_are_empty(plan, topology)
    assert plan.reason
    if current is None:
        assert not plan.moves
    else:
        check_moves(plan, topology)
        assert plan.num_bytes == plan.num_copies * topology.bytes_per_expert
        assert len(plan.explain()) == len(plan.moves) + 1


@pytest.mark.parametrize("name", ALL)
@SLOW
@given(situation=situations(), limit=st.integers(0, 20))
def test_byte_budget_is_never_exceeded_but_to_bring_lost_experts_back(
    name: str, situation: tuple[LoadHistory, Topology, Placement | None], limit: int
) -> None:
    history, topology, current = situation
    if current is None:
        return
    plan = get_planner(name).plan(
        history, topology, current=current, budget=Budget(max_bytes=limit)
    )
    lost = num_lost(current, history, topology)
    assert plan.num_copies <= limit // topology.bytes_per_expert + lost
    check_gone_ranks_are_empty(plan, topology)
    check_moves(plan, topology)


@pytest.mark.parametrize("split", ["even", "planned", "batch"])
@settings(max_examples=30, deadline=None)
@given(situation=situations())
def test_plan_is_never_worse_than_staying_or_eplb_by_its_objective(
    split: str, situation: tuple[LoadHistory, Topology, Placement | None]
) -> None:
    history, topology, current = situation
    if history.is_empty:
        return
    planner = ScenarioPlanner(split=split)
    plan = planner.plan(history, topology, current=current)
    scenarios, objective = history.scenarios(), planner.objective
    busy = history.busy_layers
    here = None
    if current is not None:
        if not all(topology.alive):
            return
        here = slot_table(current, history.layer_ids, topology=topology)

    def value(table: np.ndarray) -> np.ndarray:
        return objective.score(table, scenarios, topology, history=history, current=here)[busy]

    ours = value(slot_table(plan.placement, history.layer_ids, topology=topology))
    eplb = eplb_table(history.mean, topology)
    if here is not None:
        assert (ours <= value(here) + 1e-6).all()
        eplb = aligned(eplb, here, topology=topology)
    assert (ours <= value(eplb) + 1e-6).all()


@settings(max_examples=25, deadline=None)
@given(situation=situations(), limit=st.integers(0, 12))
def test_with_a_budget_no_layer_gets_worse(
    situation: tuple[LoadHistory, Topology, Placement | None], limit: int
) -> None:
    history, topology, current = situation
    if history.is_empty or current is None or not all(topology.alive):
        return
    planner = ScenarioPlanner()
    budget = Budget(max_copies=limit)
    plan = planner.plan(history, topology, current=current, budget=budget)
    assert plan.before is not None and plan.after is not None
    for layer, value in plan.after.objective.items():
        assert value <= plan.before.objective[layer] + 1e-6


@settings(max_examples=20, deadline=None)
@given(seed=st.integers(0, 1000))
def test_each_move_with_a_gain_lowers_the_objective(seed: int) -> None:
    history = LoadHistory([0, 1], 24)
    history.observe(1e6 * zipf(24, 1.0, 2, seed))
    topology = Topology.uniform(4, 7)
    current = get_planner("linear").plan(history, topology).placement
    planner = ScenarioPlanner()
    plan = planner.plan(history, topology, current=current, budget=Budget(max_copies=10))
    scenarios, values = history.scenarios(), []
    for number in range(len(plan.moves) + 1):
        table = slot_table(plan.placement_after(number), history.layer_ids)
        score = planner.objective.score(table, scenarios, topology, history=history)
        values.append(float(score.sum()))
    assert plan.moves
    gains = [move.gain for move in plan.moves]
    np.testing.assert_allclose(-np.diff(values), gains, atol=1e-6)
    assert min(gains) > 0


@settings(max_examples=20, deadline=None)
@given(seed=st.integers(0, 1000))
def test_two_percent_noise_moves_nothing_once_planned(seed: int) -> None:
    rng = np.random.default_rng(seed)
    load = 1e5 * zipf(32, 0.8, 3, seed)
    history = LoadHistory(range(3), 32)
    history.observe(load)
    topology = Topology.uniform(8, 5)
    budget = Budget(max_copies=6)
    placement = get_planner("scenario").plan(history, topology).placement
    placement = get_planner("scenario").plan(history, topology, current=placement).placement
    moved = 0
    for _ in range(4):
        history.observe(load * rng.normal(1.0, 0.02, load.shape).clip(0.9))
        plan = get_planner("scenario").plan(history, topology, current=placement, budget=budget)
        assert plan.num_copies <= 6
        moved += plan.num_copies > 0
        placement = plan.placement
    assert moved <= 1


@pytest.mark.parametrize("name", ALL)
def test_no_load_is_no_move_with_a_reason(name: str) -> None:
    topology = Topology.uniform(3, 3)
    current = Placement.linear(7, 3, [0])
    history = LoadHistory([0], 7)
    history.observe(np.zeros((1, 7)))
    plan = get_planner(name).plan(history, topology, current=current)
    assert plan.is_stay
    assert plan.reason


def test_eplb_reproduces_its_published_example() -> None:
    load = np.array([[600.0, 560, 120, 120, 20, 10, 10, 10]])
    topology = Topology.uniform(8, 2)
    assert rank_loads(load, eplb_table(load, topology)).max() == 232


def test_eplb_with_repeats_packs_as_published_and_without_never_twice_on_a_rank() -> None:
    load, topology = np.array([[9.0, 1.0]]), Topology.uniform(2, 3)
    assert eplb_table(load, topology, repeats=True).tolist() == [[[0, 0, 0], [0, 0, 1]]]
    assert eplb_table(load, topology).tolist() == [[[0, 1, FREE], [0, 1, FREE]]]


def test_flashlb_is_at_least_as_good_as_its_published_example() -> None:
    history = LoadHistory([0], 8)
    load = np.array([[600, 560, 120, 120, 20, 10, 10, 10]])
    history.observe(load)
    plan = get_planner("flashlb").plan(history, Topology.uniform(8, 2))
    table = slot_table(plan.placement, [0])
    assert 181.25 <= rank_loads(load.astype(float), table).max() <= 205


@pytest.mark.parametrize("exponent", [0.6, 1.0, 1.4])
def test_planned_shares_balance_their_own_load_to_one_percent(exponent: float) -> None:
    load = zipf(64, exponent, 2, 3)
    history = LoadHistory(range(2), 64)
    history.observe(1e9 * load)
    plan = get_planner("scenario", split="planned").plan(history, Topology.uniform(32, 3))
    table = slot_table(plan.placement, history.layer_ids)
    assert imbalance(rank_loads(load, table, shares=plan.shares)).max() <= 1.01


def test_hierarchical_eplb_keeps_groups_whole_on_a_node() -> None:
    history = LoadHistory([0], 16)
    history.observe(np.arange(1, 17)[None])
    topology = Topology.uniform(4, 5, num_nodes=2)
    plan = get_planner("eplb-hierarchical", num_groups=4).plan(history, topology)
    nodes = [set(), set()]
    for rank, slots in enumerate(plan.placement.layers[0]):
        nodes[rank // 2] |= {expert // 4 for expert in slots if expert is not None}
    assert nodes[0].isdisjoint(nodes[1])


def test_sticky_eplb_copies_no_more_than_eplb() -> None:
    topology, history = Topology.uniform(8, 9), LoadHistory([0], 64)
    history.observe(1e6 * zipf(64, 1.0, 1, 0))
    current = get_planner("eplb").plan(history, topology).placement
    history.observe(1e6 * zipf(64, 1.0, 1, 1))
    plans = [
        get_planner(name).plan(history, topology, current=current)
        for name in ("eplb-sticky", "eplb")
    ]
    assert plans[0].num_copies <= plans[1].num_copies


def test_co_activated_experts_end_up_on_one_node() -> None:
    history = LoadHistory([0], 8)
    pairs = np.zeros((1, 8, 8))
    for first, second in ((0, 7), (1, 6), (2, 5), (3, 4)):
        pairs[0, first, second] = pairs[0, second, first] = 100
    history.observe(np.full((1, 8), 100), pairs)
    topology = Topology.uniform(4, 2, num_nodes=2)
    plan = get_planner("scenario", remote_weight=0.5).plan(history, topology)
    node_of = {
        expert: rank // 2 for rank, slots in enumerate(plan.placement.layers[0]) for expert in slots
    }
    assert all(node_of[e] == node_of[7 - e] for e in range(4))
    assert plan.after is not None and plan.after.nodes_per_token is not None
    assert plan.after.nodes_per_token[0] == pytest.approx(1.0, abs=0.01)


def test_copies_cost_by_the_link_they_take() -> None:
    topology = Topology.uniform(4, 1, num_nodes=2)
    current = np.array([[[0], [1], [-1], [-1]]])
    target = np.array([[[1], [1], [0], [2]]])
    costs = copy_costs(current, target, topology=topology, num_experts=3)
    links = topology.link_costs
    assert costs[0] == links.node + links.fabric + links.host


def test_too_few_slots_are_named() -> None:
    history = LoadHistory([0], 9)
    history.observe(np.ones((1, 9)))
    for name in ALL:
        with pytest.raises(ValueError, match="8 usable slots"):
            get_planner(name).plan(history, Topology.uniform(4, 2))
