"""Plans under a budget and after a loss: what must come back does, and the rest is well spent."""

from __future__ import annotations

import numpy as np
import pytest
from helpers_placement import copies_of, num_lost, situations, zipf
from hypothesis import given, settings
from hypothesis import strategies as st

from moeserve_placement.load import LoadHistory
from moeserve_placement.moves import num_copies
from moeserve_placement.placement import Placement
from moeserve_placement.planners import PLANNERS, Budget, get_planner
from moeserve_placement.planners.eplb import eplb_table, least_copies, least_new_copies, overlaps
from moeserve_placement.planners.repair import repaired
from moeserve_placement.planners.scenario import ScenarioPlanner
from moeserve_placement.slot_table import aligned, is_complete, slot_table, surviving
from moeserve_placement.topology import Topology


def check_against_stay_and_eplb(
    history: LoadHistory, topology: Topology, current: Placement, limit: int, split: str = "even"
) -> bool:
    """No worse than staying, nor than EPLB where the budget allows it, in sum over busy layers."""
    planner = ScenarioPlanner(split=split)
    plan = planner.plan(history, topology, current=current, budget=Budget(max_copies=limit))
    assert plan.num_copies <= limit + num_lost(current, history, topology)
    now = slot_table(current, history.layer_ids, topology=topology)
    here, scenarios, busy = surviving(now, topology), history.scenarios(), history.busy_layers
    stay = repaired(here, scenarios.mean, topology)
    eplb = aligned(eplb_table(history.mean, topology), here, topology=topology)
    ours, staying, theirs = (
        planner.objective.score(table, scenarios, topology, history=history, current=here)[busy]
        for table in (slot_table(plan.placement, history.layer_ids), stay, eplb)
    )
    assert ours.sum() <= staying.sum() + 1e-6
    fits = (num_copies(here, eplb) - num_copies(here, stay))[busy].sum() <= limit
    assert not fits or ours.sum() <= theirs.sum() + 1e-6
    return bool(fits and theirs.sum() < staying.sum())


@settings(max_examples=150, deadline=None)
@given(situation=situations(), limit=st.integers(0, 14))
def test_with_a_budget_a_plan_is_never_worse_than_staying_or_an_affordable_eplb(
    situation: tuple[LoadHistory, Topology, Placement | None], limit: int
) -> None:
    history, topology, current = situation
    if current is not None and not history.is_empty:
        check_against_stay_and_eplb(history, topology, current, limit)


@pytest.mark.parametrize("split", ["even", "planned", "batch"])
def test_eplb_is_taken_where_steps_have_used_up_what_it_needs(split: str) -> None:
    """Loads that changed wholly, several layers, and just enough for EPLB or a little more."""
    mattered = 0
    for seed in range(40):
        rng = np.random.default_rng(seed)
        layers, topology = int(rng.integers(1, 4)), Topology(slots_per_rank=(10, 8))
        if seed % 2:
            topology = Topology.uniform(4, 5, num_nodes=2)
        history = LoadHistory(range(layers), 15)
        history.observe(rng.zipf(1.4, (layers, 15)).clip(max=2000))
        current = get_planner("eplb").plan(history, topology).placement
        for _ in range(3):
            history.observe(rng.zipf(1.4, (layers, 15)).clip(max=2000))
        needed = get_planner("eplb").plan(history, topology, current=current).num_copies
        limit = needed + int(rng.integers(0, 3))
        mattered += check_against_stay_and_eplb(history, topology, current, limit, split)
    assert mattered > 10


