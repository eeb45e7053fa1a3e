"""What the scheduler promises, one behaviour each."""

from __future__ import annotations

import time
from typing import Any

import pytest

from moeserve.config import SchedulerConfig
from moeserve.engine.block_pool import BlockPool
from moeserve.engine.request import Request
from moeserve.engine.scheduler import Scheduler
from moeserve.messages import NewRequest, SamplingParams

LONG = {"max_tokens": 30, "ignore_eos": True}


def scheduled(plan: Any) -> dict[str, int]:
    return {r.request.request_id: r.num_tokens for r in plan.requests}


def test_four_long_requests_in_ten_blocks_are_preempted_and_get_their_text(
    make_engine: Any,
) -> None:
    engine = make_engine(num_blocks=10, block_size=4)
    prompts = {f"r{i}": [i, 1, 2, i, 4] for i in range(4)}
    for name, prompt in prompts.items():
        engine.add(name, prompt, **LONG)
    finished: list[str] = []
    while engine.scheduler.has_unfinished:
        engine.step()
        finished += [n for n, r in engine.results.items() if r.finish_reason and n not in finished]
    assert engine.scheduler.stats().num_preemptions > 2
    assert finished == ["r0", "r1", "r2", "r3"]
    for name, prompt in prompts.items():
        got = engine.results[name]
        assert got.token_ids == engine.expected(prompt, **LONG).token_ids
        assert got.num_cached_tokens == 0, "its own blocks, found again, are no saved prompt"


def test_the_time_in_the_queue_ends_with_the_first_step(make_engine: Any) -> None:
    engine = make_engine(max_num_seqs=1)
    engine.add("first", [1, 2], max_tokens=2, ignore_eos=True)
    engine.add("second", [3, 4], max_tokens=2, ignore_eos=True)
    engine.step()
    time.sleep(0.05)
    while engine.scheduler.has_unfinished:
        engine.step()
    assert engine.results["first"].queued_s < 0.05 <= engine.results["second"].queued_s


def test_the_first_request_is_never_preempted(make_engine: Any) -> None:
    engine = make_engine(num_blocks=10, block_size=4)
    for i in range(4):
        engine.add(f"r{i}", [i, 1, 2, i, 4], **LONG)
    while engine.results["r0"].finish_reason is None:
        assert scheduled(engine.step()).get("r0")


def test_a_prefill_may_take_the_blocks_of_a_less_important_decode_of_the_same_step(
    make_engine: Any,
) -> None:
    engine = make_engine(
        num_blocks=12, block_size=1, max_num_batched_tokens=5, scheduling_policy="priority"
    )
    engine.add("late", [1], priority=1, max_tokens=10, ignore_eos=True)
    engine.step()
    engine.add("urgent", [2] * 10, priority=0, max_tokens=2)
    assert [scheduled(engine.step()) for _ in range(3)] == [
        {"late": 1, "urgent": 4},
        {"late": 1, "urgent": 4},
        {"urgent": 2},
    ]
    engine.run()
    expected = engine.expected([1], max_tokens=10, ignore_eos=True)
    assert engine.results["late"].token_ids == expected.token_ids


def test_decodes_come_first_and_prompts_get_the_rest_of_the_budget(make_engine: Any) -> None:
    engine = make_engine(max_num_batched_tokens=8)
    engine.add("short", [1, 2], **LONG)
    engine.step()
    engine.add("long", list(range(10)) * 2, **LONG)
    engine.add("next", [5] * 5, **LONG)
    steps = [scheduled(engine.step()) for _ in range(4)]
    assert steps[0] == {"short": 1, "long": 7}
    assert steps[1] == {"short": 1, "long": 7}
    assert steps[2] == {"short": 1, "long": 6, "next": 1}
    assert steps[3] == {"short": 1, "long": 1, "next": 4}


def test_lower_priority_numbers_go_first_and_equal_ones_by_arrival(make_engine: Any) -> None:
    for policy, order in (("priority", ["c", "b", "d", "a"]), ("fcfs", ["a", "b", "c", "d"])):
        engine = make_engine(max_num_seqs=1, scheduling_policy=policy)
        for name, priority in (("a", 7), ("b", 0), ("c", -1), ("d", 0)):
            engine.add(name, [1, 2], priority=priority, max_tokens=1)
        assert [next(iter(scheduled(engine.step()))) for _ in range(4)] == order


