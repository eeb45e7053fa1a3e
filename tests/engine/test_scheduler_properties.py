"""Whatever the schedule, a request gets what the model would have given it alone."""

from __future__ import annotations

import random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moeserve.engine.prefix_cache import PrefixCache

NUM_TOKENS = 11  # the stub's vocabulary

configs = st.fixed_dictionaries(
    {
        "num_blocks": st.integers(2, 16),
        "block_size": st.integers(1, 5),
        "max_num_batched_tokens": st.integers(1, 40),
        "max_num_seqs": st.integers(1, 6),
        "scheduling_policy": st.sampled_from(["fcfs", "priority"]),
        "enable_prefix_caching": st.booleans(),
    }
)
# Few beginnings and few endings, so that prefixes are shared.
prompts = st.builds(
    lambda head, tail: (head * 5)[: 2 + 3 * len(head)] + tail,
    st.sampled_from([[1], [1, 2, 3, 4], [5, 6]]),
    st.lists(st.integers(0, NUM_TOKENS - 1), max_size=8),
)


@st.composite
def requests(draw: st.DrawFn) -> dict[str, Any]:
    max_tokens = draw(st.one_of(st.none(), st.integers(0, 20)))
    return {
        "prompt": draw(prompts),
        "arrival": draw(st.integers(0, 12)),
        "abort": draw(st.one_of(st.none(), st.none(), st.integers(0, 25))),
        "is_abort_in_flight": draw(st.booleans()),
        "priority": draw(st.integers(-2, 2)),
        "cache_salt": draw(st.sampled_from(["", "", "tenant"])),
        "params": {
            "max_tokens": max_tokens,
            "min_tokens": draw(st.integers(0, min(3, 3 if max_tokens is None else max_tokens))),
            "ignore_eos": draw(st.booleans()),
            "stop_token_ids": draw(st.lists(st.integers(0, NUM_TOKENS - 1), max_size=2)),
            "prompt_logprobs": draw(st.sampled_from([None, None, 0])),
        },
    }


def drive(engine: Any, scenario: list[dict[str, Any]], repeat_every: int = 0) -> None:
    """Lets the requests arrive and be aborted at their steps; compares what each of them got."""
    names = [f"r{i}" for i in range(len(scenario))]
    most = sum(len(r["prompt"]) + engine.max_model_len for r in scenario) * (len(scenario) + 1)
    step = 0
    while step <= 12 or engine.scheduler.has_unfinished:
        assert step < most, "a request starves"
        for name, request in zip(names, scenario, strict=True):
            if request["arrival"] == step:
                engine.add(
                    name,
                    request["prompt"],
                    priority=request["priority"],
                    cache_salt=request["cache_salt"],
                    **request["params"],
                )
        leaving = [n for n, r in zip(names, scenario, strict=True) if r["abort"] == step]
        in_flight = [n for n in leaving if scenario[int(n[1:])]["is_abort_in_flight"]]
        engine.scheduler.abort([n for n in leaving if n not in in_flight])
        if repeat_every and step % repeat_every == 0:
            engine.forward(engine.scheduler.schedule())  # a step that was interrupted
        had_work = engine.scheduler.has_unfinished
        plan = engine.step(between=lambda names=in_flight: engine.scheduler.abort(names))
        assert bool(plan.num_tokens) == had_work, "a step without progress"
        step += 1
    assert engine.pool.num_free == engine.pool.num_blocks
    for name, request in zip(names, scenario, strict=True):
        got = engine.results[name]
        want = engine.expected(request["prompt"], **request["params"])
        if request["abort"] is not None and got.finish_reason is None:
            assert got.token_ids == want.token_ids[: len(got.token_ids)]
            continue
        want.error, want.num_cached_tokens = got.error, got.num_cached_tokens
        assert got == want


@settings(max_examples=120, deadline=None)
@given(config=configs, scenario=st.lists(requests(), min_size=1, max_size=8))
def test_every_schedule_gives_the_text_of_the_model_alone(
    make_engine: Any, config: dict[str, Any], scenario: list[dict[str, Any]]
) -> None:
    drive(make_engine(max_model_len=40, **config), scenario)


@settings(max_examples=50, deadline=None)
@given(config=configs, scenario=st.lists(requests(), min_size=1, max_size=8))
def test_whole_prompts_give_the_same_text_as_chunks(
    make_engine: Any, config: dict[str, Any], scenario: list[dict[str, Any]]
) -> None:
    config = {**config, "max_num_batched_tokens": 40, "enable_chunked_prefill": False}
    drive(make_engine(max_model_len=40, **config), scenario)


@settings(max_examples=50, deadline=None)
@given(config=configs, scenario=st.lists(requests(), min_size=1, max_size=8))
def test_interrupted_steps_run_again_with_the_same_text(
    make_engine: Any, config: dict[str, Any], scenario: list[dict[str, Any]]
) -> None:
    drive(make_engine(max_model_len=40, **config), scenario, repeat_every=2)


@pytest.mark.parametrize(
    "hash_block",
    [lambda self, parent_key, token_ids: b"same", lambda self, parent_key, ids: bytes(ids)],
    ids=["always", "equal tokens"],
)
@settings(max_examples=50, deadline=None)
@given(config=configs, scenario=st.lists(requests(), min_size=1, max_size=8))
def test_hashes_that_collide_are_harmless(
    make_engine: Any, hash_block: Any, config: dict[str, Any], scenario: list[dict[str, Any]]
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(PrefixCache, "hash_block", hash_block)
        drive(make_engine(max_model_len=40, **{**config, "enable_prefix_caching": True}), scenario)


@pytest.mark.parametrize("enable_prefix_caching", [True, False])
def test_a_thousand_mixed_requests_with_aborts_leave_all_blocks_free(
    make_engine: Any, enable_prefix_caching: bool
) -> None:
    random_ = random.Random(0)
    engine = make_engine(
        num_blocks=40,
        max_num_batched_tokens=64,
        max_num_seqs=16,
        max_model_len=100,
        enable_prefix_caching=enable_prefix_caching,
    )
    prefixes = [[random_.randrange(NUM_TOKENS) for _ in range(20)] for _ in range(5)]
    waiting = 1000
    in_flight: dict[str, tuple[list[int], dict[str, Any]]] = {}
    while waiting or engine.scheduler.has_unfinished:
        for _ in range(min(waiting, random_.randrange(6))):
            waiting -= 1
            prompt = random_.choice(prefixes)[: random_.randrange(21)]
            prompt = prompt + [
                random_.randrange(NUM_TOKENS) for _ in range(random_.randrange(1, 60))
            ]
            params = {"max_tokens": random_.randrange(40), "ignore_eos": random_.random() < 0.5}
            in_flight[f"r{waiting}"] = (prompt, params)
            engine.add(f"r{waiting}", prompt, **params)
        victims = [name for name in engine.results if random_.random() < 0.001]
        engine.step(between=lambda names=victims: engine.scheduler.abort(names))
    assert engine.pool.num_free == engine.pool.num_blocks
    finished = [n for n, r in engine.results.items() if r.finish_reason is not None]
    assert 100 < len(finished) < 1000
    for name in finished:
        prompt, params = in_flight[name]
        assert engine.results[name].token_ids == engine.expected(prompt, **params).token_ids
