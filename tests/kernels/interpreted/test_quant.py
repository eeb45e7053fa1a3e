"""The kernel that quantises rows, in the interpreter, against the formula: bit for bit."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from moeserve_kernels import backend
from moeserve_kernels.device import quant as device
from moeserve_kernels.device.targets import INTERPRET
from moeserve_kernels.formulas import quant as formulas
from moeserve_kernels.operations.quant import quant_rows

from .. import guards

_DTYPES = [torch.float8_e4m3fn, torch.int8]


def run(
    x: torch.Tensor, dtype: torch.dtype, group_size: int | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Twice, between canaries; the bits must be equal."""
    x = guards.inside_nan(x)
    results = []
    for _ in range(2):
        with backend.forced("triton-interpret"), guards.poisoned_empty():
            results.append(quant_rows(x, dtype=dtype, group_size=group_size))
    for one, other in zip(*results, strict=True):
        guards.assert_same_bits(one, other)
    return results[0]


def check(x: torch.Tensor, dtype: torch.dtype, group_size: int | None) -> None:
    q, scales = run(x, dtype, group_size)
    expected_q, expected_scales = formulas.quant_rows(x, dtype=dtype, group_size=group_size)
    guards.assert_same_bits(q, expected_q)
    torch.testing.assert_close(scales, expected_scales, rtol=0, atol=0, equal_nan=True)


def draw(num_tokens: int, width: int) -> torch.Tensor:
    return torch.randn(num_tokens, width, generator=torch.Generator().manual_seed(width))


@pytest.mark.parametrize("dtype", _DTYPES)
@pytest.mark.parametrize("group_size", [None, 1, 48, 128])
@pytest.mark.parametrize("width", [1, 128, 300])
@pytest.mark.parametrize("x_dtype", [torch.float32, torch.bfloat16])
def test_quant_rows_equals_the_formula(
    dtype: torch.dtype, group_size: int | None, width: int, x_dtype: torch.dtype
) -> None:
    check(draw(7, width).to(x_dtype), dtype, group_size)


@pytest.mark.parametrize("dtype", _DTYPES)
@pytest.mark.parametrize("group_size", [None, 4500])
def test_rows_wider_than_a_tile_are_read_twice(dtype: torch.dtype, group_size: int | None) -> None:
    check(draw(3, 9001), dtype, group_size)


@pytest.mark.parametrize("dtype", _DTYPES)
@pytest.mark.parametrize("group_size", [None, 16])
def test_zeros_broken_and_extreme_rows(dtype: torch.dtype, group_size: int | None) -> None:
    x = draw(9, 40)
    x[0], x[1, 3], x[2, 39], x[3, 20] = 0, torch.nan, torch.inf, -torch.inf
    x[4:] *= torch.tensor([1e-44, 1e-37, 1e-3, 1e20, 7e37])[:, None]
    check(x, dtype, group_size)


def test_strides_and_no_tokens() -> None:
    check(draw(8, 90)[::2, 5:45], torch.int8, None)
    q, scales = run(torch.empty(0, 16), torch.int8, None)
    assert q.shape == (0, 16)
    assert scales.shape == (0,)


@pytest.mark.parametrize("dtype", _DTYPES)
def test_every_value_and_every_tie_between_two(dtype: torch.dtype) -> None:
    values = torch.arange(256, dtype=torch.uint8).view(dtype).double()
    values = values[values.isfinite() & (values != -128)].unique()
    ties = (values[1:] + values[:-1]) / 2
    near = torch.cat([values, ties, ties.float().nextafter(torch.tensor(torch.inf))])
    x = near[None, :].float()
    check(x, dtype, None)


def test_bits_and_conversion_round_alike() -> None:
    """On chips with fp8 the compiler's conversion is used, elsewhere whole numbers."""
    x = draw(4, 500) * torch.logspace(-3, 0, 500)
    results = []
    for target in (INTERPRET, replace(INTERPRET, kind="cuda")):
        q = torch.empty(4, 500, dtype=torch.float8_e4m3fn)
        scales = torch.empty(4, 1)
        launch = device.quant_rows_launch(x, q, scales, group_size=None, target=target)
        launch.run()
        results.append((launch.constants["ROUND"], q))
    assert [kind for kind, _ in results] == ["fp8_bits", "fp8"]
    guards.assert_same_bits(results[0][1], results[1][1])
