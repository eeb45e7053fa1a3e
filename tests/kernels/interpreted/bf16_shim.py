"""A repair of Triton's interpreter, for tests only: bfloat16 and fp8 as a GPU computes them.

The interpreter keeps bfloat16 as its bits in uint16 and fp8 in uint8, and then multiplies, adds and
compares those integers: results are wrong by ten orders of magnitude, without an error. Its casts
to bfloat16 truncate, those to fp8 round wrongly. Here such values are widened to float32, computed
and rounded to nearest even. Reductions and scans of bfloat16 are refused: kernels take float32.

All this replaces private methods, so ``install`` checks that they are there and what they compute,
and fails with a message that names the version of Triton.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import triton
import triton.language as tl
from triton.runtime import interpreter

_NAMES = {
    "InterpreterBuilder": (
        "binary_op",
        "unary_op",
        "cast_impl",
        "create_clampf",
        "create_dot",
        "create_fma",
        "create_fp_to_fp",
        "create_fp_trunc",
        "create_si_to_fp",
        "get_fp32",
    ),
    "ReduceOps": ("apply_impl",),
    "ScanOps": ("apply_impl",),
    "TensorHandle": (),
}
_FP8 = {"fp8e4nv": torch.float8_e4m3fn, "fp8e5": torch.float8_e5m2}


class ShimError(RuntimeError):
    """This Triton's interpreter is not the one that the repair was written for."""


@functools.cache
def install() -> None:
    """Repairs the interpreter of this process, once.

    Raises:
        ShimError: TRITON_INTERPRET was not set, names are missing, or results are wrong.
    """
    if not triton.knobs.runtime.interpret:
        raise ShimError("TRITON_INTERPRET=1 must be in the environment before triton is imported")
    for owner, names in _NAMES.items():
        cls = getattr(interpreter, owner, None)
        missing = [owner] if cls is None else [one for one in names if not hasattr(cls, one)]
        if missing:
            raise ShimError(_message(f"its interpreter has no {', '.join(missing)}"))
    _patch(interpreter.InterpreterBuilder)
    for cls in (interpreter.ReduceOps, interpreter.ScanOps):
        cls.apply_impl = _refuse_bf16(cls.apply_impl)
    from . import shim_self_test

    try:
        wrong = shim_self_test.wrong_results()
    except Exception as error:
        raise ShimError(_message(f"its interpreter fails: {error!r}")) from error
    if wrong:
        raise ShimError(_message(f"its interpreter computes wrongly: {', '.join(wrong)}"))


def _message(problem: str) -> str:
    return (
        f"the repair of Triton's interpreter does not fit triton {triton.__version__}: {problem}; "
        "adapt tests/kernels/interpreted/bf16_shim.py"
    )


def _patch(builder: Any) -> None:
    original = {name: getattr(builder, name) for name in _NAMES["InterpreterBuilder"]}
    builder.binary_op = _widened(original["binary_op"], num_operands=2)
    builder.unary_op = _widened(original["unary_op"], num_operands=1)
    builder.create_clampf = _widened(original["create_clampf"], num_operands=3)
    builder.create_fma = _widened(original["create_fma"], num_operands=3)
    builder.create_dot = _dot(original["create_dot"])
    builder.cast_impl = _cast(original["cast_impl"])
    builder.create_fp_to_fp = _fp_to_fp(original["create_fp_to_fp"])
    if not hasattr(builder, "get_bf16"):
        builder.get_bf16 = lambda self, value: _narrow(self.get_fp32(value).data)


def _widened(original: Callable[..., Any], num_operands: int) -> Callable[..., Any]:
    """An operation whose first operands are all bfloat16 is computed in float32."""

    def operation(self: Any, *args: Any) -> Any:
        operands, rest = args[:num_operands], args[num_operands:]
        if not all(_is_bf16(one) for one in operands):
            return original(self, *args)
        result = original(self, *map(_wide, operands), *rest)
        if result.data.dtype == np.bool_:
            return interpreter.TensorHandle(result.data, tl.int1)
        return _narrow(result.data)

    return operation


def _dot(original: Callable[..., Any]) -> Callable[..., Any]:
    def create_dot(self: Any, a: Any, b: Any, *rest: Any) -> Any:
        return original(self, _wide(a), _wide(b), *rest)

    return create_dot


def _cast(original: Callable[..., Any]) -> Callable[..., Any]:
    def cast_impl(self: Any, source: Any, dtype: Any) -> Any:
        if dtype.scalar == source.dtype.scalar and dtype.scalar == tl.bfloat16:
            return source
        if dtype.scalar == tl.bfloat16:
            return _narrow(np.asarray(_wide(source).data).astype(np.float32))
        if _is_bf16(source):
            wide = _wide(source)
            return wide if dtype.scalar == tl.float32 else original(self, wide, dtype)
        return original(self, source, dtype)

    return cast_impl


def _fp_to_fp(original: Callable[..., Any]) -> Callable[..., Any]:
    def create_fp_to_fp(self: Any, source: Any, dtype: Any, rounding: Any) -> Any:
        to_fp8, from_fp8 = dtype.scalar.name in _FP8, source.dtype.scalar.name in _FP8
        if not to_fp8 and not from_fp8:
            return original(self, source, dtype, rounding)
        wide = _wide(source)
        if to_fp8:
            return _to_fp8(wide.data.astype(np.float32), dtype.scalar)
        return wide if dtype.scalar == tl.float32 else self.cast_impl(wide, dtype)

    return create_fp_to_fp


def _refuse_bf16(original: Callable[..., Any]) -> Callable[..., Any]:
    def apply_impl(self: Any, tensors: Any) -> Any:
        if any(one.dtype.scalar == tl.bfloat16 for one in tensors):
            raise TypeError("a reduction or scan of bfloat16: kernels reduce in float32")
        return original(self, tensors)

    return apply_impl


def _is_bf16(handle: Any) -> bool:
    return handle.dtype.scalar == tl.bfloat16 and handle.data.dtype == np.uint16


def _wide(handle: Any) -> Any:
    """bfloat16 and fp8 handles as float32, others as they are."""
    name = handle.dtype.scalar.name
    if _is_bf16(handle):
        values = (np.asarray(handle.data).astype(np.uint32) << 16).view(np.float32)
        return interpreter.TensorHandle(values, tl.float32)
    if name in _FP8:
        return interpreter.TensorHandle(_fp8_values(name)[handle.data], tl.float32)
    return handle


def _narrow(values: np.ndarray) -> Any:
    """float32 values as a bfloat16 handle: to nearest, ties to even, NaN stays NaN."""
    values = np.ascontiguousarray(values, dtype=np.float32).reshape(np.shape(values))
    bits = values.view(np.uint32)
    rounded = ((bits + np.uint32(0x7FFF) + ((bits >> 16) & 1)) >> 16).astype(np.uint16)
    return interpreter.TensorHandle(
        np.where(np.isnan(values), np.uint16(0x7FC0), rounded), tl.bfloat16
    )


def _to_fp8(values: np.ndarray, dtype: Any) -> Any:
    """float32 values as an fp8 handle: to nearest, ties to even, held to the finite range."""
    fp8 = _FP8[dtype.name]
    most = torch.finfo(fp8).max
    # A copy: broadcast arrays are read-only, which torch does not take.
    data = torch.from_numpy(np.array(values)).clamp(-most, most).to(fp8)
    return interpreter.TensorHandle(data.view(torch.uint8).numpy(), dtype)


@functools.cache
def _fp8_values(name: str) -> np.ndarray:
    return torch.arange(256, dtype=torch.uint8).view(_FP8[name]).float().numpy()
