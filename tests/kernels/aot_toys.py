"""Run by test_aot.py in a process that compiles: kernels that breach what the checks look for.

Prints one JSON object: name of a toy -> its figures and problems.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from moeserve_kernels.aot.cases import Case
from moeserve_kernels.aot.checks import problems
from moeserve_kernels.aot.compiling import Compiled, compile_case
from moeserve_kernels.aot.pool import Pool
from moeserve_kernels.device.launch import Launch


@triton.jit
def product(x_ptr, y_ptr, out_ptr, K, M: tl.constexpr, N: tl.constexpr, BLOCK_K: tl.constexpr):
    """One program: out [M, N] = x [M, K] @ y [N, K].T."""
    m, n, k = tl.arange(0, M), tl.arange(0, N), tl.arange(0, BLOCK_K)
    total = tl.zeros((M, N), tl.float32)
    for start in range(0, K, BLOCK_K):
        x = tl.load(x_ptr + m[:, None] * K + start + k[None, :])
        y = tl.load(y_ptr + n[:, None] * K + start + k[None, :])
        total = tl.dot(x, y.T, total)
    tl.store(out_ptr + m[:, None] * N + n[None, :], total.to(out_ptr.dtype.element_ty))


@triton.jit
def product_tma(x_desc, y_desc, out_ptr, K, M: tl.constexpr, N: tl.constexpr, BK: tl.constexpr):
    """As above, x and y through tensor descriptors."""
    total = tl.zeros((M, N), tl.float32)
    for start in range(0, K, BK):
        total = tl.dot(x_desc.load([0, start]), y_desc.load([0, start]).T, total)
    out = out_ptr + tl.arange(0, M)[:, None] * N + tl.arange(0, N)[None, :]
    tl.store(out, total.to(out_ptr.dtype.element_ty))


@triton.jit
def copy(x_ptr, out_ptr, SIZE: tl.constexpr):
    """One program copies SIZE elements."""
    index = tl.arange(0, SIZE)
    tl.store(out_ptr + index, tl.load(x_ptr + index))


def _meta(*shape: int) -> torch.Tensor:
    return torch.empty(shape, dtype=torch.bfloat16, device="meta")


def _product(m: int, n: int, block_k: int, **options: int) -> Launch:
    k = 1024
    x, y, out = (_meta(*shape) for shape in ((m, k), (n, k), (m, n)))
    args = {"x_ptr": x, "y_ptr": y, "out_ptr": out, "K": k}
    return Launch(product, (1,), args, {"M": m, "N": n, "BLOCK_K": block_k}, options)


def _product_tma() -> Launch:
    x, out = _meta(64, 1024), _meta(64, 64)
    descriptor = TensorDescriptor(x, list(x.shape), list(x.stride()), [64, 64])
    args = {"x_desc": descriptor, "y_desc": descriptor, "out_ptr": out, "K": 1024}
    return Launch(product_tma, (1,), args, {"M": 64, "N": 64, "BK": 64}, {"num_warps": 4})


def cases() -> Iterator[Case]:
    """Each toy, named for what is to be seen."""
    both = {"x_ptr": _meta(64), "out_ptr": _meta(64)}
    size = {"SIZE": 64}
    yield Case("sm_90", "moe", "good", _product(64, 64, 64, num_warps=4, num_stages=3))
    yield Case("gfx942", "moe", "good", _product(32, 32, 64, num_warps=4, num_stages=2))
    yield Case("sm_90", "moe", "tma", _product_tma())
    yield Case("sm_90", "moe", "few rows", _product(16, 64, 64, num_warps=4))
    yield Case("sm_90", "attention", "few rows", _product(16, 64, 64, num_warps=4))
    yield Case("sm_80", "moe", "spills", _product(64, 256, 32, num_warps=1, num_stages=1))
    yield Case("gfx942", "moe", "shared", _product(128, 128, 256, num_warps=8, num_stages=2))
    yield Case("sm_80", "norm", "copy", Launch(copy, (1,), both, size))
    yield Case("sm_90", "norm", "option", Launch(copy, (1,), both, size, {"waves_per_eu": 2}))
    yield Case("sm_90", "norm", "argument", Launch(copy, (1,), {"x_ptr": both["x_ptr"]}, size))


def main() -> None:
    """Compiles all and prints what was found."""
    pool = Pool(
        compile_case, lambda case, why: Compiled(case.target, case.family, case.label, error=why), 2
    )
    results = pool.run(list(cases()), lambda _: None)
    table = {"sm_80": {"copy": 1}, "sm_90": {"good": 400}}
    found = {
        f"{one.target} {one.family} {one.label}": asdict(one) | {"problems": problems(one, table)}
        for one in results
    }
    print(json.dumps(found))


if __name__ == "__main__":
    main()
