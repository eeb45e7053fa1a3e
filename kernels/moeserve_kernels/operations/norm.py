"""Root-mean-square norm of hidden states, alone or after the sum with a residual."""

from __future__ import annotations

import torch

from moeserve_kernels import backend, check

_FLOATS = (torch.float32, torch.float16, torch.bfloat16, torch.float64)


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Return ``x / sqrt(mean(x^2) + eps) * weight`` over the last dimension, like x, contiguous.

    x: [..., H], float32, float16 or bfloat16; rows with any stride, so the heads of a joint
        projection need no copy. weight: [H], any float dtype. eps: over 0.
    Computed in float32, rounded once. float64 on a CPU only.

    Raises ValueError for a wrong shape or dtype.

    Source: Zhang and Sennrich, "Root Mean Square Layer Normalization" (arXiv 1910.07467).
    """
    _check(x, weight, eps)
    result: torch.Tensor = backend.implementation("norm", x).rms_norm(x, weight, eps)
    return result


def add_rms_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return ``(normed, x + residual)``, the first being ``rms_norm`` of the second.

    residual: as x. The rest as in ``rms_norm``. The sum is rounded before the norm, so that both
    results are those of the two operations one after the other.

    Raises ValueError for a wrong shape or dtype.
    """
    _check(x, weight, eps)
    check.shape("residual", residual, x.shape)
    check.dtype("residual", residual, x.dtype)
    check.rows_contiguous("residual", residual)
    check.same_device(x=x, residual=residual)
    result: tuple[torch.Tensor, torch.Tensor] = backend.implementation("norm", x).add_rms_norm(
        x, residual, weight, eps
    )
    return result


def _check(x: torch.Tensor, weight: torch.Tensor, eps: float) -> None:
    check.dtype("x", x, *_FLOATS)
    if x.dim() == 0:
        raise ValueError("x: shape is [], must be [..., H]")
    check.rows_contiguous("x", x)
    check.dtype("weight", weight, *_FLOATS)
    check.shape("weight", weight, (x.shape[-1],))
    check.rows_contiguous("weight", weight)
    check.same_device(x=x, weight=weight)
    if not eps > 0:
        raise ValueError(f"eps = {eps}: must be over 0")
