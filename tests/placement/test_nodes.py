"""Choice of copies: fewest nodes against brute force; what is counted is what is chosen."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moeserve_placement.fanout import nodes_per_token
from moeserve_placement.load import LoadHistory
from moeserve_placement.nodes import choose_copies
from moeserve_placement.planners.eplb import eplb_table
from moeserve_placement.topology import Topology


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 2**32 - 1), st.integers(1, 3))
def test_chosen_copies_exist_and_touch_hardly_more_nodes_than_needed(seed: int, extra: int) -> None:
    rng = np.random.default_rng(seed)
    topology = Topology.uniform(6, 2 + extra, num_nodes=3)
    table = eplb_table(rng.random((1, 10)), topology)
    ids = np.stack([rng.choice(10, 3, replace=False) for _ in range(20)])[:, None]
    choice = choose_copies(ids, table, topology=topology)
    nodes = np.array(topology.node_of_rank)
    for token in range(20):
        options = [np.flatnonzero((table[0] == e).any(-1)) for e in ids[token, 0]]
        for expert, rank in enumerate(choice.ranks[token, 0]):
            assert rank in options[expert]
        best = min(len(set(nodes[list(ranks)])) for ranks in itertools.product(*options))
        touched = len(set(nodes[choice.ranks[token, 0]]))
        assert best <= touched <= best + 1  # greedy cover of three choices
    assert choice.rank_loads.sum() == choice.node_loads.sum() == ids.size
    by_turns = choose_copies(ids, table, topology=topology, policy="turns")
    assert choice.nodes_per_token[0] <= by_turns.nodes_per_token[0] + 1e-9


def test_estimate_from_pairs_is_near_the_count_for_independent_choices() -> None:
    rng = np.random.default_rng(0)
    ids = np.stack([rng.choice(16, 4, replace=False) for _ in range(4000)])
    chosen = np.zeros((4000, 16))
    chosen[np.arange(4000)[:, None], ids] = 1
    history = LoadHistory([0], 16)
    history.observe(chosen.sum(0)[None], (chosen.T @ chosen)[None])
    topology = Topology.uniform(4, 4, num_nodes=4)
    table = np.arange(16).reshape(1, 4, 4)
    counted = choose_copies(ids[:, None], table, topology=topology).nodes_per_token[0]
    assert nodes_per_token(table, history, topology)[0] == pytest.approx(counted, rel=0.01)


def test_unknown_policy_and_missing_expert_are_named() -> None:
    topology = Topology.uniform(2, 1)
    with pytest.raises(ValueError, match="policy = 'best'"):
        choose_copies(
            np.zeros((1, 1, 1), int), np.array([[[0], [1]]]), topology=topology, policy="best"
        )
    with pytest.raises(ValueError, match="nowhere"):
        choose_copies(np.full((1, 1, 1), 2), np.array([[[0], [1]]]), topology=topology)