def test_a_request_that_does_not_fit_now_holds_no_blocks_and_is_not_overtaken(
    make_engine: Any,
) -> None:
    engine = make_engine(num_blocks=10, block_size=4, max_num_batched_tokens=16)
    engine.add("first", [1] * 24, **{**LONG, "max_tokens": 2})
    engine.add("second", [2] * 24, max_tokens=1)
    engine.add("small", [3], max_tokens=1)
    while engine.results["first"].finish_reason is None:
        assert list(scheduled(engine.step())) == ["first"]
    assert list(scheduled(engine.step())) == ["second"]


@pytest.mark.parametrize(
    ("prompt", "params", "said"),
    [
        ([1] * 40, {}, ["40", "41", "KV cache holds 40 (10 blocks of 4)"]),
        ([1] * 41, {"max_tokens": 0}, ["41", "KV cache holds 40"]),
        ([1] * 60, {}, ["60", "61", "max_model_len is 60"]),
        ([], {}, ["at least one token"]),
        ([1, -1], {}, ["-1", "[0, 11)"]),
        ([1, 11], {}, ["11", "[0, 11)"]),
        ([1], {"stop_token_ids": [11]}, ["stop_token_ids", "11"]),
        ([1], {"logit_bias": {-1: 1.0}}, ["logit_bias", "-1"]),
        ([1], {"allowed_token_ids": [2**40]}, ["allowed_token_ids"]),
    ],
)
def test_what_can_never_run_is_refused_with_numbers_and_others_go_on(
    make_engine: Any, prompt: list[int], params: dict[str, Any], said: list[str]
) -> None:
    engine = make_engine(num_blocks=10, block_size=4, max_model_len=60)
    engine.add("good", [1, 2], **LONG)
    engine.step()
    engine.add("bad", prompt, **params)
    assert engine.results["bad"].finish_reason == "error"
    assert all(part in engine.results["bad"].error for part in said)
    engine.run()
    assert engine.results["good"].finish_reason == "length"


def test_a_request_id_in_flight_is_refused_and_the_first_one_goes_on(make_engine: Any) -> None:
    engine = make_engine()
    engine.add("same", [1, 2], **LONG)
    first = engine.results["same"]
    engine.add("same", [3, 4], **LONG)
    assert engine.results["same"].finish_reason == "error"
    engine.results["same"] = first
    engine.run()
    assert first.token_ids == engine.expected([1, 2], **LONG).token_ids


@pytest.mark.parametrize("max_tokens", [None, 36, 2**31 - 1, 2**63 - 1])
def test_output_is_clamped_to_context_and_pool(make_engine: Any, max_tokens: int | None) -> None:
    for num_blocks, room in ((10, 36), (100, 56)):
        engine = make_engine(num_blocks=num_blocks, block_size=4, max_model_len=60)
        engine.add("r", [1, 2, 3, 4], max_tokens=max_tokens, ignore_eos=True)
        engine.run()
        wanted = room if max_tokens is None else min(room, max_tokens)
        assert len(engine.results["r"].token_ids) == wanted
        assert engine.results["r"].finish_reason == "length"


def test_scoring_gives_prompt_logprobs_and_no_token(make_engine: Any) -> None:
    engine = make_engine(max_num_batched_tokens=3)
    for prompt in ([1, 2, 3, 4, 5, 6, 7, 8, 9], [4]):
        engine.add("r", prompt, max_tokens=0, prompt_logprobs=1)
        engine.run()
        assert engine.results["r"] == engine.expected(prompt, max_tokens=0, prompt_logprobs=1)


def test_scoring_again_gives_the_same_numbers_although_the_prefix_is_cached(
    make_engine: Any,
) -> None:
    engine = make_engine()
    prompt = [1, 2, 3, 4, 5, 6, 7, 8, 9]
    engine.add("first", prompt, max_tokens=2, prompt_logprobs=1)
    engine.run()
    engine.add("again", prompt, max_tokens=2, prompt_logprobs=1)
    engine.run()
    assert engine.results["again"] == engine.results["first"]
    engine.add("plain", prompt, max_tokens=2)
    engine.run()
    assert engine.results["plain"].num_cached_tokens == 8


