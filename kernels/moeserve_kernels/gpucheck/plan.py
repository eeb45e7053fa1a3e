"""What an item of work is, and what it is given."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from moeserve_kernels.floors import H200, Limits
from moeserve_kernels.gpucheck.report import Report


@dataclass(frozen=True)
class Context:
    """What an item needs to run.

    limits: of this device, as measured. dry: tiny sizes on a CPU. seed: of random inputs.
    """

    device: torch.device
    dry: bool
    seed: int
    report: Report
    limits: Limits = H200

    @property
    def dtype(self) -> torch.dtype:
        """Of activations: float32 in the interpreter, which has no bfloat16 of its own."""
        return torch.float32 if self.dry else torch.bfloat16


@dataclass(frozen=True)
class Item:
    """One piece of work that can fail, be skipped or be repeated on its own.

    seconds: about how long it takes, so that none is begun that has no time to end.
    """

    kind: str
    name: str
    seconds: float
    run: Callable[[Context], None]
