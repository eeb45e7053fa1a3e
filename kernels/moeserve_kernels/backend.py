"""Which implementation of an operation runs: one rule, and a way to force another in a test.

Tensors on the CPU take ``host`` (torch), tensors on a GPU ``device`` (Triton). ``forced`` names
another: ``reference`` are the formulas, ``triton-interpret`` the Triton kernels on CPU tensors in
Triton's interpreter, which is slow and needs TRITON_INTERPRET=1 before triton is imported.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch

BACKENDS = ("cpu", "triton", "triton-interpret", "reference")

_PACKAGES = {"cpu": "host", "triton": "device", "triton-interpret": "device"}
_forced: ContextVar[str | None] = ContextVar("forced backend", default=None)


@contextmanager
def forced(backend: str) -> Iterator[None]:
    """Within it every operation runs on ``backend``, one of ``BACKENDS``.

    Raises:
        ValueError: no such backend, or the interpreter is not on.
    """
    if backend not in BACKENDS:
        raise ValueError(f"backend = {backend!r}: must be one of {', '.join(BACKENDS)}")
    if backend == "triton-interpret" and not interprets():
        raise ValueError(
            "backend = 'triton-interpret': needs TRITON_INTERPRET=1 in the environment before "
            "triton is imported"
        )
    token = _forced.set(backend)
    try:
        yield
    finally:
        _forced.reset(token)


def interprets() -> bool:
    """Whether Triton runs its kernels in the interpreter in this process."""
    try:
        from triton import knobs
    except ImportError:
        return False
    return bool(knobs.runtime.interpret)


def choose(tensor: torch.Tensor) -> str:
    """The backend that an operation on ``tensor`` takes, one of ``BACKENDS``.

    Raises:
        ValueError: there is none for the tensor's device.
    """
    backend = _forced.get()
    device = tensor.device.type
    if backend is None:
        if device not in ("cpu", "cuda"):
            raise ValueError(f"tensors on {device!r}: must be on the CPU or a GPU ('cuda')")
        return "cpu" if device == "cpu" else "triton"
    needed = "cuda" if backend == "triton" else "cpu"
    if backend != "reference" and device != needed:
        raise ValueError(f"backend = {backend!r}: tensors are on {device!r}, must be on {needed!r}")
    return backend


def implementation(family: str, tensor: torch.Tensor) -> Any:
    """The module with the family's functions (``moe``, ``attention``...) for ``tensor``."""
    package = _PACKAGES.get(choose(tensor), "formulas")
    return importlib.import_module(f"moeserve_kernels.{package}.{family}")
