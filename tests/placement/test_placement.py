"""Placements: validity, strategies, the JSON form."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moeserve_placement import STRATEGIES, Placement, PlacementError

EXAMPLE = """{
  "format": "moeserve-placement",
  "version": 1,
  "num_experts": 4,
  "layers": {
    "0": [[0, 1, 2], [3, 0, null]]
  }
}
"""


@st.composite
def placements(draw: st.DrawFn) -> Placement:
    """Any valid placement: copies, free slots, empty ranks, layers of different shapes."""
    num_experts, num_ranks = draw(st.integers(1, 12)), draw(st.integers(1, 5))
    layers = {}
    for layer in draw(st.sets(st.integers(0, 99), min_size=1, max_size=3)):
        ranks: list[list[int | None]] = [[] for _ in range(num_ranks)]
        for expert in range(num_experts):
            for rank in draw(st.sets(st.integers(0, num_ranks - 1), min_size=1)):
                ranks[rank].append(expert)
        for slots in ranks:
            slots += [None] * draw(st.integers(0, 2))
        layers[layer] = tuple(tuple(draw(st.permutations(slots))) for slots in ranks)
    return Placement(num_experts=num_experts, layers=layers)


@given(placements())
def test_json_gives_the_same_placement_back(placement: Placement) -> None:
    """Through text, and the text is stable."""
    text = placement.to_json()
    assert Placement.from_json(text) == placement
    assert Placement.from_json(text).to_json() == text


@given(placements())
def test_copies_are_where_the_slots_say(placement: Placement) -> None:
    """Every occupied slot is a copy of its expert, in rank order."""
    for layer, ranks in placement.layers.items():
        copies = placement.copies(layer)
        assert len(copies) == placement.num_experts
        for expert, places in enumerate(copies):
            assert places
            assert list(places) == sorted(places)
            assert all(ranks[rank][slot] == expert for rank, slot in places)
        occupied = sum(slot is not None for slots in ranks for slot in slots)
        assert sum(map(len, copies)) == occupied


@given(
    strategy=st.sampled_from(STRATEGIES),
    num_experts=st.integers(1, 300),
    num_ranks=st.integers(1, 40),
)
def test_strategies_place_each_expert_once_and_evenly(
    strategy: str, num_experts: int, num_ranks: int
) -> None:
    """Any counts; ranks differ by one expert at most. More ranks than experts is refused."""
    if num_ranks > num_experts:
        with pytest.raises(PlacementError, match=f"must be at most {num_experts}"):
            Placement.from_strategy(strategy, num_experts, num_ranks, [0])
        return
    placement = Placement.from_strategy(strategy, num_experts, num_ranks, [0, 7])
    assert placement.num_ranks == num_ranks
    assert placement.layers[0] == placement.layers[7]
    sizes = [len(slots) for slots in placement.layers[7]]
    assert sum(sizes) == num_experts
    assert max(sizes) - min(sizes) <= 1
    assert placement.max_slots == max(sizes)


def test_strategies_by_example() -> None:
    """Seven experts on three ranks."""
    assert Placement.linear(7, 3, [0]).layers[0] == ((0, 1, 2), (3, 4), (5, 6))
    assert Placement.round_robin(7, 3, [0]).layers[0] == ((0, 3, 6), (1, 4), (2, 5))


def test_the_documented_example_is_the_format(tmp_path: Path) -> None:
    """The text in the module's docstring, word for word, through a file."""
    path = tmp_path / "placement.json"
    path.write_text(EXAMPLE)
    placement = Placement.load(path)
    assert placement == Placement(num_experts=4, layers={0: ((0, 1, 2), (3, 0, None))})
    placement.save(path)
    assert path.read_text() == EXAMPLE


@pytest.mark.parametrize(
    ("ranks", "message"),
    [
        (((0, 1),), "layer 3: no rank holds expert 2 .1 of 3 are missing"),
        (((0, 1), (1, 2, 1)), "layer 3, rank 1: holds expert 1 2 times"),
        (((0, 1), (2, 3)), r"layer 3, rank 1: expert 3 is not in \[0, 3\)"),
        (((0, 1), (2, -1)), r"layer 3, rank 1: expert -1 is not in \[0, 3\)"),
        ((), "layer 3: has no ranks"),
    ],
)
def test_an_invalid_layer_is_named(ranks: tuple[tuple[int, ...], ...], message: str) -> None:
    """With the rank or the expert at fault."""
    with pytest.raises(PlacementError, match=message):
        Placement(num_experts=3, layers={3: ranks})


