"""The oracle of the runtime: the same text and logprobs, bit for bit, whatever the layout.

Float32 and batch-invariant mode. One rank, alone, without prefix cache and with the whole prompt in
one step gives the reference; every other layout must reproduce it exactly.
"""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
from helpers_text import LAYERS, NUM_EXPERTS, Result, exact_results, prompts

from moeserve import LLM
from moeserve_placement import Placement


def run(batches: list[list[list[int]]], **settings: Any) -> list[Result]:
    """Results of all prompts, batch after batch, greedy and seeded in turn."""
    settings = {"dtype": "float32", "batch_invariant": True, "num_blocks": 512, **settings}
    results: list[Result] = []
    with LLM("embedded", **settings) as llm:
        for batch in batches:
            results += exact_results(llm, batch)
        llm.check()
    return results


@pytest.fixture(scope="module")
def reference() -> list[Result]:
    """One rank, one request at a time, no prefix cache, prompts in one step."""
    return run([[prompt] for prompt in prompts()], enable_prefix_caching=False)


def placement_with_copies(path: Path, num_ranks: int) -> str:
    """An uneven placement: experts dealt at random, some twice on different ranks, free slots."""
    rng = random.Random(num_ranks)
    layers = {}
    for layer in LAYERS:
        ranks: list[list[int | None]] = [[] for _ in range(num_ranks)]
        for expert in range(NUM_EXPERTS):
            copies = rng.choice((1, 1, 2, num_ranks))
            for rank in rng.sample(range(num_ranks), min(copies, num_ranks)):
                ranks[rank].append(expert)
        ranks[rng.randrange(num_ranks)].append(None)
        for slots in ranks:
            rng.shuffle(slots)
        layers[layer] = tuple(tuple(slots) for slots in ranks)
    file = path / f"placement{num_ranks}.json"
    Placement(num_experts=NUM_EXPERTS, layers=layers).save(file)
    return str(file)


@pytest.mark.parametrize(
    "settings",
    [
        {"ep": 1},
        {"ep": 1, "max_num_batched_tokens": 7, "max_num_seqs": 3},
        {"ep": 2, "dispatcher": "all_to_all"},
        {"ep": 2, "dispatcher": "all_gather", "max_num_batched_tokens": 50},
        {"ep": 2, "placement": "copies", "dispatcher": "auto"},
        {"ep": 3, "placement": "round_robin", "dispatcher": "all_to_all"},
        {"ep": 3, "placement": "copies", "dispatcher": "all_gather", "block_size": 8},
        {"ep": 4, "placement": "copies", "enable_prefix_caching": False},
    ],
    ids=lambda settings: "-".join(f"{k}={v}" for k, v in settings.items()),
)
def test_any_layout_gives_the_reference_bit_for_bit(
    settings: dict[str, Any], reference: list[Result], tmp_path: Path
) -> None:
    if settings.get("placement") == "copies":
        settings = {**settings, "placement": placement_with_copies(tmp_path, settings["ep"])}
    # Twice: the second time, prompts are found in the prefix cache.
    results = run([prompts(), prompts()], **settings)
    assert results[: len(reference)] == reference
    assert results[len(reference) :] == reference


def test_forced_preemption_changes_nothing() -> None:
    """Four long requests, ten blocks: they can not run together to their end."""
    rng = random.Random(3)
    long = [[rng.randrange(3, 4096) for _ in range(60)] for _ in range(4)]
    alone = run([[prompt] for prompt in long], num_blocks=10)
    together = run([long], num_blocks=10)
    assert together == alone


def test_alone_and_among_sixteen_others(reference: list[Result]) -> None:
    rng = random.Random(5)
    others = [[rng.randrange(3, 4096) for _ in range(rng.randrange(1, 90))] for _ in range(16)]
    mixed = [*others[:8], *prompts(), *others[8:]]
    assert run([mixed], ep=2)[8 : 8 + len(reference)] == reference