def test_renamed_ranks_keep_their_speed() -> None:
    table = np.array([[[0, 1], [2, 3], [4, 5]]])
    topology = Topology(slots_per_rank=(2, 2, 2), speed_of_rank=(1.0, 2.0, 1.0))
    may_swap = np.isfinite(overlaps(table, table, topology)[0])
    assert may_swap.tolist() == [[True, False, True], [False, True, False], [True, False, True]]


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 2**32 - 1), gone=st.sets(st.integers(0, 3), min_size=1, max_size=2))
def test_lost_experts_come_back_before_anything_else_moves(seed: int, gone: set[int]) -> None:
    """With loads that changed layers are replaced as a whole, which is a restoring move too."""
    rng = np.random.default_rng(seed)
    topology, history = Topology.uniform(4, 5), LoadHistory(range(3), 10)
    history.observe(rng.zipf(1.3, (3, 10)).clip(max=5000))
    current = get_planner("eplb").plan(history, topology).placement
    history.observe(rng.zipf(1.3, (3, 10)).clip(max=5000))
    left = topology.without(sorted(gone))
    plan = get_planner("scenario").plan(history, left, current=current)
    lost = [
        num_lost(plan.placement_after(number), history, left)
        for number in range(len(plan.moves) + 1)
    ]
    restored = lost.index(0)
    assert (np.diff(lost[: restored + 1]) < 0).all()


@pytest.mark.parametrize("name", sorted(PLANNERS))
@settings(max_examples=30, deadline=None)
@given(situation=situations())
def test_without_any_budget_only_what_was_lost_comes_back(
    name: str, situation: tuple[LoadHistory, Topology, Placement | None]
) -> None:
    history, topology, current = situation
    if current is None:
        return
    plan = get_planner(name).plan(history, topology, current=current, budget=Budget(max_copies=0))
    assert plan.num_copies == num_lost(current, history, topology)
    table = slot_table(plan.placement, history.layer_ids)
    assert is_complete(surviving(table, topology), history.num_experts)
    assert (surviving(table, topology) == table).all()
    if plan.after is not None:
        assert all(np.isfinite(list(plan.after.objective.values())))


def test_layers_that_lost_an_expert_move_first_whoever_planned() -> None:
    topology, history = Topology.uniform(3, 3), LoadHistory(range(2), 6)
    history.observe(1000 * zipf(6, 1.0, 2, 0))
    layers = {
        0: ((0, 1, 2), (3, 4, 5), (0, 1, 2)),
        1: ((0, 1, None), (2, 3, None), (4, 5, None)),
    }
    current = Placement(num_experts=6, layers=layers)
    left = topology.without([2])
    for name in sorted(PLANNERS):
        plan = get_planner(name).plan(history, left, current=current)
        copying = [move.layer for move in plan.moves if move.num_copies]
        assert copying[0] == 1
        assert copies_of(plan.placement_after(len(plan.moves)), left, 1) == set(range(6))


@pytest.mark.parametrize(
    ("limit", "words"),
    [
        (0, "there are changes that would pay, but the budget of 0 copies allows none of them"),
        (1, "1 copy in 1 of 1 layers: predicted imbalance"),
        (None, "copies in 1 of 1 layers: predicted imbalance"),
    ],
)
def test_staying_for_the_budget_says_so(limit: int | None, words: str) -> None:
    history, topology = LoadHistory([0], 12), Topology.uniform(4, 4)
    history.observe(1000 * np.arange(1, 13)[None] ** 2)
    current = get_planner("linear").plan(history, topology).placement
    budget = Budget(max_copies=limit)
    plan = get_planner("scenario").plan(history, topology, current=current, budget=budget)
    assert words in plan.reason
    settled = get_planner("scenario").plan(history, topology).placement
    plan = get_planner("scenario").plan(history, topology, current=settled, budget=budget)
    within = "" if limit is None else f" within the budget of {limit} cop"
    assert f"stay: no change of any layer{within}" in plan.reason


