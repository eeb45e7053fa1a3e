"""Slow, plain caches and small traces to check the simulation against."""

import itertools

import numpy as np
from hypothesis import strategies as st

from moeserve_placement.paging import DecodeSteps, decode_steps
from moeserve_placement.traces import RoutingTrace


def trace_of(topk_ids, num_experts, lengths=None):
    topk_ids = np.asarray(topk_ids)
    return RoutingTrace(
        topk_ids=topk_ids,
        num_experts=num_experts,
        layer_ids=tuple(range(topk_ids.shape[1])),
        sequence_lengths=np.array(lengths or [len(topk_ids)]),
        metadata={},
    )


def steps_of(requests, num_experts) -> DecodeSteps:
    """One layer, batch 1; ``requests``: experts of each token, equally many."""
    return decode_steps(trace_of([[list(r)] for r in requests], num_experts))


@st.composite
def traces(draw, max_tokens=24, max_layers=3, max_experts=6):
    """Small random traces of up to three sequences."""
    num_experts = draw(st.integers(2, max_experts))
    top_k = draw(st.integers(1, min(3, num_experts)))
    num_layers = draw(st.integers(1, max_layers))
    lengths = draw(st.lists(st.integers(1, max_tokens // 3), min_size=1, max_size=3))
    seed = draw(st.integers(0, 2**32 - 1))
    rng = np.random.default_rng(seed)
    scores = rng.random((sum(lengths), num_layers, num_experts)) ** rng.uniform(0.2, 3)
    return trace_of(np.argsort(-scores, axis=2)[:, :, :top_k], num_experts, lengths)


def reference_lru_hits(requests, capacity) -> int:
    """Hits of LRU for one layer. Ties of equal last use: the lower id goes first."""
    last_use, cache, hits = {}, set(), 0
    for time, need in enumerate(requests):
        hits += len(cache & set(need))
        for expert in need:
            last_use[expert] = time
        cache |= set(need)
        pinned = set(need) if len(need) <= capacity else set()
        for expert in sorted(cache - pinned, key=lambda e: (last_use[e], e)):
            if len(cache) > capacity:
                cache.remove(expert)
    return hits


def reference_lfu_hits(requests, capacity) -> int:
    """Hits of LFU (counts never reset) for one layer."""
    count, cache, hits = {}, set(), 0
    for need in requests:
        hits += len(cache & set(need))
        for expert in need:
            count[expert] = count.get(expert, 0) + 1
        cache |= set(need)
        pinned = set(need) if len(need) <= capacity else set()
        for expert in sorted(cache - pinned, key=lambda e: (count[e], e)):
            if len(cache) > capacity:
                cache.remove(expert)
    return hits


def most_hits(requests, capacity) -> int:
    """The most hits of any policy, by trying every cache content after every step."""
    best = {frozenset(): 0}
    for need in map(frozenset, requests):
        after = {}
        for cache, hits in best.items():
            hits += len(cache & need)
            union = cache | need
            if len(need) <= capacity:
                pinned, others = need, union - need
            else:
                pinned, others = frozenset(), union
            room = min(capacity - len(pinned), len(others))
            for kept in itertools.combinations(sorted(others), room):
                content = pinned | frozenset(kept)
                after[content] = max(after.get(content, -1), hits)
        best = after
    return max(best.values())


def requests_of(steps, layer=0):
    """Experts needed by each step in a layer."""
    return [np.flatnonzero(used[layer]).tolist() for used in steps.used]
