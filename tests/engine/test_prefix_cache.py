"""Blocks are reused, kept and given up in the right order."""

from __future__ import annotations

from typing import Any

import pytest

from moeserve.engine.block_pool import BlockPool
from moeserve.engine.prefix_cache import PrefixCache

PROMPT = [1, 2, 3, 4, 5, 6, 7, 8, 9, 10]
ONE = {"max_tokens": 1}


def num_cached(engine: Any, prompt: list[int], **params: Any) -> int:
    name = f"r{len(engine.results)}"
    engine.add(name, prompt, **ONE, **params)
    engine.run()
    assert engine.results[name].token_ids == engine.expected(prompt, **ONE).token_ids
    return int(engine.results[name].num_cached_tokens)


def test_full_blocks_of_an_equal_prefix_are_reused(make_engine: Any) -> None:
    engine = make_engine(block_size=4)
    assert num_cached(engine, PROMPT) == 0
    assert num_cached(engine, PROMPT) == 8
    assert num_cached(engine, PROMPT[:7]) == 4
    assert num_cached(engine, [1, 2, 3, 4, 5, 6, 7, 0, 9]) == 4
    assert num_cached(engine, [0, 2, 3, 4, 5, 6, 7, 8, 9]) == 0


def test_a_prompt_that_is_cached_as_a_whole_computes_its_last_block(make_engine: Any) -> None:
    engine = make_engine(block_size=4)
    assert num_cached(engine, PROMPT[:8]) == 0
    assert num_cached(engine, PROMPT[:8]) == 4
    engine = make_engine(block_size=1)
    assert num_cached(engine, PROMPT) == 0
    assert num_cached(engine, PROMPT) == len(PROMPT) - 1


def test_salts_separate_tenants(make_engine: Any) -> None:
    engine = make_engine(block_size=4)
    odd = "\ud800 no text"
    for salt in ("", "a", "b", odd):
        assert num_cached(engine, PROMPT, cache_salt=salt) == 0
        assert num_cached(engine, PROMPT, cache_salt=salt) == 8


def test_switched_off_nothing_is_reused(make_engine: Any) -> None:
    engine = make_engine(block_size=4, enable_prefix_caching=False)
    assert num_cached(engine, PROMPT) == num_cached(engine, PROMPT) == 0
    assert engine.scheduler.stats().prefix_cache_queries == 0


def test_only_computed_blocks_are_found(make_engine: Any) -> None:
    engine = make_engine(block_size=4, max_num_batched_tokens=6)
    engine.add("first", PROMPT, **ONE)
    engine.step()
    engine.scheduler.abort(["first"])
    assert num_cached(engine, PROMPT) == 4


def test_output_is_found_too(make_engine: Any) -> None:
    engine = make_engine(block_size=4)
    engine.add("r", PROMPT, max_tokens=10, ignore_eos=True)
    engine.run()
    assert num_cached(engine, PROMPT + engine.results["r"].token_ids) == 16


def test_blocks_computed_again_after_a_preemption_are_found_again(make_engine: Any) -> None:
    engine = make_engine(num_blocks=6, block_size=2)
    engine.add("first", [1, 2], max_tokens=9, ignore_eos=True)
    engine.add("second", [3, 4], max_tokens=9, ignore_eos=True)
    engine.run()
    assert engine.scheduler.stats().num_preemptions
    whole = [3, 4, *engine.results["second"].token_ids]
    assert num_cached(engine, whole) == 10


def test_the_least_recently_used_goes_first_and_ends_before_beginnings(make_engine: Any) -> None:
    engine = make_engine(num_blocks=6, block_size=2)
    old, new = [1, 2, 3, 4, 0], [5, 6, 7, 8, 0]
    num_cached(engine, old)
    num_cached(engine, new)
    num_cached(engine, old)  # used again, so that new is the older one now
    engine.add("evictor", [9, 9, 9, 9, 9], **ONE)  # 3 blocks: 2 that were never full, 1 of new
    engine.run()
    lookups = [num_cached(engine, prompt) for prompt in (old, new)]
    assert lookups == [4, 2]


def test_a_block_with_a_holder_is_never_given_away() -> None:
    pool = BlockPool(4, 2)
    held = pool.allocate(2)
    shared = held[:1]
    pool.touch(shared)
    pool.release(held)
    assert pool.num_free == 3
    assert shared[0] not in pool.allocate(3)
    with pytest.raises(ValueError, match="1 blocks wanted, 0 of 4 free"):
        pool.allocate(1)
    pool.release(shared)
    assert pool.allocate(1) == shared


def test_releasing_twice_is_an_error() -> None:
    pool = BlockPool(2, 2)
    block_ids = pool.allocate(1)
    pool.release(block_ids)
    with pytest.raises(ValueError, match="released without a holder"):
        pool.release(block_ids)


@pytest.mark.parametrize(("num_blocks", "block_size"), [(0, 1), (1, 0), (-1, 1)])
def test_sizes_below_one_are_refused(num_blocks: int, block_size: int) -> None:
    with pytest.raises(ValueError, match="must be at least 1"):
        BlockPool(num_blocks, block_size)


def test_keys_depend_on_a_secret_of_the_process() -> None:
    keys = {PrefixCache(4).hash_block(b"", [1, 2, 3, 4]) for _ in range(3)}
    assert len(keys) == 3
