"""Feed-forward blocks that every token passes: of a dense layer, and a shared expert."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from moeserve.model.weights import WeightSource
from moeserve_kernels import Ops


@dataclass(frozen=True, kw_only=True, slots=True)
class MlpWeights:
    """w13: [2I, H], gate rows first, then up rows; w2: [H, I]."""

    w13: torch.Tensor
    w2: torch.Tensor

    @classmethod
    def read(cls, source: WeightSource, prefix: str, hidden_size: int, size: int) -> MlpWeights:
        """From tensors whose names begin with ``prefix``; ``size`` is I."""
        gate = source.take(f"{prefix}gate_proj.weight", (size, hidden_size))
        up = source.take(f"{prefix}up_proj.weight", (size, hidden_size))
        down = source.take(f"{prefix}down_proj.weight", (hidden_size, size))
        return cls(w13=torch.cat((gate, up)), w2=down)


class Mlp:
    """SwiGLU: ``w2 @ (silu(gate @ x) * (up @ x))``."""

    def __init__(self, weights: MlpWeights, ops: Ops) -> None:
        self._weights = weights
        self._ops = ops

    def __call__(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """[T, H] -> [T, H]."""
        hidden = self._ops.silu_mul(self._ops.linear(hidden_states, self._weights.w13))
        return self._ops.linear(hidden, self._weights.w2)


class SharedExpert:
    """An expert for every token, scaled by a gate of its own."""

    def __init__(self, weights: MlpWeights, gate: torch.Tensor, ops: Ops) -> None:
        """gate: [1, H]."""
        self._mlp = Mlp(weights, ops)
        self._gate = gate
        self._ops = ops

    def __call__(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """[T, H] -> [T, H]."""
        share = self._ops.sigmoid(self._ops.linear(hidden_states, self._gate))
        return share * self._mlp(hidden_states)
