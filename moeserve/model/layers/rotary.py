"""Rotary position embedding: a table of cosines and sines by position."""

from __future__ import annotations

import math

import torch

from moeserve.model.rope_spec import RopeSpec

_ROWS = 64  # the table grows in such steps, so that its vectorised filling has no scalar tail


class Rotary:
    """Cosines and sines of every position that a model may see."""

    def __init__(self, rope: RopeSpec, head_dim: int, max_positions: int) -> None:
        frequencies, scale = inverse_frequencies(rope, head_dim)
        positions = torch.arange(-(-max_positions // _ROWS) * _ROWS, dtype=torch.float32)
        angles = positions[:, None] * frequencies
        self._cos = angles.cos() * scale
        self._sin = angles.sin() * scale

    def __call__(self, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """cos and sin, float32 [T, d / 2], of positions int64 [T]."""
        return self._cos[positions], self._sin[positions]


def inverse_frequencies(rope: RopeSpec, head_dim: int) -> tuple[torch.Tensor, float]:
    """Radians per position of each pair of dimensions, float32 [d / 2], and a factor of both
    cosine and sine (1 for all types but yarn)."""
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim
    frequencies = 1.0 / rope.rope_theta**exponents
    if rope.rope_type == "linear":
        return frequencies / rope.factor, 1.0
    if rope.rope_type == "llama3":
        return _llama3(frequencies, rope), 1.0
    if rope.rope_type == "yarn":
        return _yarn(frequencies, rope, head_dim), _yarn_scale(rope)
    return frequencies, 1.0


def _llama3(frequencies: torch.Tensor, rope: RopeSpec) -> torch.Tensor:
    """Long wavelengths are stretched by ``factor``, short ones kept, those between blended."""
    wavelengths = 2 * math.pi / frequencies
    turns = rope.original_max_position_embeddings / wavelengths
    span = rope.high_freq_factor - rope.low_freq_factor
    keep = ((turns - rope.low_freq_factor) / span).clamp(0, 1)
    return (1 - keep) * frequencies / rope.factor + keep * frequencies


def _yarn(frequencies: torch.Tensor, rope: RopeSpec, head_dim: int) -> torch.Tensor:
    """As llama3, blended linearly over the dimensions between two numbers of turns."""

    def dimension(turns: float) -> float:
        """The dimension that makes ``turns`` turns within the original context."""
        length = rope.original_max_position_embeddings / (turns * 2 * math.pi)
        return head_dim * math.log(length) / (2 * math.log(rope.rope_theta))

    low, high = dimension(rope.beta_fast), dimension(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    span = max(high - low, 0.001)
    stretch = ((torch.arange(head_dim // 2) - low) / span).clamp(0, 1)
    return stretch * frequencies / rope.factor + (1 - stretch) * frequencies


def _yarn_scale(rope: RopeSpec) -> float:
    if rope.attention_factor is not None:
        return rope.attention_factor

    def scale(weight: float) -> float:
        return 0.1 * weight * math.log(rope.factor) + 1.0 if rope.factor > 1 else 1.0

    if rope.mscale and rope.mscale_all_dim:
        return scale(rope.mscale) / scale(rope.mscale_all_dim)
    return scale(1.0)
