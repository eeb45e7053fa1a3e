"""The attention kernels in the interpreter, against the formula in float64."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from moeserve_kernels import backend, tables
from moeserve_kernels.device import attention as device
from moeserve_kernels.device.attention_launch import Options, prefill_launch
from moeserve_kernels.device.targets import INTERPRET, TARGETS
from moeserve_kernels.formulas import attention as formulas
from moeserve_kernels.operations.attention import (
    attn_decode,
    attn_decode_splits,
    attn_prefill,
    merge,
)

from .. import guards
from ..attention_inputs import FP8, Inputs, draw, exact


def guarded(inputs: Inputs) -> Inputs:
    """Each tensor in a buffer of NaN."""
    names = ("query", "key_cache", "value_cache", "block_table", "query_starts", "seq_lens")
    return replace(inputs, **{name: guards.inside_nan(getattr(inputs, name)) for name in names})


def twice(operation: Any, *args: Any, **options: Any) -> torch.Tensor:
    """The operation's result, between canaries, with equal bits each time."""
    results = []
    for _ in range(2):
        with backend.forced("triton-interpret"), guards.poisoned_empty():
            results.append(operation(*args, **options))
    guards.assert_same_bits(*results)
    return results[0]


def once(operation: Any, *args: Any, **options: Any) -> torch.Tensor:
    with backend.forced("triton-interpret"), guards.poisoned_empty():
        result: torch.Tensor = operation(*args, **options)
    return result


def check_decode(inputs: Inputs, scale: float = 0.2, run: Any = once, **options: Any) -> None:
    inputs = guarded(inputs)
    options["max_seq_len"] = int(inputs.seq_lens.max())
    out = run(attn_decode, *inputs.decode(), scale, **options)
    expected = formulas.attn_decode(*exact(inputs.decode()), scale, **options)
    assert out.dtype == inputs.query.dtype
    guards.assert_close(out, expected)


def check_prefill(inputs: Inputs, scale: float = 0.2, run: Any = once, **options: Any) -> None:
    inputs = guarded(inputs)
    options["max_query_len"] = max(inputs.query_lens)
    out = run(attn_prefill, *inputs.prefill(), scale, **options)
    expected = formulas.attn_prefill(*exact(inputs.prefill()), scale, **options)
    assert out.dtype == inputs.query.dtype
    guards.assert_close(out, expected)


def sinks(heads: int) -> torch.Tensor:
    return guards.inside_nan(torch.linspace(-2, 3, heads))


_HEADS = [(2, 2, 64, 64), (8, 2, 96, 96), (8, 1, 128, 128), (4, 2, 192, 128), (2, 1, 256, 256)]


@pytest.mark.parametrize(("heads", "kv_heads", "d", "d_v"), _HEADS)
def test_decode_of_every_head_size(heads: int, kv_heads: int, d: int, d_v: int) -> None:
    inputs = draw([70, 1], heads=heads, kv_heads=kv_heads, d=d, d_v=d_v)
    check_decode(inputs, d**-0.5, num_splits=1)
    check_decode(inputs, d**-0.5, twice, num_splits=2)


@pytest.mark.parametrize(("heads", "kv_heads", "d", "d_v"), _HEADS)
def test_prefill_of_every_head_size(heads: int, kv_heads: int, d: int, d_v: int) -> None:
    inputs = draw([75, 3], [11, 3], heads=heads, kv_heads=kv_heads, d=d, d_v=d_v)
    check_prefill(inputs, d**-0.5, twice)


@pytest.mark.parametrize("num_splits", [1, 3])
def test_short_sequences_beside_long_ones_have_empty_splits(num_splits: int) -> None:
    lengths = [200, 1, 0, 17, 64, 129]
    check_decode(draw(lengths, heads=2, kv_heads=1), num_splits=num_splits)


