"""One launch of a Triton kernel as data: it can be run, or compiled for a chip that is not here.

Whoever builds launches does it alike for both, so that what the compiler checks without a GPU is
what a GPU gets. A launch may be built from tensors on the ``meta`` device.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Launch:
    """A kernel, its grid and everything it is given.

    kernel: a ``triton.jit`` function. grid: up to three sizes; a zero in it launches nothing.
    args: run-time arguments by name: tensors, tensor descriptors, int, float, None.
    constants: ``tl.constexpr`` arguments by name. options: num_warps, num_stages and the like.

    Products and sums are fused unless ``options`` say otherwise: Triton's default is changing.
    """

    kernel: Any
    grid: tuple[int, ...]
    args: Mapping[str, Any]
    constants: Mapping[str, Any] = field(default_factory=dict)
    options: Mapping[str, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        object.__setattr__(self, "options", {"enable_fp_fusion": True, **self.options})

    def run(self) -> None:
        """Launches the kernel on the current stream; returns before it has run."""
        if 0 not in self.grid:
            self.kernel[self.grid](**self.args, **self.constants, **self.options)
