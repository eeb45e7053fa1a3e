"""The repair of Triton's interpreter itself."""

from __future__ import annotations

import pytest
import torch
import triton
import triton.language as tl
from triton.runtime import interpreter

from . import bf16_shim, shim_self_test


def test_all_operations_and_casts_equal_torch() -> None:
    assert shim_self_test.wrong_results() == []


def test_without_the_repair_the_self_test_finds_the_errors(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    builder = interpreter.InterpreterBuilder
    for name in ("binary_op", "create_dot", "cast_impl", "create_fp_to_fp"):
        patched = getattr(builder, name)
        original = next(
            cell.cell_contents
            for cell in patched.__closure__
            if getattr(cell.cell_contents, "__name__", "") == name
        )
        monkeypatch.setattr(builder, name, original)
    wrong = shim_self_test.wrong_results()
    assert {"add", "dot", "int to bf16", "float32 to bf16", "float32 to e4m3"} <= set(wrong)


def test_a_triton_without_the_private_names_is_refused_by_name(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delattr(interpreter.InterpreterBuilder, "create_fma")
    with pytest.raises(bf16_shim.ShimError, match=f"triton {triton.__version__}.*no create_fma"):
        bf16_shim.install.__wrapped__()


def test_a_reduction_of_bf16_is_refused() -> None:
    @triton.jit
    def total(x_ptr, out_ptr, SIZE: tl.constexpr):
        x = tl.load(x_ptr + tl.arange(0, SIZE))
        tl.store(out_ptr, tl.reduce(x, 0, tl.standard._sum_combine))

    with pytest.raises(Exception) as error:
        total[(1,)](torch.ones(16).bfloat16(), torch.empty(1), SIZE=16)
    assert "kernels reduce in float32" in str(error.value) + str(error.value.__cause__)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e4m3fn, torch.int8])
def test_descriptor_loads_give_the_same_values(dtype: torch.dtype) -> None:
    from triton.tools.tensor_descriptor import TensorDescriptor

    @triton.jit
    def product(x_desc, y_desc, out_ptr, M: tl.constexpr, K: tl.constexpr):
        x = x_desc.load([0, 0])
        y = y_desc.load([0, 0])
        index = tl.arange(0, M)[:, None] * M + tl.arange(0, M)[None, :]
        tl.store(out_ptr + index, tl.dot(x, y.T).to(tl.float32))

    generator = torch.Generator().manual_seed(1)
    x, y = ((torch.randn(16, 32, generator=generator) * 4).to(dtype) for _ in range(2))
    out = torch.empty(16, 16)
    descriptors = [TensorDescriptor(one, one.shape, one.stride(), [16, 32]) for one in (x, y)]
    product[(1,)](*descriptors, out, M=16, K=32)
    torch.testing.assert_close(out, x.float() @ y.float().T, rtol=1e-5, atol=1e-4)