@pytest.mark.parametrize(("num_splits", "window"), [(1, None), (3, None), (1, 50), (2, 70), (3, 1)])
def test_decode_with_sinks_cap_and_window(num_splits: int, window: int | None) -> None:
    options = {"sinks": sinks(6), "soft_cap": 2.0, "sliding_window": window}
    inputs = draw([130, 0, 3], heads=6, kv_heads=2)
    check_decode(inputs, 1.0, num_splits=num_splits, **options)


@pytest.mark.parametrize("window", [None, 1, 64, 100])
def test_prefill_with_sinks_cap_and_window(window: int | None) -> None:
    options = {"sinks": sinks(6), "soft_cap": 2.0, "sliding_window": window}
    check_prefill(draw([200, 5], [70, 5], heads=6, kv_heads=2), 1.0, **options)


@pytest.mark.parametrize("window", [63, 64, 65])
@pytest.mark.parametrize("length", [127, 128, 129])
def test_prefill_at_the_edges_of_tiles(window: int, length: int) -> None:
    inputs = draw([length, 64], [length, 64], heads=1, kv_heads=1, d=16)
    check_prefill(inputs, sliding_window=window)


def test_a_batch_of_chunks_decodes_and_empty_requests() -> None:
    lengths, queries = [90, 1, 40, 0, 33, 64], [20, 1, 1, 0, 33, 0]
    check_prefill(draw(lengths, queries, heads=4, kv_heads=1))
    check_prefill(draw(lengths[1:4], queries[1:4], heads=4, kv_heads=1))


def test_more_requests_than_are_looked_at_once() -> None:
    inputs = draw([3, 20, 1, 5, 9, 4], [2, 17, 0, 1, 0, 4], heads=1, kv_heads=1, d=16)
    out = torch.full_like(inputs.query, torch.nan)
    prefill_launch(
        *guarded(inputs).prefill(),
        out,
        Options(0.2),
        max_query_len=17,
        target=INTERPRET,
        tile={"block_m": 16, "block_n": 16, "num_warps": 1, "num_stages": 1},
        requests_at_once=4,
    ).run()
    expected = formulas.attn_prefill(*exact(inputs.prefill()), 0.2, max_query_len=17)
    guards.assert_close(out, expected)


@pytest.mark.parametrize("kv_heads", [1, 3])
def test_groups_that_fill_no_block_or_several(kv_heads: int) -> None:
    heads = 66 if kv_heads == 1 else 21
    inputs = draw([20, 5], [3, 1], heads=heads, kv_heads=kv_heads)
    check_prefill(inputs)
    check_decode(draw([20, 70], heads=heads, kv_heads=kv_heads), num_splits=2)


@pytest.mark.parametrize("block_size", [1, 7, 128])
def test_cache_blocks_of_any_size(block_size: int) -> None:
    check_prefill(draw([70, 9], [9, 9], block_size=block_size))
    check_decode(draw([70, 9], block_size=block_size), num_splits=2)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_16_bits(dtype: torch.dtype) -> None:
    check_prefill(draw([90, 9], [33, 9], d=128, dtype=dtype), 128**-0.5)
    check_decode(draw([90, 9], d=128, dtype=dtype), 128**-0.5, num_splits=2, sinks=sinks(4))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_fp8_caches_with_scales(dtype: torch.dtype) -> None:
    scales = {"k_scale": 0.5, "v_scale": 2.5}
    inputs = draw([90, 9], [33, 9], d=64, dtype=dtype, cache_dtype=FP8)
    check_prefill(inputs, **scales)
    inputs = draw([90, 9], d=64, dtype=dtype, cache_dtype=FP8)
    check_decode(inputs, num_splits=2, **scales)
    check_decode(inputs, num_splits=1, **scales)


def test_any_strides_of_query_and_caches() -> None:
    inputs = draw([70, 9], [9, 2], heads=8, kv_heads=4)
    parts = {"query": inputs.query[:, ::2]}
    for name in ("key_cache", "value_cache"):
        by_head = getattr(inputs, name).transpose(1, 2).contiguous()  # heads before slots
        parts[name] = by_head.transpose(1, 2)[:, :, ::2]
    inputs = replace(inputs, **parts)
    check_prefill(inputs)
    check_decode(replace(inputs, query=inputs.query[-2:]), num_splits=2)


