"""The norm kernel in the interpreter, against the formula in float64."""

from __future__ import annotations

import pytest
import torch

from moeserve_kernels import backend
from moeserve_kernels.formulas import norm as formulas
from moeserve_kernels.operations.norm import add_rms_norm, rms_norm

from .. import guards


def draw(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    generator = torch.Generator().manual_seed(sum(shape))
    return torch.randn(shape, generator=generator).to(dtype)


def check(x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float = 1e-6) -> None:
    x, residual, weight = (guards.inside_nan(one) for one in (x, residual, weight))
    results = []
    for _ in range(2):
        with backend.forced("triton-interpret"), guards.poisoned_empty():
            results.append((rms_norm(x, weight, eps), *add_rms_norm(x, residual, weight, eps)))
    for first, second in zip(*results, strict=True):
        guards.assert_same_bits(first, second)
    alone, normed, total = results[0]
    guards.assert_close(alone, formulas.rms_norm(x.double(), weight.double(), eps))
    guards.assert_same_bits(total, x + residual)
    guards.assert_close(normed, formulas.rms_norm(total.double(), weight.double(), eps))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", [(5, 64), (1, 1), (3, 2048), (2, 3, 100), (130,), (2, 2, 3, 8)])
def test_rows_of_any_shape(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    x = draw(*shape, dtype=dtype)
    check(x, x.flip(0) * 2, draw(shape[-1], dtype=dtype))


def test_rows_wider_than_a_tile_are_read_twice() -> None:
    check(draw(2, 9001), draw(2, 9001) + 1, draw(9001))


def test_heads_cut_out_of_a_joint_projection() -> None:
    joint = draw(6, 12, 32)
    check(joint[:, 2:9], joint[:, 5:12], draw(32))
    check(draw(8, 40)[::2, 5:37], draw(4, 32), draw(32))


def test_more_rows_than_a_program_takes() -> None:
    check(draw(40, 33, 8), draw(40, 33, 8) * 3, draw(8))


def test_the_norm_is_that_of_the_rounded_sum() -> None:
    x, residual, weight = (draw(7, 96, dtype=torch.bfloat16) for _ in range(3))
    with backend.forced("triton-interpret"):
        normed, total = add_rms_norm(x, residual * 0.3, weight[0], 1e-5)
        guards.assert_same_bits(normed, rms_norm(total, weight[0], 1e-5))


def test_without_rows_and_with_zeros() -> None:
    with backend.forced("triton-interpret"):
        assert rms_norm(draw(0, 16), draw(16), 1e-6).shape == (0, 16)
        assert not rms_norm(torch.zeros(2, 16), draw(16), 1e-6).any()