@pytest.mark.parametrize("split", ["even", "planned", "batch"])
@pytest.mark.parametrize("gone", [None, 1])
def test_without_any_load_the_planner_and_its_split_are_named(split: str, gone: int | None) -> None:
    history, topology = LoadHistory([4], 6), Topology.uniform(3, 3)
    current = Placement.linear(6, 3, [4])
    if gone is not None:
        topology = topology.without([gone])
    for start in (None, current):
        plan = get_planner("scenario", split=split).plan(history, topology, current=start)
        assert (plan.planner, plan.split) == ("scenario", split)
        assert plan.reason == "scenario: no load observed yet"
        assert (plan.shares is not None) == (split == "planned")
        if plan.shares is not None:
            table = slot_table(plan.placement, [4], topology=topology)
            for expert in range(6):
                assert plan.shares[table == expert].sum() == pytest.approx(1.0)


@pytest.mark.parametrize("power", [32, 64])
@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 2**32 - 1))
def test_very_unequal_speeds_are_planned_for_without_overflow(power: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    ranks = int(rng.integers(2, 7))
    speeds = 10.0 ** rng.uniform(-2, 2, ranks)
    speeds[:2] = (1e-2, 1e2)
    topology = Topology(slots_per_rank=(5,) * ranks, speed_of_rank=tuple(speeds))
    history = LoadHistory([0], int(rng.integers(1, 5 * ranks + 1)))
    history.observe(rng.zipf(1.3, history.shape).clip(max=10**6))
    planner = ScenarioPlanner(power=power)
    with np.errstate(over="raise", invalid="raise"):
        plan = planner.plan(history, topology)
        again = planner.plan(
            history, topology, current=get_planner("linear").plan(history, topology).placement
        )
    scenarios = history.scenarios()
    ours, theirs = (
        planner.objective.score(table, scenarios, topology, history=history)
        for table in (slot_table(plan.placement, [0]), eplb_table(history.mean, topology))
    )
    assert (ours <= theirs * (1 + 1e-9)).all()
    assert again.after is not None and np.isfinite(again.after.worst)


@settings(max_examples=60, deadline=None)
@given(
    experts=st.integers(1, 24),
    ranks=st.integers(1, 6),
    nodes=st.integers(1, 3),
    groups=st.integers(1, 30),
    seed=st.integers(0, 2**32 - 1),
)
def test_hierarchical_eplb_keeps_groups_where_it_can_and_is_eplb_elsewhere(
    experts: int, ranks: int, nodes: int, groups: int, seed: int
) -> None:
    rng = np.random.default_rng(seed)
    nodes = min(nodes, ranks)
    whole = Topology.uniform(ranks, -(-experts // ranks) + 2, num_nodes=nodes)
    gone = [rank for rank in range(ranks) if rng.random() < 0.3]
    topology = whole
    if len(gone) < ranks and whole.without(gone).num_slots >= experts:
        topology = whole.without(gone)
    history = LoadHistory([0], experts)
    history.observe(rng.integers(1, 100, (1, experts)))
    found = get_planner("eplb-hierarchical", num_groups=groups).plan(history, topology)
    node_of = np.array(topology.node_of_rank)
    table = slot_table(found.placement, [0], topology=topology)[0]
    living = {int(node) for node in node_of[list(topology.alive)]}
    room = [topology.usable_slots[node_of == node].sum() for node in living]
    if (
        groups > 1
        and experts % groups == 0
        and groups % len(living) == 0
        and (min(room) >= experts // len(living))
    ):
        size = experts // groups
        for group in range(groups):
            homes = {
                int(node_of[r]) for r, s in np.argwhere(table // size == group) if table[r, s] >= 0
            }
            assert len(homes) == 1
    else:
        assert found.placement == get_planner("eplb").plan(history, topology).placement


@settings(max_examples=100, deadline=None)
@given(situation=situations())
def test_copies_that_eplb_needs_are_never_overestimated(
    situation: tuple[LoadHistory, Topology, Placement | None],
) -> None:
    history, topology, current = situation
    if current is None:
        return
    here = surviving(slot_table(current, history.layer_ids, topology=topology), topology)
    eplb = eplb_table(history.mean, topology)
    copies = num_copies(here, eplb)
    assert (least_new_copies(history.mean, here, topology) <= copies).all()
    assert (least_copies(eplb, here, topology) <= copies).all()
