"""Writing the cache on a CPU against the formula, and bad arguments."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from moeserve_kernels import check
from moeserve_kernels.operations.kv_cache import kv_write

from . import guards
from .kv_cache_inputs import FP8, draw, expected


@st.composite
def sizes(draw_value: Any) -> dict[str, Any]:
    d = draw_value(st.integers(1, 20))
    dtype = draw_value(st.sampled_from([torch.float32, torch.bfloat16, torch.float64]))
    return {
        "d": d,
        "d_v": draw_value(st.integers(0, 20)),
        "rotated": 2 * draw_value(st.integers(0, d // 2)),
        "heads": draw_value(st.integers(0, 4)),
        "kv_heads": draw_value(st.integers(1, 3)),
        "tokens": draw_value(st.integers(0, 20)),
        "block_size": draw_value(st.integers(1, 17)),
        "dtype": dtype,
        "cache_dtype": draw_value(st.sampled_from([None, FP8])),
        "strided": draw_value(st.booleans()),
        "seed": draw_value(st.integers(0, 1 << 31)),
    }


@settings(max_examples=400)
@given(sizes())
def test_kv_write_equals_the_formula(drawn: dict[str, Any]) -> None:
    inputs, options = draw(**drawn)
    want_query, want_caches = expected(inputs, options)
    key, value, key_cache, value_cache, slots = inputs
    assert key is not None
    assert key_cache is not None
    assert slots is not None
    before = [one.clone() for one in (key, value, options.get("query")) if one is not None]
    with check.debug():
        query = kv_write(key, value, key_cache, value_cache, slots, **options)
    after = [one for one in (key, value, options.get("query")) if one is not None]
    for first, second in zip(before, after, strict=True):
        guards.assert_same_bits(first, second)
    for out, want in zip((query, key_cache, value_cache), (want_query, *want_caches), strict=True):
        assert (out is None) == (want is None)
        if out is not None and want is not None:
            # A rotated value beside a tie of fp8 may go to either side.
            tolerance = 5e-2 if out.dtype == FP8 else None
            guards.assert_close(
                out.double(), want.double(), tolerance or guards.TOLERANCES[out.dtype]
            )


def test_a_rotation_turns_pairs_by_the_angle() -> None:
    key = torch.tensor([1.0, 2.0, 0.0, 0.0, 7.0]).view(1, 1, 5)
    cache = torch.zeros(1, 1, 1, 5)
    angle = torch.tensor([[torch.pi / 2, torch.pi]])
    slots = torch.tensor([0])
    query = kv_write(key, None, cache, None, slots, cos=angle.cos(), sin=angle.sin(), query=key * 2)
    expected_key = torch.tensor([0.0, -2.0, 1.0, 0.0, 7.0])
    torch.testing.assert_close(cache.flatten(), expected_key, atol=1e-6, rtol=0)
    assert query is not None
    torch.testing.assert_close(query.flatten(), expected_key * 2, atol=1e-6, rtol=0)


def test_fp8_keeps_to_its_range() -> None:
    key = torch.tensor([1e6, -1e6, 3.0, torch.nan]).view(1, 1, 4)
    cache = torch.zeros(1, 1, 1, 4).to(FP8)
    kv_write(key, None, cache, None, torch.tensor([0]), k_scale=2.0)
    assert cache.float().flatten()[:3].tolist() == [448.0, -448.0, 1.5]
    assert cache.float().flatten()[3].isnan()


_GOOD: dict[str, Any] = {"d": 8, "d_v": 8, "rotated": 8, "heads": 4, "kv_heads": 2}
_HALF = torch.zeros(21, 4)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"value_cache": None}, "value, value_cache: one is None, must be both or none"),
        ({"sin": None}, "cos, sin: one is None, must be both or none"),
        ({"cos": None, "sin": None}, "query: is rotated, so cos and sin must be given"),
        ({"cos": _HALF.half()}, "cos: dtype is float16, must be float32"),
        ({"sin": _HALF[:, 1:]}, r"sin: shape is \[21, 3\], must be \[21, 4\]"),
        (
            {"cos": torch.zeros(21, 5), "sin": torch.zeros(21, 5)},
            r"cos: 5 angles, must be in 1\.\.4",
        ),
        ({"slot_mapping": torch.zeros(21).int()}, "slot_mapping: dtype is int32, must be int64"),
        ({"query": torch.zeros(21, 4, 6)}, r"query: shape is \[21, 4, 6\], must be"),
        ({"k_scale": 2.0}, "k_scale = 2.0: must be 1.0 unless"),
        ({"v_scale": -1.0}, "v_scale = -1.0: must be over 0"),
        ({"key_cache": torch.zeros(2, 4, 3, 8)}, r"key_cache: shape is \[2, 4, 3, 8\]"),
        ({"value_cache": torch.zeros(2, 4, 2, 8).half()}, "value_cache: dtype is float16"),
    ],
)
def test_bad_arguments_are_named(change: dict[str, Any], message: str) -> None:
    inputs, options = draw(**_GOOD)
    names = ("key", "value", "key_cache", "value_cache", "slot_mapping")
    arguments = dict(zip(names, inputs, strict=True)) | options | change
    with pytest.raises(ValueError, match=message):
        kv_write(**arguments)


def test_slots_are_checked_in_debug_mode() -> None:
    inputs, options = draw(**_GOOD)
    slots = inputs[4]
    assert slots is not None
    slots[0] = 48
    with check.debug(), pytest.raises(ValueError, match=r"slot_mapping: holds 48, must be in"):
        kv_write(*inputs, **options)  # type: ignore[arg-type]
