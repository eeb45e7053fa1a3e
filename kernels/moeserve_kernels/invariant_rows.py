"""Row-wise functions whose bits depend on the row alone: float32 in, float32 out."""

from __future__ import annotations

import torch
from torch.nn import functional

_LANES = 64  # elements; a multiple of every vector length that torch unrolls to


def sum_last(x: torch.Tensor) -> torch.Tensor:
    """Sum over the last dimension, kept with size 1, as a tree of elementwise additions."""
    while (width := x.shape[-1]) > 1:
        half = width // 2
        folded = x[..., :half] + x[..., half : 2 * half]
        x = folded if width % 2 == 0 else torch.cat((folded, x[..., -1:]), dim=-1)
    return x


def exp(x: torch.Tensor) -> torch.Tensor:
    """``exp(x)`` without a scalar tail."""
    flat = x.contiguous().flatten()
    padded = functional.pad(flat, (0, -flat.numel() % _LANES))
    return padded.exp()[: flat.numel()].view(x.shape)


def sigmoid(x: torch.Tensor) -> torch.Tensor:
    """``1 / (1 + exp(-x))``."""
    return 1.0 / (1.0 + exp(-x))


def softmax(x: torch.Tensor) -> torch.Tensor:
    """Softmax over the last dimension, in float32 whatever x is."""
    wide = x.float()
    if wide.numel() == 0:
        return wide
    powers = exp(wide - wide.amax(-1, keepdim=True))
    return powers / sum_last(powers)
