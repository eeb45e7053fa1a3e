"""The helpers that make wrong reads and writes of kernels show."""

from __future__ import annotations

import pytest
import torch

from . import guards

_DTYPES = [torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.int32, torch.int8, torch.uint8]


@pytest.mark.parametrize("dtype", _DTYPES)
@pytest.mark.parametrize("shape", [(), (3,), (4, 5), (2, 3, 4), (0, 4)])
def test_inside_nan_is_equal_and_surrounded(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    tensor = (torch.rand(shape) * 50).to(dtype)
    guarded = guards.inside_nan(tensor)
    assert guards.same_bits(guarded, tensor)
    assert guarded.stride() == tensor.stride()
    assert guarded.data_ptr() % 256 == 0
    around = guarded.as_strided((5,), (1,), guarded.storage_offset() + tensor.numel())
    before = guarded.as_strided((5,), (1,), guarded.storage_offset() - 5)
    for outside in (around.double(), before.double()):
        if dtype.is_floating_point:
            assert outside.isnan().all()
        else:
            assert (outside == guards.WILD_INT).all()


def test_inside_nan_keeps_strides_and_fills_the_gaps() -> None:
    tensor = torch.rand(6, 8)[:, :5].T
    guarded = guards.inside_nan(tensor)
    assert guarded.stride() == tensor.stride() == (1, 8)
    assert torch.equal(guarded, tensor)
    gap = guarded.as_strided((3,), (1,), guarded.storage_offset() + 5)
    assert gap.isnan().all()
    assert torch.equal(guards.inside_nan(torch.ones(1).expand(4)), torch.ones(4))


@pytest.mark.parametrize("dtype", _DTYPES)
def test_empty_tensors_are_poisoned_and_the_originals_come_back(dtype: torch.dtype) -> None:
    before = torch.empty, torch.empty_like, torch.Tensor.new_empty
    like = torch.zeros(4, 6, dtype=dtype).T
    with guards.poisoned_empty() as allocations:
        tensors = [
            torch.empty(6, 4, dtype=dtype),
            torch.empty((6, 4), dtype=dtype),
            torch.empty_like(like),
            like.new_empty(6, 4),
            like.new_empty((6, 4)),
        ]
        assert torch.empty(3, device="meta").is_meta
        assert torch.empty(0).shape == (0,)
    assert len(allocations.checked) == len(tensors)
    for tensor in tensors:
        assert tensor.dtype == dtype and tensor.shape == (6, 4)
        values = tensor.double()
        assert (values.isnan() if dtype.is_floating_point else values == guards.WILD_INT).all()
    assert tensors[2].stride() == like.stride()
    assert before == (torch.empty, torch.empty_like, torch.Tensor.new_empty)


@pytest.mark.parametrize(("offset", "where"), [(-1, "before"), (12, "after")])
def test_a_write_beside_a_tensor_is_reported(offset: int, where: str) -> None:
    message = rf"bytes {where} a tensor \[3, 4\].*test_guards.py"
    with pytest.raises(AssertionError, match=message), guards.poisoned_empty():
        tensor = torch.empty(3, 4)
        tensor.as_strided((1,), (1,), tensor.storage_offset() + offset).fill_(1.0)


def test_relative_error_sees_nan_and_takes_equal_infinities() -> None:
    ref = torch.tensor([3.0, 4.0])
    assert guards.relative_error(torch.tensor([3.0, 4.5]), ref) == pytest.approx(0.1)
    assert guards.relative_error(torch.tensor([3.0, torch.nan]), ref) == float("inf")
    infinite = torch.tensor([torch.inf, 1.0, torch.nan])
    assert guards.relative_error(infinite, infinite) == 0.0
    assert guards.relative_error(torch.zeros(2), torch.zeros(2)) == 0.0
    assert guards.relative_error(torch.ones(2), torch.zeros(2)) > 1
    with pytest.raises(AssertionError, match="shape"):
        guards.relative_error(torch.ones(2), torch.ones(2, 1))


def test_same_bits_counts_nan_and_signs_of_zero() -> None:
    x = torch.tensor([1.0, torch.nan, 0.0])
    assert guards.same_bits(x, x.clone())
    assert not guards.same_bits(x, torch.tensor([1.0, torch.nan, -0.0]))
    assert not guards.same_bits(x, x.double())
    assert guards.same_bits(torch.empty(0, 3), torch.empty(0, 3))
    with pytest.raises(AssertionError, match="1 of 2 values differ"):
        guards.assert_same_bits(torch.ones(2), torch.tensor([1.0, 2.0]))


def test_assert_close_takes_the_tolerance_of_the_dtype() -> None:
    ref = torch.ones(64, dtype=torch.float64)
    guards.assert_close(ref.bfloat16() * 1.001, ref)
    with pytest.raises(AssertionError, match=r"at most 1e-05 for torch.float32"):
        guards.assert_close(ref.float() * 1.004, ref)
