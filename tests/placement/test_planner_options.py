"""Options of planners and budgets: any value gives a valid plan or one clear error."""

from __future__ import annotations

import inspect
from typing import Any

import numpy as np
import pytest
from helpers_placement import situations
from hypothesis import given, settings
from hypothesis import strategies as st

from moeserve_placement.load import LoadHistory
from moeserve_placement.placement import Placement, PlacementError
from moeserve_placement.planners import PLANNERS, Budget, get_planner
from moeserve_placement.topology import Topology

OPTIONS = [(name, key) for name in PLANNERS for key in inspect.signature(PLANNERS[name]).parameters]
FRACTIONS = {"threshold", "gate", "remote_weight", "move_weight", "change_weight"}
VALUES = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-3, 70),
    st.sampled_from(
        [
            10**9,
            2**63,
            10**400,
            10**5000,
            "x" * 999,
            "recent",
            "slow",
            "even",
            "batch",
            "foo",
            "",
            [1],
            1j,
        ]
    ),
    st.floats(),
)


@pytest.mark.parametrize(("name", "option"), OPTIONS)
def test_values_of_a_wrong_kind_are_refused_with_the_option_and_its_value(
    name: str, option: str
) -> None:
    wrong: list[Any] = [
        None,
        "foo",
        float("nan"),
        float("inf"),
        -1,
        [],
        np.ones(300),
        1j,
        "x\n" * 99,
    ]
    wrong += [] if option in FRACTIONS else [2.5, 2.0]
    wrong += [] if option == "sticky" else [True]
    for value in wrong:
        with pytest.raises(PlacementError, match=rf"^{option} = .*: must be"):
            get_planner(name, **{option: value})


@pytest.mark.parametrize(("name", "option"), OPTIONS)
@settings(max_examples=25, deadline=None)
@given(value=VALUES, situation=situations())
def test_any_value_of_an_option_gives_a_plan_or_names_the_option(
    name: str,
    option: str,
    value: object,
    situation: tuple[LoadHistory, Topology, Placement | None],
) -> None:
    history, topology, current = situation
    try:
        planner = get_planner(name, **{option: value})
    except PlacementError as error:
        assert str(error).startswith(f"{option} = ")
        assert len(str(error)) < 200 and "\n" not in str(error)
        return
    plan = planner.plan(history, topology, current=current)
    assert plan.planner in (name, "eplb-sticky")


@pytest.mark.parametrize(
    ("name", "options", "text"),
    [
        ("nothing", {}, "must be one of"),
        ("scenario", {"power": 7}, "power = 7: must be one of 2, 4, 8, 16, 32, 64"),
        ("scenario", {"split": "odd"}, "split = 'odd': must be one of even, planned, batch"),
        ("scenario", {"nonsense": 1}, "no option 'nonsense', it takes split"),
        ("linear", {"power": 2}, "no option 'power', it takes none"),
        ("eplb", {"average": "x"}, "average = 'x': must be one of recent, fast, slow"),
        ("flashlb", {"stages": 0}, "stages = 0: must be an integer of at least 1"),
        ("exchange", {"threshold": -1}, "threshold = -1: must be a finite number of at least 0"),
    ],
)
def test_wrong_options_are_named(name: str, options: dict[str, object], text: str) -> None:
    with pytest.raises(PlacementError, match=text):
        get_planner(name, **options)


def test_more_divisions_than_spare_slots_try_each_number_of_them_once() -> None:
    history = LoadHistory([0], 10)
    history.observe(np.arange(1, 11)[None] ** 2)
    topology = Topology.uniform(4, 4)
    few, many = (
        get_planner("flashlb", divisions=divisions).plan(history, topology).placement
        for divisions in (7, 10**9)
    )
    assert few == many


@pytest.mark.parametrize("name", ["max_bytes", "max_copies"])
@pytest.mark.parametrize("value", [float("nan"), float("inf"), -1, 2.5, "3", True])
def test_a_budget_is_a_whole_number(name: str, value: Any) -> None:
    with pytest.raises(PlacementError, match=f"^{name} = .*: must be an integer of at least 0"):
        Budget(**{name: value})
