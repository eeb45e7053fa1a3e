"""Checks of arguments before anything is launched: a ValueError names the argument and its value.

Reading an id back from a GPU costs a synchronisation, so values are checked in debug mode only.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar

import torch

_debug: ContextVar[bool] = ContextVar("check values", default=False)


@contextmanager
def debug() -> Iterator[None]:
    """Within it operations also check the values of ids, lengths and block tables."""
    token = _debug.set(True)
    try:
        yield
    finally:
        _debug.reset(token)


def shape(name: str, tensor: torch.Tensor, expected: Sequence[int | str]) -> None:
    """Raises ValueError unless ``tensor`` has the sizes ``expected``; a str fits any size."""
    found = tuple(tensor.shape)
    fits = len(found) == len(expected) and all(
        isinstance(want, str) or have == want for have, want in zip(found, expected, strict=True)
    )
    if not fits:
        wanted = ", ".join(str(size) for size in expected)
        raise ValueError(f"{name}: shape is {list(found)}, must be [{wanted}]")


def dtype(name: str, tensor: torch.Tensor, *allowed: torch.dtype) -> None:
    """Raises ValueError unless the dtype of ``tensor`` is one of ``allowed``."""
    if tensor.dtype not in allowed:
        wanted = " or ".join(str(one).removeprefix("torch.") for one in allowed)
        found = str(tensor.dtype).removeprefix("torch.")
        raise ValueError(f"{name}: dtype is {found}, must be {wanted}")


def rows_contiguous(name: str, tensor: torch.Tensor) -> None:
    """Raises ValueError unless the last dimension has stride 1; the others may have any."""
    if tensor.numel() > 0 and tensor.shape[-1] > 1 and tensor.stride(-1) != 1:
        raise ValueError(
            f"{name}: stride of the last dimension is {tensor.stride(-1)}, must be 1 "
            "(call .contiguous())"
        )


def same_device(**tensors: torch.Tensor | None) -> None:
    """Raises ValueError unless all are on one device; None is skipped."""
    first: tuple[str, torch.device] | None = None
    for name, tensor in tensors.items():
        if tensor is None:
            continue
        if first is None:
            first = name, tensor.device
        elif tensor.device != first[1]:
            raise ValueError(f"{name}: is on {tensor.device}, must be on {first[1]} as {first[0]}")


def one_of(name: str, value: object, allowed: Sequence[object]) -> None:
    """Raises ValueError unless ``value`` is among ``allowed``."""
    if value not in allowed:
        raise ValueError(f"{name} = {value!r}: must be one of {', '.join(map(str, allowed))}")


def at_least(name: str, value: int, low: int) -> None:
    """Raises ValueError unless ``value >= low``."""
    if value < low:
        raise ValueError(f"{name} = {value}: must be at least {low}")


def in_debug_mode() -> bool:
    """Whether values are checked, for checks that must first compute what they look at."""
    return _debug.get()


def values(name: str, tensor: torch.Tensor, low: int, high: int) -> None:
    """In debug mode, raises ValueError unless all of ``tensor`` is in ``low .. high - 1``."""
    if not _debug.get() or tensor.numel() == 0:
        return
    least, most = int(tensor.min()), int(tensor.max())
    if least < low or most >= high:
        wrong = least if least < low else most
        raise ValueError(f"{name}: holds {wrong}, must be in {low}..{high - 1}")
