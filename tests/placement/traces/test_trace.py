"""Traces check themselves; counting, selecting and cutting agree with plain loops."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from helpers_traces import assert_same_routing, routing_traces
from hypothesis import given, settings
from hypothesis import strategies as st

from moeserve_placement.traces import CountTrace, RoutingTrace, TraceError


def small(**changes: Any) -> RoutingTrace:
    """Three tokens of two sequences, two layers, top-2 of four experts."""
    fields: dict[str, Any] = {
        "topk_ids": np.array([[[0, 1], [2, 3]], [[1, 0], [3, 0]], [[2, 1], [1, 2]]]),
        "num_experts": 4,
        "layer_ids": (3, 5),
        "sequence_lengths": np.array([1, 2]),
        "metadata": {},
    }
    return RoutingTrace(**(fields | changes))


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"topk_ids": np.array([[[0, 1], [2, 4]]] * 3)}, "token 0, layer 1: expert 4"),
        ({"topk_ids": np.array([[[0, 1], [2, -1]]] * 3)}, "expert -1 is not in"),
        ({"topk_ids": np.array([[[0, 1], [2, 2]]] * 3)}, "names expert 2 twice"),
        ({"topk_ids": np.zeros((3, 2, 2))}, "must be an integer array"),
        ({"topk_ids": np.zeros((0, 2, 2), int)}, "empty dimension"),
        ({"num_experts": 1}, "top_k = 2"),
        ({"num_experts": 1 << 40}, "num_experts"),
        ({"layer_ids": (3,)}, "names 1 layers"),
        ({"layer_ids": (3, 3)}, "comes twice"),
        ({"layer_ids": (3, -1)}, "not a model layer index"),
        ({"sequence_lengths": np.array([1, 1])}, "sum to 2"),
        ({"sequence_lengths": np.array([0, 3])}, "each in"),
        ({"sequence_lengths": np.array([1.0, 2.0])}, "integer array"),
        ({"topk_weights": np.full((3, 2, 2), np.nan)}, "token 0, layer 0"),
        ({"topk_weights": np.ones((3, 2, 1))}, "differs from topk_ids"),
        ({"topk_weights": np.ones((3, 2, 2), int)}, "floating"),
        ({"labels": ("law",)}, "2 strings"),
        ({"arrival_times_s": np.array([0.0, np.inf])}, "not a finite number"),
        ({"arrival_times_s": np.array([0.0])}, "2 numbers"),
        ({"metadata": {"a": 1}}, "string"),
    ],
)
def test_a_wrong_trace_is_refused_in_one_line(changes: dict[str, Any], text: str) -> None:
    with pytest.raises(TraceError, match=text) as caught:
        small(**changes)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("counts", "changes", "text"),
    [
        (np.array([[[1, -1]]]), {}, "window 0, layer 0, expert 1 is negative"),
        (np.array([[1, 2]]), {}, "3 dimensions"),
        (np.array([[[1.5, 2.0]]]), {}, "integer array"),
        (np.array([[[2**63, 1]]], dtype=np.uint64), {}, "2\\^63"),
        (np.array([[[1, 2]]]), {"tokens_per_window": np.array([1, 2])}, "1 counts"),
        (np.zeros((0, 1, 2), int), {}, "empty"),
        (np.full((3, 1, 1), 2**61), {}, "counts: sums to 6.92e\\+18, must be at most 2\\^62"),
        (np.full((1, 1, 2), 2**62), {}, "counts: sums to 9.22e\\+18"),
        (np.ones((2, 1, 1), int), {"tokens_per_window": np.array([2**62, 2**62])}, "tokens_per_w"),
    ],
)
def test_wrong_counts_are_refused(counts: Any, changes: dict[str, Any], text: str) -> None:
    with pytest.raises(TraceError, match=text):
        CountTrace(counts=counts, layer_ids=(0,), **changes)


@settings(max_examples=40)
@given(trace=routing_traces(), data=st.data())
def test_counts_equal_those_of_a_plain_loop(trace: RoutingTrace, data: st.DataObject) -> None:
    start = data.draw(st.integers(0, trace.num_tokens))
    stop = data.draw(st.integers(start, trace.num_tokens))
    expected = np.zeros((trace.num_layers, trace.num_experts), int)
    for token in range(start, stop):
        for layer in range(trace.num_layers):
            for expert in trace.topk_ids[token, layer].tolist():
                expected[layer, expert] += 1
    np.testing.assert_array_equal(trace.counts(start, stop), expected)


@settings(max_examples=40)
@given(trace=routing_traces(), data=st.data())
def test_chosen_sequences_keep_their_tokens(trace: RoutingTrace, data: st.DataObject) -> None:
    indices = data.draw(st.lists(st.integers(0, trace.num_sequences - 1), min_size=1, max_size=6))
    chosen = trace.sequences(indices)
    position = 0
    for place, index in enumerate(indices):
        start, length = int(trace.sequence_starts[index]), int(trace.sequence_lengths[index])
        np.testing.assert_array_equal(
            chosen.topk_ids[position : position + length], trace.topk_ids[start : start + length]
        )
        if trace.labels is not None and chosen.labels is not None:
            assert chosen.labels[place] == trace.labels[index]
        position += length
    assert chosen.num_tokens == position


@settings(max_examples=40)
@given(trace=routing_traces(), data=st.data())
def test_a_cut_keeps_each_token_with_its_sequence(trace: RoutingTrace, data: st.DataObject) -> None:
    trace = replace(trace, labels=tuple(str(i) for i in range(trace.num_sequences)))
    start = data.draw(st.integers(0, trace.num_tokens - 1))
    stop = data.draw(st.integers(start + 1, trace.num_tokens))
    owner = np.repeat(np.arange(trace.num_sequences), trace.sequence_lengths)[start:stop]
    part = trace.tokens(start, stop)
    assert part.labels is not None
    found = np.repeat([int(label) for label in part.labels], part.sequence_lengths)
    np.testing.assert_array_equal(found, owner)
    np.testing.assert_array_equal(part.topk_ids, trace.topk_ids[start:stop])


def test_select_takes_the_sequences_of_the_labels_named() -> None:
    trace = small(labels=("law", "code"))
    assert_same_routing(trace.select(["code"]), trace.sequences([1]))
    assert trace.select({"law", "code"}).num_sequences == 2
    with pytest.raises(TraceError, match=r"'math'.*code, law"):
        trace.select(["math"])
    with pytest.raises(TraceError, match="has none"):
        small().select(["law"])


def test_ranges_and_indices_outside_the_trace_are_refused() -> None:
    for start, stop in ((0, 0), (2, 1), (-1, 2), (0, 4)):
        with pytest.raises(TraceError, match="must be within"):
            small().tokens(start, stop)
    for indices in ([], [2], [-1]):
        with pytest.raises(TraceError, match="indices"):
            small().sequences(indices)
