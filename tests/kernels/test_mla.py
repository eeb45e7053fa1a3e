"""Decode over latent caches on a CPU against the formula in float64, and bad arguments."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from moeserve_kernels import check
from moeserve_kernels.formulas import mla as formulas
from moeserve_kernels.operations.attention import attn_decode
from moeserve_kernels.operations.mla import mla_decode

from . import guards
from .attention_inputs import draw, exact


def latent(seq_lens: list[int], **sizes: Any) -> tuple[torch.Tensor, ...]:
    inputs = draw(seq_lens, kv_heads=1, d_v=1, **sizes)
    return inputs.query, inputs.key_cache[:, :, 0], inputs.block_table, inputs.seq_lens


@settings(max_examples=300)
@given(
    st.lists(st.integers(0, 40), max_size=5),
    st.integers(1, 6),
    st.integers(1, 30),
    st.integers(1, 9),
    st.integers(1, 17),
    st.sampled_from([torch.float32, torch.bfloat16, torch.float64]),
    st.integers(0, 1 << 31),
)
def test_mla_equals_the_formula(
    lengths: list[int],
    heads: int,
    value_dim: int,
    rotary: int,
    block_size: int,
    dtype: torch.dtype,
    seed: int,
) -> None:
    width = value_dim + rotary
    tensors = latent(lengths, heads=heads, d=width, block_size=block_size, dtype=dtype, seed=seed)
    options = {"value_dim": value_dim, "max_seq_len": max(lengths, default=0)}
    with check.debug():
        out = mla_decode(*tensors, 0.3, **options)
    assert out.dtype == dtype
    guards.assert_close(out, formulas.mla_decode(*exact(tensors), 0.3, **options))


def test_it_is_attention_with_one_kv_head_and_values_in_front_of_keys() -> None:
    query, cache, table, lengths = latent([30, 7], heads=4, d=48, dtype=torch.float64)
    values = cache[..., :32]
    expected = attn_decode(
        query, cache[:, :, None], values[:, :, None], table, lengths, 0.2, max_seq_len=30
    )
    out = mla_decode(query, cache, table, lengths, 0.2, value_dim=32, max_seq_len=30)
    guards.assert_close(out, expected)


@pytest.mark.parametrize(
    ("value_dim", "message"),
    [
        (0, r"value_dim = 0: must be in 1\.\.47"),
        (48, r"value_dim = 48: must be in 1\.\.47"),
    ],
)
def test_value_sizes_that_do_not_fit_are_named(value_dim: int, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        mla_decode(*latent([5], d=48), 0.2, value_dim=value_dim, max_seq_len=5)


def test_bad_arguments_are_named() -> None:
    query, cache, table, lengths = latent([5], d=48)
    options = {"value_dim": 32, "max_seq_len": 5}
    with pytest.raises(ValueError, match="latent_cache: dtype is float16, must be float32"):
        mla_decode(query, cache.half(), table, lengths, 0.2, **options)
    with pytest.raises(ValueError, match=r"latent_cache: shape is \[2, 16, 47\]"):
        mla_decode(query, cache[..., 1:], table, lengths, 0.2, **options)
    with pytest.raises(ValueError, match="seq_lens: dtype is int64, must be int32"):
        mla_decode(query, cache, table, lengths.long(), 0.2, **options)
    with pytest.raises(ValueError, match="num_splits = 0: must be at least 1"):
        mla_decode(query, cache, table, lengths, 0.2, **options, num_splits=0)
    wide = latent([5], d=300)
    with pytest.raises(ValueError, match="query: 268 rotary values, must be at most 128"):
        mla_decode(*wide, 0.2, **options)
    with check.debug(), pytest.raises(ValueError, match=r"seq_lens: holds 5, must be in 0\.\.4"):
        mla_decode(query, cache, table, lengths, 0.2, value_dim=32, max_seq_len=4)
