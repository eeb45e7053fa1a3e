"""Root-mean-square norm."""

from __future__ import annotations

import torch


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """See ``operations.norm.rms_norm``."""
    return x / torch.sqrt(x.pow(2).mean(-1, keepdim=True) + eps) * weight


def add_rms_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """See ``operations.norm.add_rms_norm``."""
    return rms_norm(x + residual, weight, eps), x + residual
