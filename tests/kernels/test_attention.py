"""Attention on a CPU against the formula in float64, how sequences are split, bad arguments."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from moeserve_kernels import check
from moeserve_kernels.device.splits import num_splits
from moeserve_kernels.formulas import attention as formulas
from moeserve_kernels.host import attention as host
from moeserve_kernels.operations.attention import (
    attn_decode,
    attn_decode_splits,
    attn_prefill,
    merge,
)

from . import guards
from .attention_inputs import FP8, Inputs, draw, exact


@st.composite
def cases(draw_value: Any) -> tuple[list[int], list[int], dict[str, Any], dict[str, Any]]:
    """Lengths, query lengths, sizes of the tensors and options of the operation."""
    lengths = draw_value(st.lists(st.integers(0, 40), min_size=0, max_size=5))
    queries = [draw_value(st.integers(0, length)) for length in lengths]
    kv_heads = draw_value(st.integers(1, 3))
    heads = kv_heads * draw_value(st.integers(1, 4))
    fp8 = draw_value(st.booleans())
    sizes = {
        "heads": heads,
        "kv_heads": kv_heads,
        "d": draw_value(st.integers(1, 20)),
        "d_v": draw_value(st.integers(1, 20)),
        "block_size": draw_value(st.integers(1, 17)),
        "dtype": draw_value(st.sampled_from([torch.float32, torch.bfloat16, torch.float64])),
        "cache_dtype": FP8 if fp8 else None,
        "seed": draw_value(st.integers(0, 1 << 31)),
    }
    generator = torch.Generator().manual_seed(sizes["seed"])
    options: dict[str, Any] = {
        "sliding_window": draw_value(st.sampled_from([None, 1, 2, 7, 39, 100])),
        "soft_cap": draw_value(st.sampled_from([None, 0.5, 30.0])),
        "sinks": draw_value(st.sampled_from([None, torch.randn(heads, generator=generator)])),
    }
    if fp8:
        options |= {"k_scale": 0.5, "v_scale": 3.0}
    return lengths, queries, sizes, options


@settings(max_examples=400)
@given(cases())
def test_prefill_equals_the_formula(case: Any) -> None:
    lengths, queries, sizes, options = case
    inputs = draw(lengths, queries, **sizes)
    options["max_query_len"] = max(queries, default=0)
    with check.debug():
        out = attn_prefill(*inputs.prefill(), 0.4, **options)
    expected = formulas.attn_prefill(*exact(inputs.prefill()), 0.4, **options)
    assert out.dtype == inputs.query.dtype
    guards.assert_close(out, expected)


@settings(max_examples=400)
@given(cases(), st.integers(1, 5))
def test_decode_equals_the_formula_whole_and_in_splits(case: Any, splits: int) -> None:
    lengths, _, sizes, options = case
    inputs = draw(lengths, **sizes)
    options["max_seq_len"] = max(lengths, default=0)
    expected = formulas.attn_decode(*exact(inputs.decode()), 0.4, **options)
    guards.assert_close(attn_decode(*inputs.decode(), 0.4, **options), expected)
    sinks = options.pop("sinks")
    with check.debug():
        partial, lse = attn_decode_splits(*inputs.decode(), 0.4, **options, num_splits=splits)
    assert partial.shape[:3] == lse.shape == (len(lengths), splits, sizes["heads"])
    out = merge(partial, lse, sinks=sinks, dtype=inputs.query.dtype)
    guards.assert_close(out, expected)


@settings(max_examples=200)
@given(st.integers(0, 3), st.integers(1, 6), st.integers(1, 3), st.booleans(), st.data())
def test_merge_equals_the_formula(
    requests: int, splits: int, heads: int, with_sinks: bool, data: st.DataObject
) -> None:
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 1 << 31)))
    partial = torch.randn(requests, splits, heads, 4, generator=generator)
    lse = torch.randn(requests, splits, heads, generator=generator) * 20
    empty = torch.rand(lse.shape, generator=generator) < 0.4
    lse[empty], partial[empty] = -torch.inf, torch.nan
    sinks = torch.randn(heads, generator=generator) * 20 if with_sinks else None
    out = merge(partial, lse, sinks=sinks, dtype=torch.float32)
    expected = formulas.merge(partial.double(), lse.double(), sinks=sinks, dtype=torch.float64)
    guards.assert_close(out, expected)


def test_long_prompts_are_computed_in_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    inputs = draw([50, 40], [50, 9], heads=4, kv_heads=2)
    monkeypatch.setattr(host, "_MAX_SCORES", 4 * 50 * 7)
    for window in (None, 5):
        options: dict[str, Any] = {"max_query_len": 50, "sliding_window": window}
        out = attn_prefill(*inputs.prefill(), 0.2, **options)
        expected = formulas.attn_prefill(*exact(inputs.prefill()), 0.2, **options)
        guards.assert_close(out, expected)


def test_a_prompt_in_chunks_and_token_by_token_is_the_prompt_at_once() -> None:
    inputs = draw([37], [37], heads=4, kv_heads=2, dtype=torch.float64)
    options = {"sliding_window": 9, "sinks": torch.linspace(-1, 2, 4).double()}
    whole = attn_prefill(*inputs.prefill(), 0.2, max_query_len=37, **options)
    query, *caches, table, _, _ = inputs.prefill()
    parts = []
    for begin, end in ((0, 1), (1, 16), (16, 30), (30, 37)):
        starts = torch.tensor([0, end - begin], dtype=torch.int32)
        length = torch.tensor([end], dtype=torch.int32)
        rows = query[begin:end]
        parts.append(
            attn_prefill(rows, *caches, table, starts, length, 0.2, max_query_len=37, **options)
        )
    guards.assert_close(torch.cat(parts), whole)
    for position in range(37):
        length = torch.tensor([position + 1], dtype=torch.int32)
        token = query[position, None]
        out = attn_decode(token, *caches, table, length, 0.2, max_seq_len=37, **options)
        guards.assert_close(out[0], whole[position])


@pytest.mark.parametrize(
    ("sms", "requests", "blocks", "longest", "window", "splits"),
    [
        (132, 1, 4, 32768, None, 66),  # one long sequence fills the chip
        (132, 12, 8, 32768, None, 3),  # a dozen of them, too: the batch alone does not decide
        (132, 64, 8, 32768, None, 1),
        (132, 1, 4, 1024, None, 4),  # a short one is not cut into crumbs
        (132, 1, 4, 1, None, 1),
        (132, 1, 4, 0, None, 1),
        (132, 0, 4, 1000, None, 4),
        (132, 1, 1, 1 << 20, None, 264),
        (132, 1, 4, 32768, 1024, 4),  # what the window hides is not split
        (108, 2, 8, 3000, None, 12),
    ],
)
def test_splits_follow_chip_batch_and_length(
    sms: int, requests: int, blocks: int, longest: int, window: int | None, splits: int
) -> None:
    assert num_splits(sms, requests, blocks, longest, window) == splits


@given(st.integers(1, 400), st.integers(0, 300), st.integers(1, 64), st.integers(0, 10**6))
def test_splits_neither_flood_the_chip_nor_are_tiny(
    sms: int, requests: int, blocks: int, longest: int
) -> None:
    splits = num_splits(sms, requests, blocks, longest)
    assert splits >= 1
    assert splits == 1 or (splits - 1) * requests * blocks < 2 * sms
    assert splits == 1 or (splits - 1) * 256 < longest
    assert num_splits(sms, requests, blocks, longest + 1000) >= splits


# ---- arguments that are refused

Change = Callable[[Inputs], Inputs]
_BAD: dict[str, tuple[Change, dict[str, Any], str]] = {
    "query dtype": (
        lambda one: replace(one, query=one.query.int()),
        {},
        "query: dtype is int32, must be float32",
    ),
    "caches of another dtype": (
        lambda one: replace(one, key_cache=one.key_cache.half()),
        {},
        "key_cache: dtype is float16, must be float32 or float8_e4m3fn",
    ),
    "one cache fp8": (
        lambda one: replace(one, key_cache=one.key_cache.to(FP8)),
        {},
        "value_cache: dtype is float32, must be float8_e4m3fn",
    ),
    "head size": (
        lambda one: replace(one, query=one.query[..., :-1]),
        {},
        r"key_cache: shape is \[2, 16, 2, 32\], must be \[num_blocks, block_size, kv_heads, 31\]",
    ),
    "blocks": (
        lambda one: replace(one, value_cache=one.value_cache[:1]),
        {},
        r"value_cache: shape is \[1, 16, 2, 32\], must be \[2, 16, 2, d_v\]",
    ),
    "heads": (
        lambda one: replace(one, query=one.query[:, :3]),
        {},
        "query: 3 heads, must be a multiple of 2 kv heads",
    ),
    "table dtype": (
        lambda one: replace(one, block_table=one.block_table.long()),
        {},
        "block_table: dtype is int64, must be int32",
    ),
    "lengths dtype": (
        lambda one: replace(one, seq_lens=one.seq_lens.long()),
        {},
        "seq_lens: dtype is int64, must be int32",
    ),
    "strides": (
        lambda one: replace(one, query=one.query.transpose(1, 2).contiguous().transpose(1, 2)),
        {},
        "query: stride of the last dimension is 4, must be 1",
    ),
    "window": (lambda one: one, {"sliding_window": 0}, "sliding_window = 0: must be at least 1"),
    "cap": (lambda one: one, {"soft_cap": 0.0}, "soft_cap = 0.0: must be over 0"),
    "sinks": (lambda one: one, {"sinks": torch.zeros(3)}, r"sinks: shape is \[3\], must be \[4\]"),
    "scale": (lambda one: one, {"v_scale": 2.0}, "v_scale = 2.0: must be 1.0 unless"),
}


@pytest.mark.parametrize("name", _BAD)
def test_bad_arguments_are_named(name: str) -> None:
    change, options, message = _BAD[name]
    inputs = change(draw([5]))
    with pytest.raises(ValueError, match=message):
        attn_decode(*inputs.decode(), 0.2, max_seq_len=5, **options)
    with pytest.raises(ValueError, match=message):
        attn_prefill(*inputs.prefill(), 0.2, max_query_len=1, **options)


def test_bad_arguments_of_decode_and_merge() -> None:
    inputs = draw([5, 3])
    with pytest.raises(ValueError, match="num_splits = 0: must be at least 1"):
        attn_decode(*inputs.decode(), 0.2, max_seq_len=5, num_splits=0)
    with pytest.raises(ValueError, match=r"seq_lens: shape is \[2\], must be \[1\]"):
        attn_decode(inputs.query[:1], *inputs.decode()[1:], 0.2, max_seq_len=5)
    with pytest.raises(ValueError, match=r"lse: shape is \[1, 2, 4\], must be \[1, 2, 3\]"):
        merge(torch.zeros(1, 2, 3, 8), torch.zeros(1, 2, 4), dtype=torch.float32)
    with pytest.raises(ValueError, match=r"query_starts: shape is \[2\], must be \[3\]"):
        starts = inputs.query_starts[:2]
        attn_prefill(*inputs.prefill()[:4], starts, inputs.seq_lens, 0.2, max_query_len=1)
    wide = draw([5], d=257)
    with pytest.raises(ValueError, match=r"d = 257: must be in 1\.\.256"):
        attn_decode(*wide.decode(), 0.2, max_seq_len=5)


def test_values_are_checked_in_debug_mode() -> None:
    inputs = draw([5, 3], [2, 3])
    decoding = draw([5, 3])
    with check.debug():
        with pytest.raises(ValueError, match=r"seq_lens: holds 5, must be in 0\.\.4"):
            attn_decode(*decoding.decode(), 0.2, max_seq_len=4)
        with pytest.raises(ValueError, match=r"query_lens: holds 3"):
            attn_prefill(*inputs.prefill(), 0.2, max_query_len=2)
        inputs.seq_lens[0] = 1
        with pytest.raises(ValueError, match=r"seq_lens - query_lens: holds -1"):
            attn_prefill(*inputs.prefill(), 0.2, max_query_len=3)
