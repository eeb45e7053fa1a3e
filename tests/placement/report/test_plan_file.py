"""Plan files: they come back as written, and damage is one clear line."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moeserve_placement.load import LoadHistory
from moeserve_placement.planners import PLANNERS, get_planner
from moeserve_placement.report.explain import explain
from moeserve_placement.report.plan_file import PlanFile, load_plan, save_plan
from moeserve_placement.topology import Topology


def planned(
    name: str = "eplb",
    *,
    seed: int = 0,
    cold: bool = False,
    gone: bool = False,
    layers: tuple[int, int] = (3, 5),
) -> PlanFile:
    """A plan for random loads of 2 layers x 8 experts on 4 ranks x 3 slots, 2 nodes."""
    rng = np.random.default_rng(seed)
    topology = Topology.uniform(4, 3, num_nodes=2, bytes_per_expert=100)
    history = LoadHistory(layers, 8)
    linear = get_planner("linear").plan(history, topology).placement
    for _ in range(3):
        history.observe(rng.zipf(1.5, (2, 8)).clip(max=500))
    if gone:
        topology = topology.without([1])
    plan = get_planner(name).plan(history, topology, current=None if cold else linear)
    return PlanFile.of(plan, topology, history.scenarios().mean)


@settings(max_examples=40, deadline=None)
@given(
    st.sampled_from(sorted(PLANNERS)),
    st.integers(0, 2**16),
    st.booleans(),
    st.booleans(),
    st.sampled_from([(3, 5), (5, 3)]),
)
def test_a_plan_file_comes_back_as_it_was_written(
    tmp_path_factory: pytest.TempPathFactory,
    name: str,
    seed: int,
    cold: bool,
    gone: bool,
    layers: tuple[int, int],
) -> None:
    plan = planned(name, seed=seed, cold=cold, gone=gone, layers=layers)
    path = tmp_path_factory.mktemp("plans") / "plan.json"
    save_plan(path, plan)
    found = load_plan(path)
    for field in ("planner", "reason", "split", "moves", "before", "after"):
        assert getattr(found, field) == getattr(plan, field)
    assert dict(found.placement.layers) == dict(plan.placement.layers)
    assert (found.current is None) == (plan.current is None)
    assert found.topology == plan.topology
    np.testing.assert_array_equal(found.load, plan.load)
    texts = list(explain(found))
    assert texts == list(explain(plan))
    assert len(texts) == 1 + (2 if plan.current is None else len(plan.moves))


@pytest.mark.parametrize("cold", [True, False])
def test_layers_keep_their_load_whatever_the_order_of_the_history(
    tmp_path: Path, cold: bool
) -> None:
    """Layer 5 has expert 7 hot, layer 3 expert 0: so say the sentences, from the plan or a file."""
    load = {5: [1, 1, 1, 1, 1, 1, 1, 9], 3: [17, 1, 1, 1, 1, 1, 1, 1]}
    texts = []
    for layers in ((3, 5), (5, 3)):
        history, topology = LoadHistory(layers, 8), Topology.uniform(4, 3)
        history.observe(np.array([load[layer] for layer in layers]) * 1000)
        linear = None if cold else get_planner("linear").plan(history, topology).placement
        made = get_planner("eplb").plan(history, topology, current=linear)
        plan = PlanFile.of(made, topology, history.mean)
        assert plan.layer_ids == (3, 5)
        assert plan.load.argmax(1).tolist() == [0, 7]
        save_plan(tmp_path / "plan.json", plan)
        for known in (plan, load_plan(tmp_path / "plan.json")):
            texts.append(sorted(re.sub(r"^[0-9]+\. ", "", text) for text in explain(known)))
    hot = {3: "0 (5.67 x the mean", 5: "7 (4.50 x the mean"}
    for found in texts:
        assert found == texts[0]
        for layer, words in hot.items():
            assert any(f"layer {layer}:" in text and words in text for text in found)


def _set(data: dict[str, Any], key: str, value: Any) -> None:
    *path, last = key.split(".")
    for part in path:
        data = data[int(part)] if isinstance(data, list) else data[part]
    if isinstance(data, list):
        data[int(last)] = value
    else:
        data[last] = value


@pytest.mark.parametrize(
    ("key", "value", "words"),
    [
        ("format", "other", 'must be a JSON object with "format"'),
        ("version", 2, "version = 2: must be 1"),
        ("planner", 7, "planner = 7: is missing or of a wrong type"),
        ("moves", None, "moves"),
        ("moves", [], "they do not lead from the current placement to the new one"),
        ("moves.0", 3, "moves: must be objects"),
        ("moves.0.layer", 4, "no layer 4"),
        ("moves.0.layer", True, "layer = True"),
        ("moves.0.writes.0.rank", 9, "rank 9 is not in the topology"),
        ("moves.0.writes.0.rank", -1, "rank -1 is not in the topology"),
        ("moves.0.writes.0.slot", 3, "has no slot 3"),
        ("moves.0.writes.0.expert", "1", "expert = 1"),
        ("moves.0.gain", "much", "gain = much: must be a finite number or null"),
        ("load", [[1.0]], "load: must be numbers, 2 layers of 8 experts"),
        ("load.0.0", -1, "load: must be finite and 0 or more"),
        ("topology.alive.0", 1, "topology: alive"),
        ("topology.bytes_per_expert", 0, "bytes_per_expert = 0"),
        ("topology.slots_per_rank", [1, 3, 3, 3], "the topology has 1"),
        ("placement.layers", {}, "has no layers"),
    ],
)
def test_a_wrong_entry_is_named_in_one_line(
    tmp_path: Path, key: str, value: Any, words: str
) -> None:
    path = tmp_path / "plan.json"
    save_plan(path, planned())
    data = json.loads(path.read_text())
    _set(data, key, value)
    path.write_text(json.dumps(data))
    with pytest.raises(ValueError) as caught:
        load_plan(path)
    assert words in str(caught.value) and "\n" not in str(caught.value)
    assert str(caught.value).startswith(f"{path}:")


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_no_damage_gives_anything_but_a_value_error(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    path = tmp_path_factory.mktemp("plans") / "plan.json"
    save_plan(path, planned())
    text = bytearray(path.read_bytes())
    for _ in range(data.draw(st.integers(1, 3))):
        text[data.draw(st.integers(0, len(text) - 1))] = data.draw(st.integers(0, 255))
    path.write_bytes(bytes(text[: data.draw(st.integers(0, len(text)))]))
    try:
        list(explain(load_plan(path)))
    except ValueError as error:
        assert "\n" not in str(error)
