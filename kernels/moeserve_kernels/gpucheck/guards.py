"""What makes a kernel's wrong reads and writes show: NaN around inputs, canaries around outputs.

Neither a GPU nor Triton's interpreter checks bounds: a read past the end returns whatever is there.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch

# Read by mistake and used as an id, this is out of range in a small test, yet the address it leads
# to is nearly always in somebody's NaN padding, so the test fails and the process lives.
WILD_INT = 101
_TINY = 1e-30
TOLERANCES = {torch.float64: 1e-12, torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 6e-3}
_CANARY = 0xA5
_ALIGNMENT = 256  # bytes; as torch's allocator on a GPU
_MIN_PADDING, _MAX_PADDING = 4096, 1 << 20  # bytes on each side


def inside_nan(tensor: torch.Tensor) -> torch.Tensor:
    """An equal tensor, of the same strides, in the middle of a buffer full of NaN.

    Integer buffers are full of ``WILD_INT``. The start is aligned to 256 bytes.
    """
    strides = _strides(tensor)
    itemsize = tensor.element_size()
    row = strides[0] if strides else 1
    padding = min(max((WILD_INT + 27) * row * itemsize, _MIN_PADDING), _MAX_PADDING)
    guarded = _in_buffer(tensor, strides, padding, _fill_poison)[1]
    guarded.copy_(tensor)
    return guarded


@dataclass
class Allocations:
    """What was allocated within ``poisoned_empty``."""

    checked: list[tuple[torch.Tensor, torch.Tensor, str]] = field(default_factory=list)

    def check(self) -> None:
        """Raises AssertionError when a byte beside one of the tensors was written."""
        for buffer, tensor, place in self.checked:
            start = tensor.storage_offset() * tensor.element_size()
            end = start + _span(tensor.shape, tensor.stride()) * tensor.element_size()
            for name, canary in (("before", buffer[:start]), ("after", buffer[end:])):
                wrong = (canary != _CANARY).nonzero()
                if wrong.numel() > 0:
                    first = int(wrong[-1]) - start if name == "before" else int(wrong[0])
                    raise AssertionError(
                        f"wrote {wrong.numel()} bytes {name} a tensor {list(tensor.shape)} of "
                        f"{tensor.dtype}, nearest at byte {first}; allocated at {place}"
                    )


@contextmanager
def poisoned_empty() -> Iterator[Allocations]:
    """Within it ``torch.empty``, ``empty_like`` and ``Tensor.new_empty`` give NaN between canaries.

    On exit raises AssertionError when a canary was overwritten. Tensors on the meta device, and
    those without elements, are left alone.
    """
    allocations = Allocations()
    original = torch.empty, torch.empty_like, torch.Tensor.new_empty
    torch.empty = _poisoning(original[0], allocations)
    torch.empty_like = _poisoning(original[1], allocations)
    torch.Tensor.new_empty = _poisoning(original[2], allocations)  # type: ignore[method-assign]
    try:
        yield allocations
    finally:
        torch.empty, torch.empty_like = original[:2]
        torch.Tensor.new_empty = original[2]  # type: ignore[method-assign]
    allocations.check()


def relative_error(out: torch.Tensor, ref: torch.Tensor) -> float:
    """``||out - ref|| / ||ref||`` in float64; infinite where only one has a NaN.

    Near the smallest normal float32 numbers lose digits, so a reference counts as 1e-30 at least.
    """
    assert out.shape == ref.shape, f"shape {list(out.shape)}, reference {list(ref.shape)}"
    out, ref = out.double().cpu(), ref.double().cpu()
    same = (out == ref) | (out.isnan() & ref.isnan())  # infinities, too
    difference = torch.where(same, 0.0, out - ref)
    if not bool(difference.isfinite().all()):
        return float("inf")
    norm = float(torch.where(ref.isfinite(), ref, 0.0).norm())
    return float(difference.norm()) / max(norm, _TINY)


def assert_close(out: torch.Tensor, ref: torch.Tensor, tolerance: float | None = None) -> None:
    """Raises AssertionError when the relative error is above what the dtype of ``out`` allows."""
    limit = TOLERANCES[out.dtype] if tolerance is None else tolerance
    error = relative_error(out, ref)
    assert error <= limit, f"relative error {error:.3g}, at most {limit:.3g} for {out.dtype}"


def same_bits(first: torch.Tensor, second: torch.Tensor) -> bool:
    """Whether dtype, shape and every bit are equal; NaNs and signs of zero count."""
    if first.dtype != second.dtype or first.shape != second.shape:
        return False
    first, second = first.detach().contiguous(), second.detach().contiguous()
    return torch.equal(first.flatten().view(torch.uint8), second.flatten().view(torch.uint8))


def assert_same_bits(first: torch.Tensor, second: torch.Tensor) -> None:
    """Raises AssertionError, with the number of differences, unless ``same_bits``."""
    if not same_bits(first, second):
        assert first.dtype == second.dtype, f"{first.dtype} and {second.dtype}"
        assert first.shape == second.shape, f"{list(first.shape)} and {list(second.shape)}"
        different = int((first.double() != second.double()).sum())
        raise AssertionError(f"{different} of {first.numel()} values differ")


def _poisoning(original: Callable[..., torch.Tensor], allocations: Allocations) -> Any:
    def allocate(*args: Any, **kwargs: Any) -> torch.Tensor:
        plain = original(*args, **kwargs)  # for its shape, strides, dtype and device
        if plain.numel() == 0 or plain.is_meta or plain.layout != torch.strided:
            return plain
        buffer, tensor = _in_buffer(plain, plain.stride(), _MIN_PADDING, _fill_canary)
        _fill_poison(tensor)
        frame = traceback.extract_stack(limit=2)[0]
        allocations.checked.append((buffer, tensor, f"{frame.filename}:{frame.lineno}"))
        return tensor

    return allocate


def _in_buffer(
    like: torch.Tensor,
    strides: tuple[int, ...],
    padding: int,
    fill: Callable[[torch.Tensor], None],
) -> tuple[torch.Tensor, torch.Tensor]:
    """A filled buffer of bytes and, in its middle, room for ``like``; both share memory."""
    padding = -(-padding // _ALIGNMENT) * _ALIGNMENT
    itemsize = like.element_size()
    room = _span(like.shape, strides) * itemsize
    size = room + 2 * padding + _ALIGNMENT
    # zeros, not empty: empty may be the patched one
    buffer = torch.zeros(-(-size // 16) * 16, dtype=torch.uint8, device=like.device)
    start = padding + (-(buffer.data_ptr() + padding)) % _ALIGNMENT
    typed = buffer.view(like.dtype)
    fill(typed)
    return buffer, typed.as_strided(like.shape, strides, start // itemsize)


def _strides(tensor: torch.Tensor) -> tuple[int, ...]:
    """The tensor's strides, or those of a contiguous one where elements share memory."""
    if any(
        size > 1 and stride == 0 for size, stride in zip(tensor.shape, tensor.stride(), strict=True)
    ):
        return torch.zeros(tensor.shape, device="meta").stride()
    return tensor.stride()


def _span(shape: tuple[int, ...], strides: tuple[int, ...]) -> int:
    """Elements from the first to the last one of a tensor."""
    if 0 in shape:
        return 0
    return 1 + sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True))


def _fill_poison(tensor: torch.Tensor) -> None:
    if tensor.dtype == torch.bool:
        tensor.fill_(True)
    elif not tensor.dtype.is_floating_point:
        tensor.fill_(WILD_INT)
    else:
        tensor.copy_(torch.full((), torch.nan, device=tensor.device).to(tensor.dtype))


def _fill_canary(tensor: torch.Tensor) -> None:
    tensor.view(torch.uint8).fill_(_CANARY)
