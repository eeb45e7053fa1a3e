"""What this GPU reaches: a copy's bandwidth and the rate of large bfloat16 products."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch

from moeserve_kernels.floors import Limits
from moeserve_kernels.gpucheck.measure import time_calls


def measure(device: torch.device, *, dry: bool) -> Limits:
    """Both limits of ``device``."""
    return Limits(_bandwidth(device, dry), _rate(device, dry))


def _bandwidth(device: torch.device, dry: bool) -> float:
    """Bytes a second, read and written, of copies between buffers far larger than any L2."""
    num_bytes = 1 << 16 if dry else 1 << 31
    source = torch.zeros(num_bytes, dtype=torch.uint8, device=device)
    target = torch.zeros_like(source)
    copies: list[Callable[[], object]] = [partial(target.copy_, source)]
    return 2 * num_bytes / (time_calls(copies, seconds=0.5).microseconds * 1e-6)


def _rate(device: torch.device, dry: bool) -> float:
    """Operations a second of bfloat16 products; of several sizes the best."""
    best = 0.0
    for size in (64,) if dry else (4096, 8192):
        left, right = (torch.randn(size, size, device=device).to(torch.bfloat16) for _ in range(2))
        products: list[Callable[[], object]] = [partial(torch.mm, left, right)]
        seconds = time_calls(products, seconds=0.5).microseconds * 1e-6
        best = max(best, 2 * size**3 / seconds)
    return best
