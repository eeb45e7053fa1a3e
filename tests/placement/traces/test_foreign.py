"""The formats of other engines: round trips, published examples, and files that are wrong."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers_traces import (
    assert_same_counts,
    assert_same_routing,
    count_traces,
    placements,
    routing_traces,
)
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from moeserve_placement.placement import Placement
from moeserve_placement.traces import (
    CountTrace,
    ReadOptions,
    RoutingTrace,
    TraceError,
    detect,
    open_any,
    open_trace,
)
from moeserve_placement.traces.convert import convert
from moeserve_placement.traces.detect import FORMATS
from moeserve_placement.traces.options import to_logical

FOLDER_NAMES = st.text(max_size=6).filter(lambda text: text.strip(". ") == text != "")


def back(data: Any, name: str, suffix: str, options: ReadOptions | None = None) -> Any:
    """Written in a format, then opened by content alone."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / f"file{suffix}"
        writer = FORMATS[name].write
        assert writer is not None
        writer(path, data)
        assert detect(path) == name
        return open_any(path, options)


@settings(max_examples=40)
@given(trace=count_traces(max_count=2**40, min_count=1))
def test_vllm_windows_come_back(trace: CountTrace) -> None:
    found = back(trace, "vllm", ".npz")
    np.testing.assert_array_equal(found.counts, trace.counts)


@settings(max_examples=40)
@given(trace=count_traces(max_count=2**40, min_count=2))
def test_a_vllm_window_alone_comes_back_from_npy(trace: CountTrace) -> None:
    found = back(trace, "vllm", ".npy")
    np.testing.assert_array_equal(found.counts, trace.counts)


def test_vllm_replicas_are_summed_in_the_documented_example(tmp_path: Path) -> None:
    # The map of vLLM's documentation: 2 layers, 6 physical and 4 logical experts.
    slots = np.array([[0, 1, 2, 3, 0, 1], [0, 2, 0, 1, 0, 3]])
    window = np.array([[[1, 2, 4, 8, 16, 32], [1, 2, 4, 8, 16, 32]]])
    path = tmp_path / "window.npz"
    np.savez(path, expert_load_window=window, physical_to_logical_map=slots)
    trace = open_trace(path)
    assert isinstance(trace, CountTrace)
    assert trace.counts.tolist() == [[[17, 34, 4, 8], [21, 8, 2, 32]]]


def test_the_vllm_ring_buffer_is_read_from_its_oldest_window(tmp_path: Path) -> None:
    window = np.array([[[30, 3]], [[40, 4]], [[10, 1]], [[20, 2]]])
    path = tmp_path / "window.npz"
    np.savez(path, expert_load_window=window, expert_load_window_step=np.array(2))
    trace = open_trace(path)
    assert isinstance(trace, CountTrace)
    assert trace.counts[:, 0, 0].tolist() == [10, 20, 30, 40]
    window[2:] = 0  # only two of four windows filled so far
    np.savez(path, expert_load_window=window, expert_load_window_step=np.array(2))
    half = open_trace(path)
    assert isinstance(half, CountTrace)
    assert half.counts[:, 0, 0].tolist() == [30, 40]


@settings(max_examples=40)
@given(data=st.data())
def test_physical_counts_sum_into_their_logical_experts(data: st.DataObject) -> None:
    num_layers, slots = data.draw(st.integers(1, 3)), data.draw(st.integers(1, 8))
    rng = np.random.default_rng(data.draw(st.integers(0, 2**32 - 1)))
    table = rng.integers(0, 4, (num_layers, slots))
    counts = rng.integers(0, 100, (2, num_layers, slots))
    expected = np.zeros((2, num_layers, 4), int)
    for (window, layer, slot), count in np.ndenumerate(counts):
        expected[window, layer, table[layer, slot]] += count
    np.testing.assert_array_equal(to_logical(counts, table, num_experts=4), expected)