def test_invalid_totals_are_named() -> None:
    """Counts, layers, and layers that disagree about the ranks."""
    with pytest.raises(PlacementError, match="num_experts = 0"):
        Placement(num_experts=0, layers={0: ((),)})
    with pytest.raises(PlacementError, match="has no layers"):
        Placement(num_experts=1, layers={})
    with pytest.raises(PlacementError, match="layer -1: must be a model layer index"):
        Placement(num_experts=1, layers={-1: ((0,),)})
    with pytest.raises(PlacementError, match="layer 4: has 1 ranks, but layer 2 has 2"):
        Placement(num_experts=1, layers={2: ((0,), (0,)), 4: ((0,),)})
    with pytest.raises(PlacementError, match="num_ranks = 0: must be at least 1"):
        Placement.linear(4, 0, [0])
    with pytest.raises(PlacementError, match="'zigzag': must be one of linear, round_robin"):
        Placement.from_strategy("zigzag", 4, 2, [0])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"format": "other"}, '"format": "moeserve-placement"'),
        ({"version": 2}, "version = 2: must be 1"),
        ({"num_expert": 4}, "unknown key 'num_expert'"),
        ({"num_experts": "4"}, "num_experts = '4': must be an integer"),
        ({"num_experts": True}, "num_experts = True: must be an integer"),
        ({"layers": [[0]]}, "layers: must be an object"),
        ({"layers": {"00": [[0]]}}, "'00' must be a layer index"),
        ({"num_experts": 10**15}, "layer 0: no rank holds expert 4"),
        ({"layers": {"9" * 5000: [[0]]}}, "9' must be a layer index"),
        ({"layers": {"x": [[0]]}}, "'x' must be a layer index"),
        ({"layers": {"0": [0]}}, "layer 0: must be a list with one list of slots per rank"),
        ({"layers": {"0": [["a"]]}}, "layer 0, rank 0: 'a' must be an expert id or null"),
        ({"layers": {"0": [[1.5]]}}, "layer 0, rank 0: '1.5' must be an expert id or null"),
        ({"layers": {"0": [[False]]}}, "layer 0, rank 0: 'False' must be an expert id or null"),
    ],
)
def test_a_wrong_file_says_what_is_wrong(change: dict[str, object], message: str) -> None:
    """One wrong thing each."""
    with pytest.raises(PlacementError, match=message):
        Placement.from_json(json.dumps(json.loads(EXAMPLE) | change))


@given(st.text() | st.binary().map(lambda raw: raw.decode("latin-1")))
def test_any_other_text_is_a_placement_error(text: str) -> None:
    """Never another exception."""
    with pytest.raises(PlacementError):
        Placement.from_json(text)


@pytest.mark.parametrize("text", ["[" * 100_000, '{"a": ' * 100_000, "NaN", "9" * 10_000])
def test_hostile_json_is_a_placement_error(text: str) -> None:
    """Deep nesting, numbers that are none, very long numbers."""
    with pytest.raises(PlacementError):
        Placement.from_json(text)


def test_a_file_problem_names_the_file(tmp_path: Path) -> None:
    """Missing, not text, not valid."""
    path = tmp_path / "p.json"
    with pytest.raises(PlacementError, match=r"p\.json: No such file"):
        Placement.load(path)
    path.write_bytes(b"\xff\xfe")
    with pytest.raises(PlacementError, match=r"p\.json: "):
        Placement.load(path)
    path.write_text("{}")
    with pytest.raises(PlacementError, match=r"p\.json: placement: must be a JSON object"):
        Placement.load(path)


def test_a_placement_is_completed_for_the_layers_of_a_model() -> None:
    """What it names stays, what it misses is linear and reported."""
    placement = Placement(num_experts=3, layers={1: ((2, 1), (0,))})
    completed, missing = placement.completed([0, 1, 2], 3)
    assert missing == (0, 2)
    assert list(completed.layers) == [0, 1, 2]
    assert completed.layers[1] == ((2, 1), (0,))
    assert completed.layers[0] == completed.layers[2] == ((0, 1), (2,))
    assert completed.completed([0, 1, 2], 3) == (completed, ())


def test_a_placement_for_another_model_is_refused() -> None:
    """Another number of experts, or a layer that is not there."""
    placement = Placement.linear(4, 2, [0, 9])
    with pytest.raises(PlacementError, match="num_experts = 4: must be 8, as in the model"):
        placement.completed([0, 9], 8)
    with pytest.raises(PlacementError, match="layer 9: is not a MoE layer of the model"):
        placement.completed([0, 1], 4)
