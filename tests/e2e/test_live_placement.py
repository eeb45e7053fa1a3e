"""Experts move while requests run, and no text changes by a bit."""

from __future__ import annotations

import random
import time
from typing import Any

import pytest
from helpers_text import LAYERS, NUM_EXPERTS, Result, exact_results, prompts

from moeserve import LLM
from moeserve_placement import Placement


def random_placement(rng: random.Random, sizes: list[int]) -> Placement:
    """Experts dealt at random over ranks with so many slots, copies wherever there is room."""
    layers = {}
    for layer in LAYERS:
        held: list[list[int | None]] = [[] for _ in sizes]
        for expert in rng.sample(range(NUM_EXPERTS), NUM_EXPERTS):
            held[rng.choice([r for r, have in enumerate(held) if len(have) < sizes[r]])].append(
                expert
            )
        for rank, have in enumerate(held):
            others = [e for e in range(NUM_EXPERTS) if e not in have]
            have += rng.sample(others, rng.randint(0, sizes[rank] - len(have)))
            have += [None] * (sizes[rank] - len(have))
            rng.shuffle(have)
        layers[layer] = tuple(tuple(have) for have in held)
    return Placement(num_experts=NUM_EXPERTS, layers=layers)


EXACT: dict[str, Any] = {"dtype": "float32", "batch_invariant": True, "num_blocks": 512}


@pytest.fixture(scope="module")
def reference() -> list[Result]:
    """One rank, nothing moves."""
    with LLM("embedded", **EXACT) as llm:
        return exact_results(llm, prompts())


def finish(llm: LLM) -> None:
    """Waits until nothing is moving any more."""
    deadline = time.monotonic() + 60
    while llm.expert_history()["entries"][0]["state"] in ("planning", "moving"):
        assert time.monotonic() < deadline
        time.sleep(0.01)


@pytest.mark.parametrize(("ep", "split"), [(2, "local"), (2, "batch"), (3, "batch")])
def test_text_is_the_same_while_experts_move(ep: int, split: str, reference: list[Result]) -> None:
    """Random placements with copies, moved in small pieces while requests run, and rolled back."""
    rng = random.Random(ep)
    settings = {"num_redundant_experts": 8, "step_bytes": "40K", "expert_split": split, **EXACT}
    with LLM("embedded", ep=ep, **settings) as llm:
        placement = llm.expert_history()
        sizes = [(NUM_EXPERTS + 8) // ep] * ep
        for number in range(6):
            if number == 4:
                llm.rollback_experts()
            else:
                llm.place_experts(random_placement(rng, sizes))
            assert exact_results(llm, prompts()) == reference
            finish(llm)
            llm.check()
        entries = llm.expert_history()["entries"]
        assert [entry["state"] for entry in entries].count("done") >= 5, entries
        assert placement["entries"] == []
