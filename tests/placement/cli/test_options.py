"""Option values: whatever is typed gives a value or one error that names the option."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moeserve_placement.cli import placement_options as options
from moeserve_placement.placement import PlacementError

NUMBERS = st.one_of(
    st.integers(1, 5000).map(lambda digits: "9" * digits),
    st.floats().map(str),
    st.sampled_from(["1e999", "1" + "0" * 400 + ".5", "0." + "1" * 400, "٣", "1_0"]),
)
SIZES = st.builds("{}{}{}".format, NUMBERS, st.sampled_from(["", "GB", "TiB", "x"]), st.just(""))


@given(NUMBERS | SIZES | st.text(max_size=8))
def test_any_text_is_a_value_or_an_error_that_names_the_option(text: str) -> None:
    for name, read in (
        ("size", lambda: options.num_bytes("size", text)),
        ("numbers", lambda: options.integers("numbers", text)),
        ("speeds", lambda: options.floats("speeds", text)),
        ("budget", lambda: options.budgets(f"{text}/layer", 4096)),
        ("budget", lambda: options.budgets(text, 4096)),
        ("planner", lambda: options.planners(f"scenario:power={text}")),
    ):
        try:
            read()
        except ValueError as error:
            assert name in str(error) or "power" in str(error)
            assert len(str(error)) < 300


@pytest.mark.parametrize("text", ["9" * 400, "9" * 18, "2000TB", "1." + "0" * 400])
def test_sizes_that_no_machine_has_are_refused(text: str) -> None:
    with pytest.raises(PlacementError, match="size = '"):
        options.num_bytes("size", text)
    assert options.num_bytes("size", "1024TiB") == 2**50


@given(copies=st.integers(0, 2**40), size=st.integers(0, 2**50), layers=st.integers(1, 4096))
def test_budgets_stay_within_64_bits(copies: int, size: int, layers: int) -> None:
    (budget,) = options.budgets(f"{copies}/layer", layers)
    assert budget.budget.max_copies == copies * layers < 2**63
    (budget,) = options.budgets(f"{size}B/layer", layers)
    assert budget.budget.max_bytes == size * layers < 2**63


@pytest.mark.parametrize(
    ("machine", "words"),
    [
        ({"ranks": 10**8}, "ranks = 100000000: must be at most 4096"),
        ({"slots": "1000000000"}, "slots = 1000000000: must be at most 262144"),
        ({"slots": "9" * 400}, "slots = '999"),
        ({"expert_bytes": "9" * 400}, "expert_bytes = '999"),
        ({"ranks": -1}, "num_ranks = -1"),
    ],
)
def test_machines_that_do_not_exist_are_refused(machine: dict[str, object], words: str) -> None:
    given = {"ranks": 4, "slots": "3", "nodes": 1, "speeds": None, "gone": None}
    with pytest.raises(PlacementError, match=words):
        options.make_topology(**(given | {"expert_bytes": "1"} | machine))  # type: ignore[arg-type]