@pytest.mark.parametrize(
    ("arrays", "text"),
    [
        ({"physical_to_logical_map": np.zeros((1, 3), int)}, "shape"),
        ({"physical_to_logical_map": np.array([[0, -2]])}, "expert ids must be"),
        ({"physical_to_logical_map": np.array([[0, -1]])}, "unused slot"),
        ({"expert_load_window_step": np.array(7)}, "expert_load_window_step"),
        ({"expert_load_window": np.array([[[1, -1]]])}, "negative"),
        ({"expert_load_window": np.array([[[0, 0]]])}, "no tokens"),
        ({"expert_load_window": np.array([[0, 0]])}, "must be integers"),
    ],
)
def test_wrong_vllm_arrays_are_refused(tmp_path: Path, arrays: dict[str, Any], text: str) -> None:
    path = tmp_path / "window.npz"
    np.savez(path, **({"expert_load_window": np.array([[[1, 2]]])} | arrays))
    with pytest.raises(TraceError, match=text):
        open_trace(path)


@settings(max_examples=40)
@given(placement=placements(free=True), data=st.data())
def test_tensorrt_llm_placements_come_back_with_their_free_slots(
    placement: Placement, data: st.DataObject
) -> None:
    options = ReadOptions(num_ranks=placement.num_ranks, num_experts=placement.num_experts)
    found = back(placement, "tensorrt-llm", ".yaml", options)
    assert found.num_experts == placement.num_experts
    for layer, ranks in placement.layers.items():
        for left, right in zip(found.layers[layer], ranks, strict=True):
            # A free slot before all experts of its rank moves behind the first.
            assert sorted(left, key=str) == sorted(right, key=str)
            if right[0] is not None:
                assert left == right


