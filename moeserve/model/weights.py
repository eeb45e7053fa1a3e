"""Where a model takes its weights from, and what it asks for.

A model asks for each tensor by checkpoint name and shape. The same code thus says what it needs
(asked of a ``Manifest``), reads a checkpoint, or runs on random numbers.
"""

from __future__ import annotations

from typing import Protocol

import torch

from moeserve.model.architecture import ExpertNames
from moeserve.model.spec import ModelSpec

Shape = tuple[int, ...]


class WeightSource(Protocol):
    """Hands out tensors in the compute dtype, each its own memory."""

    def take(self, name: str, shape: Shape) -> torch.Tensor:
        """The tensor called ``name`` in the checkpoint."""
        ...

    def has(self, name: str) -> bool:
        """Whether the checkpoint holds such a tensor."""
        ...


def layer_prefix(layer: int) -> str:
    """What the names of all tensors of a layer begin with."""
    return f"model.layers.{layer}."


def moe_block(source: WeightSource, names: ExpertNames, layer: int) -> str:
    """Prefix of the layer's MoE block: by the architecture's own name, or ``mlp`` as in memory."""
    prefix = layer_prefix(layer)
    is_renamed = source.has(f"{prefix}mlp.gate.weight")
    return f"{prefix}{'mlp' if is_renamed else names.block}."


class Manifest:
    """A source that hands out no bytes and notes what was asked for.

    required: shape by name. ``present`` are the names that the checkpoint holds.
    """

    def __init__(self, present: frozenset[str]) -> None:
        self.required: dict[str, Shape] = {}
        self._present = present

    def take(self, name: str, shape: Shape) -> torch.Tensor:
        """A tensor without memory (device ``meta``)."""
        self.required[name] = shape
        return torch.empty(shape, device="meta")

    def has(self, name: str) -> bool:
        """Whether the checkpoint holds such a tensor."""
        return name in self._present


def expert_requirements(
    source: WeightSource, spec: ModelSpec, names: ExpertNames
) -> dict[str, Shape]:
    """Shape by name of all expert tensors, in the layout that the checkpoint has."""
    num, hidden, size = spec.num_experts, spec.hidden_size, spec.moe_intermediate_size
    required: dict[str, Shape] = {}
    for layer in spec.moe_layers:
        prefix = f"{moe_block(source, names, layer)}experts."
        if source.has(f"{prefix}gate_up_proj"):
            required[f"{prefix}gate_up_proj"] = (num, 2 * size, hidden)
            required[f"{prefix}down_proj"] = (num, hidden, size)
            continue
        for expert in range(num):
            required[f"{prefix}{expert}.{names.gate}.weight"] = (size, hidden)
            required[f"{prefix}{expert}.{names.up}.weight"] = (size, hidden)
            required[f"{prefix}{expert}.{names.down}.weight"] = (hidden, size)
    return required
