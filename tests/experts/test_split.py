"""The split of a batch over copies: whole numbers that add up, and as even as can be."""

from __future__ import annotations

import random
import threading
from collections.abc import Sequence

import numpy as np
import torch
from helpers_moves import LocalRanks, random_layers
from hypothesis import given, settings
from hypothesis import strategies as st

from moeserve.experts.split import CopyChooser, deal, whole_numbers
from moeserve_placement import balanced_shares
from moeserve_placement.slot_table import slot_table

LAYER = 1


@given(seed=st.integers(0, 2**32))
def test_whole_numbers_add_up_and_are_off_by_less_than_one(seed: int) -> None:
    rng = np.random.default_rng(seed)
    shares = rng.dirichlet(np.ones(4), size=6)
    totals = rng.integers(0, 50, 6)
    whole = whole_numbers(shares, totals)
    assert (whole.sum(1) == totals).all()
    assert (np.abs(whole - shares * totals[:, None]) < 1).all()


@given(seed=st.integers(0, 2**32))
def test_every_token_and_every_place_is_dealt_once(seed: int) -> None:
    rng = np.random.default_rng(seed)
    num_ranks, experts = 3, 5
    counts = rng.integers(0, 9, (num_ranks, experts))
    copies = np.array([rng.permutation(num_ranks)[:2] for _ in range(experts)])
    quotas = whole_numbers(rng.dirichlet(np.ones(2), size=experts), counts.sum(0))
    dealt = deal(quotas, counts, copies)
    assert (dealt >= 0).all()
    assert (dealt.sum(2) == counts).all()
    assert (dealt.sum(0) == quotas).all()
    for rank, expert, copy in np.ndindex(num_ranks, experts, 2):
        if copies[expert, copy] == rank:  # what fits at home stays at home
            assert dealt[rank, expert, copy] == min(quotas[expert, copy], counts[rank, expert])


def select_on_all(ranks: LocalRanks, ids: list[torch.Tensor]) -> list[torch.Tensor]:
    """What every rank selects, together."""
    barrier = threading.Barrier(ranks.num_ranks, timeout=20)
    posted: dict[int, torch.Tensor] = {}
    results: dict[int, torch.Tensor] = {}

    def run(rank: int) -> None:
        def gather(rows: torch.Tensor, counts: Sequence[int]) -> torch.Tensor:
            posted[rank] = rows
            barrier.wait()
            return torch.cat([posted[r] for r in range(ranks.num_ranks)])

        chooser = CopyChooser(ranks.stores[rank], gather, ranks.num_ranks)
        chooser.split_from = 0
        results[rank] = chooser.select(LAYER, ids[rank], sum(map(len, ids)))

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(ranks.num_ranks)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return [results[rank] for rank in range(ranks.num_ranks)]


@settings(deadline=None, max_examples=200)
@given(seed=st.integers(0, 2**32), num_ranks=st.integers(2, 4))
def test_pairs_go_to_copies_of_their_expert_and_ranks_are_as_even_as_can_be(
    seed: int, num_ranks: int
) -> None:
    rng = random.Random(seed)
    ranks = LocalRanks(random_layers(rng, num_ranks))
    experts = ranks.placement.num_experts
    top_k = rng.randint(1, min(3, experts))
    ids = [
        torch.tensor(
            [rng.sample(range(experts), top_k) for _ in range(rng.choice((0, 3, 20)))],
            dtype=torch.int64,
        ).view(-1, top_k)
        for _ in range(num_ranks)
    ]
    chosen = select_on_all(ranks, ids)
    slot_map = ranks.stores[0].slot_map
    loads = np.zeros(num_ranks)
    for wanted, physical in zip(ids, chosen, strict=True):
        for expert, place in zip(
            wanted.flatten().tolist(), physical.flatten().tolist(), strict=True
        ):
            rank, slot = divmod(place, slot_map.slots_per_rank)
            assert slot_map.layers[LAYER][rank][slot] == expert
            loads[rank] += 1
    counts = torch.cat(ids).flatten().bincount(minlength=experts).numpy()[None]
    best = balanced_shares(counts, slot_table(ranks.placement, [LAYER])).rank_loads.max()
    assert loads.max() <= best + experts  # each expert is rounded by less than one token
