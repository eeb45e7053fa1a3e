"""Root-mean-square norm on a CPU against the formula in float64, and bad arguments."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from moeserve_kernels.formulas import norm as formulas
from moeserve_kernels.operations.norm import add_rms_norm, rms_norm

from . import guards


@settings(max_examples=500)
@given(
    st.lists(st.integers(0, 5), max_size=3),
    st.integers(1, 70),
    st.sampled_from([torch.float32, torch.bfloat16, torch.float16, torch.float64]),
    st.sampled_from([1e-30, 1e-3, 1.0, 1e3]),
    st.integers(0, 1 << 31),
)
def test_norms_equal_the_formula(
    leading: list[int], width: int, dtype: torch.dtype, size: float, seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    x, residual = (
        (torch.randn(*leading, width, generator=generator) * size).to(dtype) for _ in range(2)
    )
    weight = torch.randn(width, generator=generator).to(dtype)
    out = rms_norm(x, weight, 1e-5)
    assert out.dtype == dtype
    guards.assert_close(out, formulas.rms_norm(x.double(), weight.double(), 1e-5))
    normed, total = add_rms_norm(x, residual, weight, 1e-5)
    guards.assert_same_bits(total, x + residual)
    guards.assert_same_bits(normed, rms_norm(total, weight, 1e-5))


def test_rows_cut_out_of_wider_ones() -> None:
    joint = torch.randn(6, 12, 32, generator=torch.Generator().manual_seed(0))
    part, weight = joint[:, 3:7], torch.ones(32)
    guards.assert_same_bits(rms_norm(part, weight, 1e-6), rms_norm(part.clone(), weight, 1e-6))


def test_weights_of_another_dtype() -> None:
    x = torch.randn(3, 8, generator=torch.Generator().manual_seed(0)).bfloat16()
    weight = torch.linspace(0, 1, 8)
    out = rms_norm(x, weight, 1e-6)
    assert out.dtype == torch.bfloat16
    guards.assert_close(out, formulas.rms_norm(x.double(), weight.double(), 1e-6))


def test_bad_arguments_are_named() -> None:
    x, weight = torch.zeros(2, 8), torch.zeros(8)
    with pytest.raises(ValueError, match="x: dtype is int64, must be float32"):
        rms_norm(x.long(), weight, 1e-6)
    with pytest.raises(ValueError, match=r"weight: shape is \[7\], must be \[8\]"):
        rms_norm(x, weight[1:], 1e-6)
    with pytest.raises(ValueError, match="eps = 0: must be over 0"):
        rms_norm(x, weight, 0)
    with pytest.raises(ValueError, match="x: stride of the last dimension is 2, must be 1"):
        rms_norm(torch.zeros(8, 2).T, weight, 1e-6)
    with pytest.raises(ValueError, match=r"x: shape is \[\], must be \[\.\.\., H\]"):
        rms_norm(torch.zeros(()), weight, 1e-6)
    with pytest.raises(ValueError, match=r"residual: shape is \[2, 7\], must be \[2, 8\]"):
        add_rms_norm(x, x[:, 1:], weight, 1e-6)
    with pytest.raises(ValueError, match="residual: dtype is float16, must be float32"):
        add_rms_norm(x, x.half(), weight, 1e-6)