def test_ends_are_forbidden_until_min_tokens_counted_on_the_output(make_engine: Any) -> None:
    engine = make_engine()
    params = {"min_tokens": 4, "max_tokens": 20, "stop_token_ids": [*range(0, 11, 2)]}
    for i in range(11):
        engine.add(f"r{i}", [i] * 9, **params)
    engine.run()
    for result in engine.results.values():
        assert len(result.token_ids) > 4
        assert result.finish_reason == "stop"
        assert result.stop_token_id == result.token_ids[-1]


def test_a_stop_token_that_came_too_early_does_not_end_a_request() -> None:
    request = Request(
        request_id="r",
        source=b"",
        params=SamplingParams(min_tokens=2),
        order=(0, 0),
        token_ids=[1],
        num_prompt_tokens=1,
        max_tokens=5,
        stop_token_ids=(7,),
        seed=0,
        num_computed_tokens=1,
    )
    for expected in (None, None, "stop"):
        request.append(7)
        assert request.finish_reason() == expected


def test_aborts_of_known_unknown_and_finished_ids_tell_what_was_found(make_engine: Any) -> None:
    engine = make_engine(max_num_seqs=1)
    for name in ("running", "waiting", "other"):
        engine.add(name, [1, 2, 3], **LONG)
    engine.step()
    assert engine.scheduler.abort(["running", "running", "unknown", "waiting"]) == 2
    assert engine.scheduler.abort(["running", "waiting"]) == 0
    engine.scheduler.check()
    engine.run()
    assert engine.results["other"].finish_reason == "length"


def test_an_id_may_come_again_while_the_step_of_the_aborted_one_is_computed(
    make_engine: Any,
) -> None:
    engine = make_engine()
    engine.add("r", [1, 2, 3], **LONG)

    def abort_and_add_again() -> None:
        engine.scheduler.abort(["r"])
        engine.add("r", [4, 5, 6], **LONG)

    engine.step(between=abort_and_add_again)
    engine.run()
    assert engine.results["r"].token_ids == engine.expected([4, 5, 6], **LONG).token_ids


def test_stats_count_what_happened(make_engine: Any) -> None:
    engine = make_engine(num_blocks=10, block_size=4, max_num_seqs=2)
    for i in range(3):
        engine.add(f"r{i}", [1] * 9, max_tokens=3, ignore_eos=True)
    engine.step()
    stats = engine.scheduler.stats()
    assert (stats.num_running, stats.num_waiting, stats.num_waiting_tokens) == (2, 1, 9)
    assert stats.kv_usage == pytest.approx(0.6)
    assert stats.iteration_tokens == 18
    engine.run()
    stats = engine.scheduler.stats()
    assert (stats.num_running, stats.num_waiting, stats.num_waiting_tokens) == (0, 0, 0)
    assert (stats.prefix_cache_queries, stats.prefix_cache_hits) == (27, 8)
    assert stats.kv_usage == 0.0
    assert stats.iteration_tokens == 3 * 11 - 8


def test_unseeded_requests_have_seeds_of_their_own_and_the_engine_seed_decides() -> None:
    def seeds(engine_seed: int) -> list[int]:
        scheduler = Scheduler(
            SchedulerConfig(),
            block_pool=BlockPool(8, 4),
            max_model_len=20,
            eos_token_ids=(),
            vocab_size=11,
            seed=engine_seed,
        )
        for name, seed in (("a", None), ("b", None), ("c", 5)):
            scheduler.add(NewRequest(name, [1], SamplingParams(seed=seed)), b"")
        return [info.seed for info in scheduler.schedule().sampling]

    first, again, other = seeds(0), seeds(0), seeds(1)
    assert first == again
    assert first[2] == other[2] == 5
    assert len({*first[:2], *other[:2]}) == 4


def test_whole_prompts_need_a_budget_for_the_longest_one(make_engine: Any) -> None:
    with pytest.raises(ValueError, match=r"max_num_batched_tokens = 50.*max_model_len = 60"):
        make_engine(max_model_len=60, max_num_batched_tokens=50, enable_chunked_prefill=False)


def test_check_finds_a_block_that_nobody_holds(make_engine: Any) -> None:
    engine = make_engine()
    engine.pool.allocate(1)
    with pytest.raises(RuntimeError, match="block 0: 1 holders counted, 0 in block tables"):
        engine.scheduler.check()