def test_the_engine_options_of_tensorrt_llm_are_read(tmp_path: Path) -> None:
    path = tmp_path / "options.yaml"
    path.write_text(
        "enable_attention_dp: true\nmoe_config:\n  load_balancer:\n    num_slots: 6\n"
        "    ep_size: 2\n    initial_global_assignments:\n"
        "      3: [0, 1, 1, 2, 3, 0]\n      4:\n      - 0\n      - 1\n      - 2\n      - 3\n"
        "      - 2\n      - 1\n    layer_updates_per_iter: 2\n"
    )
    placement = open_any(path)
    assert isinstance(placement, Placement)
    assert placement.layers == {3: ((0, 1, None), (2, 3, 0)), 4: ((0, 1, 2), (3, 2, 1))}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("num_slots: 2\n{}\n  0: [0, 1]\n", "num_ranks: TensorRT-LLM's file does not say it"),
        ("num_slots: 3\nep_size: 1\n{}\n  0: [0, 1]\n", "num_slots = 3"),
        ("num_slots: 2\nep_size: 1\n{}\n  0: [0, 2]\n", "no rank holds expert 1"),
        ("num_slots: 2\nep_size: 1\n{}\n  0: [0, -1]\n", "'-1' is not an expert id"),
        ("num_slots: 2\nep_size: 1\n{}\n  0: [0, 1.5]\n", "is not an expert id"),
        ("num_slots: 2\nep_size: 1\n{}\n  x: [0, 1]\n", "'x' is not a model layer index"),
        ("num_slots: 2\nep_size: 1\n{}\n  0: [0, 1]\n  0: [1, 0]\n", "comes twice"),
        ("num_slots: 3\nep_size: 2\n{}\n  0: [0, 1, 2]\n", "must divide the 3 slots"),
        ("num_slots: 2\nep_size: 1\n{}\n  0: &a [0, 1]\n  1: *a\n", "aliases"),
        ("num_slots: 2\nep_size: 1\n{}\n  0: !!python/name:os.system x\n", "not valid YAML"),
        ("num_slots: 2\nep_size: 1\n{}\n  0: " + "[" * 1200, "not valid YAML"),
        ("other: initial_global_assignments\n", "has no initial_global_assignments"),
    ],
)
def test_wrong_yaml_is_refused_in_one_line(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "bad.yaml"
    path.write_text(text.replace("{}", "initial_global_assignments:"))
    with pytest.raises(TraceError, match=message) as caught:
        open_any(path)
    assert "\n" not in str(caught.value)


@settings(max_examples=40)
@given(placement=placements(free=False, layers=[0, 1]))
def test_omni_arrays_keep_which_rank_holds_which_expert(placement: Placement) -> None:
    found = back(placement, "omni", ".npy")
    assert found.num_experts == placement.num_experts
    for layer, ranks in placement.layers.items():
        assert [set(rank) for rank in found.layers[layer]] == [set(rank) for rank in ranks]


@settings(max_examples=40)
@given(placement=placements(free=True, layers=[0, 1, 2]))
def test_sglang_locations_come_back(placement: Placement) -> None:
    options = ReadOptions(num_ranks=placement.num_ranks, num_experts=placement.num_experts)
    found = back(placement, "sglang-location", ".json", options)
    for layer, ranks in placement.layers.items():
        for left, right in zip(found.layers[layer], ranks, strict=True):
            assert sorted(left, key=str) == sorted(right, key=str)


@settings(max_examples=40)
@given(placement=placements(free=True))
def test_our_placements_come_back(placement: Placement) -> None:
    assert back(placement, "placement", ".json") == placement
    assert back(placement, "placement-npz", ".npz") == placement


@settings(max_examples=40)
@given(trace=routing_traces(labels=FOLDER_NAMES))
def test_esft_logs_come_back_label_by_label(trace: RoutingTrace) -> None:
    options = ReadOptions(top_k=trace.top_k, num_experts=trace.num_experts)
    found = back(trace, "esft", "", options)
    if trace.labels is not None:
        assert found.labels is not None and sorted(found.labels) == sorted(trace.labels)
        for label in set(trace.labels):
            left, right = found.select([label]), trace.select([label])
            assert_same_routing(left, right, parts="")
            _assert_float32_weights(left, right)
    else:
        assert_same_routing(found, trace, parts="l")
        _assert_float32_weights(found, trace)


def _assert_float32_weights(found: RoutingTrace, trace: RoutingTrace) -> None:
    if trace.topk_weights is None:
        expected = np.full(trace.topk_ids.shape, np.float32(1 / trace.top_k))
    else:
        expected = trace.topk_weights.astype(np.float32)
    np.testing.assert_array_equal(found.topk_weights, expected)


def test_esft_logs_show_their_top_k(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    ids = np.argsort(rng.random((60, 26, 64)), axis=2)[:, :, :6]
    trace = RoutingTrace(
        topk_ids=ids,
        num_experts=64,
        layer_ids=tuple(range(1, 27)),
        sequence_lengths=np.array([24, 36]),  # all multiples of 2: 12 divides every line as well
    )
    writer = FORMATS["esft"].write
    assert writer is not None
    writer(tmp_path / "log", trace)
    assert_same_routing(open_trace(tmp_path / "log"), trace, parts="")


def test_the_esft_layout_is_read(tmp_path: Path) -> None:
    for layer, line in (
        (1, "8\t26\t3\t4\t\t0.0414\t0.047\t0.5\t0.25\n"),
        (2, "1\t2\t2\t3" + "\t" * 2),
    ):
        (tmp_path / f"expert_weights_{layer}.txt").write_text(
            line if layer == 1 else line + "0.1\t0.2\t0.3\t0.4\n"
        )
    (tmp_path / "summary.json").write_text("{}")
    trace = open_trace(tmp_path, ReadOptions(top_k=2, num_experts=64))
    assert isinstance(trace, RoutingTrace)
    assert trace.topk_ids.tolist() == [[[8, 26], [1, 2]], [[3, 4], [2, 3]]]
    assert trace.layer_ids == (1, 2)
    with pytest.raises(TraceError, match="give top_k"):
        open_trace(tmp_path)


@pytest.mark.parametrize(
    ("line", "text"),
    [
        ("1\t2\t\t0.1\n", "2 ids but 1 weights"),
        ("1\t2\t0.1\t0.2\n", "an empty field"),
        ("1\tx\t\t0.1\t0.2\n", "something else than a number"),
        ("1\t1\t\t0.1\t0.2\n", "twice"),
        ("1\t-2\t\t0.1\t0.2\n", "outside"),
        ("1\t2\t\tnan\t0.2\n", "not a finite number"),
        ("", "is empty"),
        ("1\t2\t\t0.1\t0.2\n1\t2\t3\t4\t\t1\t1\t1\t1\n", "zip|sequence|lines"),
    ],
)
def test_wrong_esft_lines_are_refused(tmp_path: Path, line: str, text: str) -> None:
    (tmp_path / "expert_weights_1.txt").write_text("1\t2\t\t0.1\t0.2\n")
    (tmp_path / "expert_weights_2.txt").write_text(line)
    with pytest.raises(TraceError, match=text):
        open_trace(tmp_path, ReadOptions(top_k=2))


def test_raw_arrays_are_read_by_name(tmp_path: Path) -> None:
    ids = np.array([[[0, 1]], [[2, 3]], [[1, 0]]], dtype=np.uint8)
    path = tmp_path / "raw.npz"
    np.savez(path, law=ids, law_seqlen=[1, 2], code=ids[:1], code_seqlen=[1])
    trace = open_trace(path)
    assert isinstance(trace, RoutingTrace)
    assert trace.labels == ("law", "law", "code")
    assert trace.num_experts == 4
    np.savez(path, ids=ids, seqlen=[1, 2], cat=["a", "b"], probs=ids.astype(np.float16))
    one = open_trace(path, ReadOptions(num_experts=32, first_layer=3))
    assert isinstance(one, RoutingTrace)
    assert (one.labels, one.num_experts, one.layer_ids) == (("a", "b"), 32, (3,))
    assert one.topk_weights is not None
    np.savez(path, a_x=np.ones((2, 4), int), a_y=np.ones((2, 4), int), b_x=np.ones((2, 3), int))
    with pytest.raises(TraceError, match=r"choose some with select \(a, b\)"):
        open_trace(path)
    counts = open_trace(path, ReadOptions(select="a_"))
    assert isinstance(counts, CountTrace)
    assert counts.counts.shape == (2, 2, 4)


def test_a_placement_is_not_opened_as_a_trace(tmp_path: Path) -> None:
    path = tmp_path / "p.json"
    Placement.linear(4, 2, [0]).save(path)
    with pytest.raises(TraceError, match="is a placement, not a trace"):
        open_trace(path)


def test_a_conversion_says_what_is_lost(tmp_path: Path) -> None:
    path = tmp_path / "p.json"
    path.write_text(json.dumps({"physical_to_logical_map": [[0, 1, 2, 0], [2, 1, 0, 1]]}))
    done = convert(path, tmp_path / "p.yaml", options=ReadOptions(num_ranks=2))
    assert (done.source_format, done.target_format) == ("sglang-location", "tensorrt-llm")
    assert any("num_ranks = 2" in item for item in done.lost)
    assert (tmp_path / "p.yaml").read_text() == (
        "num_slots: 4\ninitial_global_assignments:\n  0: [0, 1, 2, 0]\n  1: [2, 1, 0, 1]\n"
        "layer_updates_per_iter: 0\n"
    )
    with pytest.raises(TraceError, match="can not hold a placement"):
        convert(path, tmp_path / "p.pt", target_format="sglang", options=ReadOptions(num_ranks=2))
    with pytest.raises(TraceError, match=r"suffix '\.bin' names no format"):
        convert(path, tmp_path / "p.bin", options=ReadOptions(num_ranks=2))


@settings(max_examples=40)
@given(trace=routing_traces())
def test_routing_becomes_counts_where_the_target_only_holds_those(trace: RoutingTrace) -> None:
    assume(trace.num_tokens > 1)
    with tempfile.TemporaryDirectory() as folder:
        source, target = Path(folder) / "a.json", Path(folder) / "b.npz"
        writer = FORMATS["json"].write
        assert writer is not None
        writer(source, trace)
        done = convert(source, target, target_format="vllm", tokens_per_window=2)
        assert done.lost[0].startswith("tokens:")
        counts = open_trace(target)
        assert isinstance(counts, CountTrace)
        np.testing.assert_array_equal(counts.counts.sum(axis=0), trace.counts())
        assert_same_counts(counts, counts)
