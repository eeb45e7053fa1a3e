"""Rank loads and traffic of batches against a slow scorer that counts token by token."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from helpers_replay import Case, cases
from hypothesis import given, settings

from moeserve_placement.replay.score import Scorer, sampled
from moeserve_placement.replay.traffic import Traffic, measure_traffic
from moeserve_placement.slot_table import holds


@given(cases())
def test_even_split_gives_each_copy_its_part_of_every_token(case: Case) -> None:
    counts = case.counts()
    loads = Scorer(case.table, case.num_experts, topology=case.topology).rank_loads(counts[None])[0]
    slow = np.zeros(loads.shape)
    for token, layer, choice in itertools.product(*map(range, case.topk_ids.shape)):
        expert = case.topk_ids[token, layer, choice]
        ranks = [r for r in range(case.num_ranks) if expert in case.table[layer, r].tolist()]
        for rank in ranks:
            slow[layer, rank] += 1 / len(ranks)
    np.testing.assert_allclose(loads, slow, atol=1e-9)


@given(cases())
def test_rank_loads_sum_to_tokens_times_top_k_in_every_layer(case: Case) -> None:
    scorer = Scorer(case.table, case.num_experts, topology=case.topology)
    tokens, layers, top_k = case.topk_ids.shape
    fixed = scorer.fixed(case.counts()[None])
    batch = scorer.per_batch(case.counts()[None])
    alive = sum(case.topology.alive)
    np.testing.assert_allclose(fixed.mean, np.full((1, layers), tokens * top_k / alive))
    np.testing.assert_allclose(batch.mean, fixed.mean)


@settings(max_examples=50)
@given(cases())
def test_a_split_solved_for_the_batch_is_never_worse_than_even(case: Case) -> None:
    scorer = Scorer(case.table, case.num_experts, topology=case.topology)
    fixed, batch = scorer.fixed(case.counts()[None]), scorer.per_batch(case.counts()[None])
    assert (batch.peak <= fixed.peak * (1 + 1e-5)).all()
    assert (batch.imbalance >= 1 - 1e-9).all()


@given(cases())
def test_imbalance_is_fullest_over_mean_of_load_over_speed(case: Case) -> None:
    scorer = Scorer(case.table, case.num_experts, topology=case.topology)
    loads = scorer.rank_loads(case.counts()[None])[0]
    speeds = [
        s for s, up in zip(case.topology.speed_of_rank, case.topology.alive, strict=True) if up
    ]
    alive = [rank for rank, up in enumerate(case.topology.alive) if up]
    found = scorer.fixed(case.counts()[None]).imbalance[0]
    for layer in range(len(loads)):
        worst = max(loads[layer, r] / s for r, s in zip(alive, speeds, strict=True))
        even = loads[layer].sum() / sum(speeds)  # the level if all ranks were equally full
        assert found[layer] == pytest.approx(worst / even)


@given(cases())
def test_traffic_agrees_with_sending_every_token_by_hand(case: Case) -> None:
    found = measure_traffic(
        case.topk_ids, case.table, sequences=case.sequences, topology=case.topology
    )
    tokens, layers, top_k = case.topk_ids.shape
    alive = [rank for rank, up in enumerate(case.topology.alive) if up]
    sent = np.zeros((case.num_ranks, case.num_ranks))
    nodes, ranks = np.zeros(layers), np.zeros(layers)
    for token, layer in itertools.product(range(tokens), range(layers)):
        served = set()
        for expert in case.topk_ids[token, layer]:
            copies = [r for r in range(case.num_ranks) if expert in case.table[layer, r].tolist()]
            served.add(copies[token % len(copies)])
        for rank in served:
            sent[alive[case.sequences[token] % len(alive)], rank] += 1
        ranks[layer] += len(served) / tokens
        nodes[layer] += len({case.topology.node_of_rank[rank] for rank in served}) / tokens
    np.testing.assert_array_equal(found.sent, sent)
    np.testing.assert_allclose(found.ranks, ranks)
    np.testing.assert_allclose(found.nodes, nodes)
    assert top_k + 1e-9 >= ranks.max() >= 1 - 1e-9


@given(cases())
def test_what_is_sent_and_what_tokens_touch_agree(case: Case) -> None:
    """Sent tokens add up to ranks per token, which are at least nodes per token."""
    found = measure_traffic(
        case.topk_ids, case.table, sequences=case.sequences, topology=case.topology
    )
    assert found.sent.sum() == pytest.approx(found.ranks.sum() * found.num_tokens)
    assert (found.ranks >= found.nodes - 1e-9).all()
    assert (found.nodes >= 1).all() and (found.nodes_fewest >= 1).all()
    limit = min(case.topology.num_nodes, case.topk_ids.shape[2])
    assert (found.nodes <= limit + 1e-9).all() and (found.nodes_fewest <= limit + 1e-9).all()
    assert (found.node_imbalance >= 1 - 1e-9).all()


@given(cases())
def test_with_one_copy_of_each_expert_there_is_no_choice_of_copies(case: Case) -> None:
    held = holds(case.table, case.num_experts)
    if (held.sum(-1) > 1).any():
        return
    found = measure_traffic(
        case.topk_ids, case.table, sequences=case.sequences, topology=case.topology
    )
    np.testing.assert_allclose(found.nodes, found.nodes_fewest)


@given(cases())
def test_parts_joined_equal_the_whole(case: Case) -> None:
    if len(case.topk_ids) < 12:
        return
    cut = 6 * (len(case.topk_ids) // 12)  # copies up to 3 take turns by token index
    whole = measure_traffic(
        case.topk_ids, case.table, sequences=case.sequences, topology=case.topology
    )
    parts = [
        measure_traffic(
            case.topk_ids[part], case.table, sequences=case.sequences[part], topology=case.topology
        )
        for part in (slice(None, cut), slice(cut, None))
    ]
    joined = Traffic.joined(parts)
    assert joined.num_tokens == whole.num_tokens
    if holds(case.table, case.num_experts).sum(-1).max() <= 3:
        np.testing.assert_allclose(joined.sent, whole.sent)
        np.testing.assert_allclose(joined.nodes, whole.nodes)


def test_sampling_keeps_the_first_and_the_last_batch() -> None:
    batches = np.arange(100)[:, None, None]
    assert sampled(batches, 200) is batches
    kept = sampled(batches, 7).ravel().tolist()
    assert len(kept) == 7 and kept[0] == 0 and kept[-1] == 99 and len(set(kept)) == 7