def test_splits_merge_to_the_whole() -> None:
    inputs = guarded(draw([100, 7, 0], heads=4, kv_heads=2))
    with backend.forced("triton-interpret"), guards.poisoned_empty():
        partial, lse = attn_decode_splits(*inputs.decode(), 0.2, max_seq_len=100, num_splits=3)
        out = merge(partial, lse, sinks=sinks(4), dtype=torch.float32)
    _, expected = formulas.attn_decode_splits(*exact(inputs.decode()), 0.2, max_seq_len=100)
    guards.assert_close(lse.logsumexp(1), expected[:, 0])
    whole = formulas.attn_decode(*exact(inputs.decode()), 0.2, max_seq_len=100, sinks=sinks(4))
    guards.assert_close(out, whole)


@pytest.mark.parametrize(("num_splits", "value_dim"), [(1, 16), (70, 100), (33, 512)])
def test_merge_of_any_number_of_splits(num_splits: int, value_dim: int) -> None:
    generator = torch.Generator().manual_seed(3)
    partial = torch.randn(2, num_splits, 3, value_dim, generator=generator)
    lse = torch.randn(2, num_splits, 3, generator=generator) * 30
    lse[0, :, 1] = -torch.inf
    lse[1, num_splits // 2 :] = -torch.inf
    partial[lse == -torch.inf] = torch.nan
    expected = formulas.merge(partial.double(), lse.double(), dtype=torch.float64)
    out = twice(merge, guards.inside_nan(partial), guards.inside_nan(lse), dtype=torch.float32)
    guards.assert_close(out, expected)
    assert not out[0, 1].any()


def test_a_nan_in_the_cache_stays_visible_to_those_who_see_it() -> None:
    inputs = draw([100, 70], heads=2, kv_heads=1)
    block = int(inputs.block_table[0, 2])
    inputs.value_cache[block, 3] = torch.nan
    inputs.key_cache[block, 3] = torch.nan
    for num_splits in (1, 2):
        with backend.forced("triton-interpret"):
            out = attn_decode(*inputs.decode(), 0.2, max_seq_len=100, num_splits=num_splits)
        assert out[0].isnan().all()
        assert out[1].isfinite().all()


def test_without_requests() -> None:
    with backend.forced("triton-interpret"):
        out = attn_decode(*draw([]).decode(), 0.2, max_seq_len=0)
        assert out.shape == (0, 4, 32)
        out = attn_prefill(*draw([]).prefill(), 0.2, max_query_len=0)
        assert out.shape == (0, 4, 32)


def test_a_chip_without_fp8_refuses_fp8_caches(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device, "target_of", lambda _: TARGETS["sm_80"])
    inputs = draw([5], cache_dtype=FP8)
    with pytest.raises(ValueError, match="float8_e4m3fn, which sm_80 can not"):
        device.attn_decode(*inputs.decode(), 0.2, max_seq_len=5)
    with pytest.raises(ValueError, match="float8_e4m3fn, which sm_80 can not"):
        device.attn_prefill(*inputs.prefill(), 0.2, max_query_len=1)


@pytest.mark.parametrize("target", [*TARGETS.values(), INTERPRET], ids=lambda one: one.name)
def test_tiles_grow_with_the_longest_request(target: Any) -> None:
    inputs = draw([4000], [4000], heads=32, kv_heads=4, d=128, dtype=torch.bfloat16)
    rows = []
    for max_query_len in (1, 2, 8, 4000):
        launch = prefill_launch(
            *inputs.prefill(),
            inputs.query,
            Options(0.1),
            max_query_len=max_query_len,
            target=target,
        )
        rows.append(launch.constants["BLOCK_M"])
    assert rows == sorted(rows)
    assert rows[:2] == [16, 16]
    assert rows[-1] >= 64
    assert tables.load("attention", target.name)["decode"].keys() == {"float16", "float32"}
