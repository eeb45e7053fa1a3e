"""Quantisation: the CPU implementation against the formula, and what it loses."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from moeserve_kernels.formulas import quant as formulas
from moeserve_kernels.operations.quant import dequantize_experts, quant_rows, quantize_experts
from moeserve_kernels.weights import FORMATS, ExpertWeights

_DTYPES = [torch.float8_e4m3fn, torch.int8]
# Largest errors relative to the norm, of normally distributed values: half a step is 1/32 of an
# fp8 value, about 1/70 of the scale's range in int8 rows, 1/5 of the deviation in int4 groups.
_LOSSES = {"plain": 0.0, "fp8_channel": 0.03, "fp8_block": 0.03, "int8": 0.01, "int4": 0.15}


def rows(num_tokens: int, width: int, seed: int, exponent: float) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(num_tokens, width, generator=generator).mul(10.0**exponent)


@settings(max_examples=400)
@given(st.data())
def test_quant_rows_equals_the_formula(data: st.DataObject) -> None:
    width = data.draw(st.integers(1, 70))
    x = rows(
        data.draw(st.integers(0, 4)),
        width,
        data.draw(st.integers(0, 2**31)),
        data.draw(st.sampled_from([-44, -38, -3, 0, 3, 30])),
    )
    x = x.to(data.draw(st.sampled_from([torch.float32, torch.bfloat16])))
    dtype = data.draw(st.sampled_from(_DTYPES))
    group_size = data.draw(st.sampled_from([None, 1, 7, 32, 128]))
    for token, value in enumerate(
        data.draw(st.lists(st.sampled_from([0.0, torch.nan, torch.inf])))
    ):
        if token < x.shape[0]:
            x[token, width // 2] = value
    q, scales = quant_rows(x, dtype=dtype, group_size=group_size)
    expected_q, expected_scales = formulas.quant_rows(x, dtype=dtype, group_size=group_size)
    assert q.dtype == dtype
    assert scales.dtype == torch.float32
    assert torch.equal(q.view(torch.uint8), expected_q.view(torch.uint8))
    torch.testing.assert_close(scales, expected_scales, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("dtype", _DTYPES)
@pytest.mark.parametrize("group_size", [None, 32])
def test_values_come_back_within_half_a_step(dtype: torch.dtype, group_size: int | None) -> None:
    x = rows(50, 96, 1, 0)
    q, scales = quant_rows(x, dtype=dtype, group_size=group_size)
    each = scales[:, None] if group_size is None else scales.repeat_interleave(32, 1)
    # An fp8 value has 4 significant bits; under 2^-6 its steps are 2^-9.
    step = each if dtype == torch.int8 else torch.maximum(x.abs() / 8, each * 2**-9)
    assert ((q.float() * each - x).abs() <= step / 2 * (1 + 1e-5)).all()


@pytest.mark.parametrize("dtype", _DTYPES)
def test_every_value_of_the_type_is_its_own_quantisation(dtype: torch.dtype) -> None:
    codes = torch.arange(256, dtype=torch.uint8).view(dtype).float()
    codes = codes[codes.isfinite() & (codes != -128)]
    x = codes[None, :] * torch.tensor([1.0, 2.0**-20, 2.0**40])[:, None]
    q, scales = quant_rows(x, dtype=dtype)
    assert torch.equal(q.float(), codes.expand(3, -1))
    assert scales.tolist() == [1.0, 2.0**-20, 2.0**40]


@pytest.mark.parametrize("dtype", _DTYPES)
def test_rows_of_zeros_stay_zero_and_broken_rows_stay_visible(dtype: torch.dtype) -> None:
    x = torch.ones(4, 8)
    x[0], x[1, 3], x[2, 3] = 0, torch.nan, -torch.inf
    q, scales = quant_rows(x, dtype=dtype)
    assert scales[0] > 0
    assert scales.isnan().tolist() == [False, True, True, False]
    assert not q[:3].float().any()
    assert (q[3].float() * scales[3]).tolist() == [1.0] * 8
    _, groups = quant_rows(x, dtype=dtype, group_size=4)
    assert groups.isnan().tolist() == [[False, False], [True, False], [True, False], [False] * 2]


def test_rows_may_have_a_stride() -> None:
    x = rows(6, 40, 3, 0)
    q, scales = quant_rows(x[::2, 5:25])
    expected = quant_rows(x[::2, 5:25].contiguous())
    assert torch.equal(q.view(torch.uint8), expected[0].view(torch.uint8))
    assert torch.equal(scales, expected[1])


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("shape", [(3, 200, 256), (2, 128, 384), (1, 5, 128), (0, 8, 128)])
def test_experts_come_back_as_the_formula_says(format: str, shape: tuple[int, int, int]) -> None:
    torch.manual_seed(0)
    weights, bias = torch.randn(shape), torch.randn(shape[:2])
    quantized = quantize_experts(weights, format, bias)
    assert (quantized.num_slots, quantized.num_outputs, quantized.num_inputs) == shape
    assert quantized.bias is bias
    found = dequantize_experts(quantized)
    expected = formulas.dequantize_experts(quantized, torch.float64)
    assert torch.equal(found, expected.float())
    assert dequantize_experts(quantized, torch.bfloat16).dtype == torch.bfloat16
    assert (found - weights).norm() <= _LOSSES[format] * weights.norm()


@pytest.mark.parametrize("format", ["fp8_channel", "fp8_block", "int8"])
def test_widths_that_are_no_multiple_of_a_group(format: str) -> None:
    weights = torch.randn(2, 130, 70)
    quantized = quantize_experts(weights, format)
    found = dequantize_experts(quantized)
    assert torch.equal(found, formulas.dequantize_experts(quantized, torch.float64).float())
    assert (found - weights).norm() <= _LOSSES[format] * weights.norm()


@pytest.mark.parametrize("format", FORMATS)
def test_what_came_back_is_quantised_to_the_same_bits(format: str) -> None:
    torch.manual_seed(1)
    first = quantize_experts(torch.randn(2, 256, 256), format)
    second = quantize_experts(dequantize_experts(first), format)
    assert torch.equal(first.data.view(torch.uint8), second.data.view(torch.uint8))


@pytest.mark.parametrize("format", FORMATS)
def test_experts_of_zeros_and_of_tiny_values(format: str) -> None:
    weights = torch.zeros(2, 128, 128)
    weights[1] = 1e-42  # less than a float32 can hold in full
    quantized = quantize_experts(weights, format)
    found = dequantize_experts(quantized)
    assert not found[0].any()
    assert found.isfinite().all()
    assert (found - weights).abs().max() <= 2.0**-126


def test_int4_packs_halves_of_a_group_side_by_side() -> None:
    values = torch.arange(-7, 8).repeat(18)[:256].float()
    values[:2] = torch.tensor([7.0, -7.0])
    quantized = quantize_experts(values.view(1, 1, 256), "int4")
    assert quantized.data.shape == (1, 1, 128)
    assert quantized.data.dtype == torch.uint8
    assert quantized.scales is not None
    assert quantized.scales.tolist() == [[[1.0, 1.0]]]
    low, high = quantized.data[0, 0] & 15, quantized.data[0, 0] >> 4
    assert torch.equal(low[:64].float() - 8, values[:64])
    assert torch.equal(high[:64].float() - 8, values[64:128])
    assert torch.equal(low[64:].float() - 8, values[128:192])
    assert torch.equal(high[64:].float() - 8, values[192:])


def test_a_wrong_argument_is_named() -> None:
    weights = torch.ones(1, 4, 130)
    with pytest.raises(ValueError, match="K = 130, must be a multiple of 128 for int4"):
        quantize_experts(weights, "int4")
    with pytest.raises(ValueError, match="format = 'int3'"):
        quantize_experts(weights, "int3")
    with pytest.raises(ValueError, match="weights: shape"):
        quantize_experts(weights[0], "int8")
    with pytest.raises(ValueError, match="bias: shape"):
        quantize_experts(weights, "int8", torch.ones(1, 5))
    weights[0, 1, 2] = torch.nan
    with pytest.raises(ValueError, match="slot 0 holds a NaN"):
        quantize_experts(weights, "int8")
    with pytest.raises(ValueError, match="scales: None"):
        dequantize_experts(ExpertWeights("int8", torch.ones(1, 4, 8, dtype=torch.int8)))
    with pytest.raises(ValueError, match="scales: shape"):
        data = torch.ones(1, 4, 8, dtype=torch.int8)
        dequantize_experts(ExpertWeights("int8", data, torch.ones(1, 5)))
    with pytest.raises(ValueError, match="x: dtype"):
        quant_rows(torch.ones(2, 2, dtype=torch.int32))
    with pytest.raises(ValueError, match="x: stride"):
        quant_rows(torch.ones(2, 4)[:, ::2])
    with pytest.raises(ValueError, match=r"dtype = torch\.uint8"):
        quant_rows(torch.ones(2, 2), dtype=torch.uint8)
    with pytest.raises(ValueError, match="group_size = 0"):
        quant_rows(torch.ones(2, 2), group_size=0)
