"""Root-mean-square norm on a CPU: float32 inside (float64 for float64), one rounding."""

from __future__ import annotations

import torch


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """See ``operations.norm.rms_norm``."""
    wide = torch.promote_types(x.dtype, torch.float32)
    rows = x.to(wide)
    factor = torch.rsqrt(rows.square().mean(-1, keepdim=True) + eps)
    return (rows * factor * weight.to(wide)).to(x.dtype)


def add_rms_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """See ``operations.norm.add_rms_norm``."""
    total = x + residual
    return rms_norm(total, weight, eps), total
