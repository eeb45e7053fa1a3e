"""Traces for tests: hypothesis strategies, and equality of what they hold."""

from __future__ import annotations

from typing import Any

import numpy as np
from hypothesis import strategies as st

from moeserve_placement.placement import Placement
from moeserve_placement.traces import CountTrace, RoutingTrace

TEXT = st.text(max_size=8)


@st.composite
def layer_ids(draw: st.DrawFn, num_layers: int) -> tuple[int, ...]:
    """Ascending model layer indices, with gaps."""
    found = draw(st.sets(st.integers(0, 20), min_size=num_layers, max_size=num_layers))
    return tuple(sorted(found))


@st.composite
def routing_traces(
    draw: st.DrawFn, *, max_experts: int = 300, labels: st.SearchStrategy[str] = TEXT
) -> RoutingTrace:
    """Any small valid routing trace, with or without each optional part."""
    num_layers, top_k = draw(st.integers(1, 3)), draw(st.integers(1, 5))
    num_experts = draw(st.integers(top_k, max_experts))
    lengths = draw(st.lists(st.integers(1, 6), min_size=1, max_size=5))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    shape = (sum(lengths), num_layers, top_k)
    scores = rng.random((*shape[:2], num_experts))
    topk_ids = np.argsort(scores, axis=2)[:, :, :top_k]
    dtype = draw(st.sampled_from([None, np.float16, np.float32, np.float64]))
    labelled, timed = draw(st.booleans()), draw(st.booleans())
    times = st.floats(0, 1e9, allow_nan=False)
    count = len(lengths)
    return RoutingTrace(
        topk_ids=topk_ids.astype(draw(st.sampled_from([np.uint16, np.int32, np.int64]))),
        num_experts=num_experts,
        layer_ids=draw(layer_ids(num_layers)),
        sequence_lengths=np.array(lengths),
        topk_weights=None if dtype is None else rng.random(shape).astype(dtype),
        labels=tuple(draw(st.lists(labels, min_size=count, max_size=count))) if labelled else None,
        arrival_times_s=np.array(draw(st.lists(times, min_size=count, max_size=count)))
        if timed
        else None,
        metadata=draw(st.dictionaries(TEXT, TEXT, max_size=2)),
    )


@st.composite
def count_traces(draw: st.DrawFn, *, max_count: int = 2**55, min_count: int = 0) -> CountTrace:
    """Any small valid count trace."""
    num_windows, num_layers = draw(st.integers(1, 4)), draw(st.integers(1, 3))
    num_experts = draw(st.integers(1, 9))
    size = num_windows * num_layers * num_experts
    values = draw(st.lists(st.integers(min_count, max_count), min_size=size, max_size=size))
    tokens = draw(st.lists(st.integers(0, 2**60), min_size=num_windows, max_size=num_windows))
    return CountTrace(
        counts=np.array(values, dtype=np.int64).reshape(num_windows, num_layers, num_experts),
        layer_ids=draw(layer_ids(num_layers)),
        tokens_per_window=np.array(tokens, dtype=np.int64) if draw(st.booleans()) else None,
        metadata=draw(st.dictionaries(TEXT, TEXT, max_size=2)),
    )


@st.composite
def placements(draw: st.DrawFn, *, free: bool, layers: list[int] | None = None) -> Placement:
    """Any placement with as many slots on every rank, each with an expert; free: free slots too."""
    num_ranks, per_rank = draw(st.integers(1, 4)), draw(st.integers(1, 4))
    num_slots = num_ranks * per_rank
    num_experts = draw(st.integers(per_rank, num_slots))
    if layers is None:
        layers = sorted(draw(st.sets(st.integers(0, 9), min_size=1, max_size=3)))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    table: dict[int, tuple[tuple[int | None, ...], ...]] = {}
    for layer in layers:
        # Consecutive experts, wrapping around: no expert twice on a rank, each somewhere.
        names = rng.permutation(num_experts)
        flat = [int(names[slot % num_experts]) for slot in range(num_slots)]
        ranks = [list(flat[r * per_rank : (r + 1) * per_rank]) for r in range(num_ranks)]
        table[layer] = tuple(tuple(rng.permutation(rank).tolist()) for rank in ranks)
        if free:
            table[layer] = _freed(table[layer], rng)
    return Placement(num_experts=num_experts, layers=table)


def _freed(ranks: Any, rng: np.random.Generator) -> Any:
    """Some slots freed whose expert has another copy and whose rank keeps an expert."""
    table = [list(rank) for rank in ranks]
    for rank in table:
        for slot in range(len(rank)):
            copies = sum(other.count(rank[slot]) for other in table)
            held = sum(expert is not None for expert in rank)
            if copies > 1 and held > 1 and rng.random() < 0.5:
                rank[slot] = None
    return tuple(tuple(rank) for rank in table)


def assert_same_routing(left: Any, right: Any, *, parts: str = "wlatm") -> None:
    """Equal tokens and sequences, and the optional parts named: weights, labels, arrivals, meta."""
    assert isinstance(left, RoutingTrace) and isinstance(right, RoutingTrace)
    np.testing.assert_array_equal(left.topk_ids, right.topk_ids)
    np.testing.assert_array_equal(left.sequence_lengths, right.sequence_lengths)
    assert (left.num_experts, left.layer_ids) == (right.num_experts, right.layer_ids)
    if "w" in parts:
        assert (left.topk_weights is None) == (right.topk_weights is None)
        if left.topk_weights is not None and right.topk_weights is not None:
            assert left.topk_weights.dtype == right.topk_weights.dtype
            np.testing.assert_array_equal(left.topk_weights, right.topk_weights)
    if "l" in parts:
        assert left.labels == right.labels
    if "a" in parts:
        assert (left.arrival_times_s is None) == (right.arrival_times_s is None)
        if left.arrival_times_s is not None:
            np.testing.assert_array_equal(left.arrival_times_s, right.arrival_times_s)
    if "m" in parts:
        assert dict(left.metadata) == dict(right.metadata)


def assert_same_counts(left: Any, right: Any) -> None:
    """Equal count traces, metadata apart."""
    assert isinstance(left, CountTrace) and isinstance(right, CountTrace)
    np.testing.assert_array_equal(left.counts, right.counts)
    assert left.layer_ids == right.layer_ids
    assert (left.tokens_per_window is None) == (right.tokens_per_window is None)
    if left.tokens_per_window is not None:
        np.testing.assert_array_equal(left.tokens_per_window, right.tokens_per_window)
