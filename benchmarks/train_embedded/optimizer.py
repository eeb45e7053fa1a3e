"""Muon for the matrices and AdamW for the rest, over parameters in one flat shared buffer.

Each process owns some of the parameters: it keeps their float32 masters and moments, adds up
the gradients of all processes, and writes the new values where all processes read them.
"""

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from .model import ModelShape

MUON_LEAVES = ("qkv", "out", "gate_up", "down")
MUON_MOMENTUM = 0.95
ADAM_BETAS = (0.9, 0.95)
ALIGNMENT = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class ParameterSlot:
    """Where a parameter lies in the flat buffers."""

    name: str
    shape: torch.Size
    offset: int

    @property
    def leaf(self) -> str:
        """The last part of the name."""
        return self.name.rsplit(".", 1)[-1]

    def view(self, buffer: Tensor) -> Tensor:
        """Return the parameter's part of a flat buffer."""
        return buffer[self.offset : self.offset + self.shape.numel()].view(self.shape)


def plan_slots(model: nn.Module) -> tuple[list[ParameterSlot], int]:
    """Return the slots of all parameters and the length of a flat buffer."""
    slots, offset = [], 0
    for name, parameter in model.named_parameters():
        slots.append(ParameterSlot(name=name, shape=parameter.shape, offset=offset))
        offset += -(-parameter.numel() // ALIGNMENT) * ALIGNMENT
    return slots, offset


def own_slots(slots: list[ParameterSlot], *, rank: int, world_size: int) -> list[ParameterSlot]:
    """Return the slots a process updates: largest first, each to the least loaded process."""
    loads, owned = [0] * world_size, []
    for slot in sorted(slots, key=lambda slot: -slot.shape.numel()):
        owner = loads.index(min(loads))
        loads[owner] += slot.shape.numel()
        if owner == rank:
            owned.append(slot)
    return owned


def orthogonalize(matrices: Tensor, *, num_steps: int = 5) -> Tensor:
    """Return [batch, rows, columns] with singular values near one (Newton-Schulz, quintic)."""
    is_tall = matrices.shape[-2] > matrices.shape[-1]
    x = matrices.transpose(-1, -2).contiguous() if is_tall else matrices
    x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    for _ in range(num_steps):
        gram = torch.bmm(x, x.transpose(1, 2))
        poly = torch.baddbmm(gram, gram, gram, beta=-4.7750, alpha=2.0315)
        x = torch.baddbmm(x, poly, x, beta=3.4445)
    return x.transpose(-1, -2) if is_tall else x


class MuonAdamW:
    """The optimizer of one process for the slots it owns."""

    def __init__(
        self,
        slots: list[ParameterSlot],
        parameters: Tensor,
        *,
        shape: ModelShape,
        muon_lr: float,
        adam_lr: float,
        weight_decay: float,
    ) -> None:
        self.slots, self.parameters, self.shape = slots, parameters, shape
        self.muon_lr, self.adam_lr, self.weight_decay = muon_lr, adam_lr, weight_decay
        self.num_steps = 0
        self.masters = {slot.name: slot.view(parameters).float().clone() for slot in slots}
        self.first = {slot.name: torch.zeros(slot.shape) for slot in slots}
        adam_slots = [slot for slot in slots if slot.leaf not in MUON_LEAVES]
        self.second = {slot.name: torch.zeros(slot.shape) for slot in adam_slots}

    def step(self, gradients: list[Tensor], lr_factor: float) -> None:
        """Update all owned parameters with the mean of the processes' gradients."""
        self.num_steps += 1
        for slot in self.slots:
            gradient = slot.view(gradients[0]).float().clone()
            for other in gradients[1:]:
                gradient += slot.view(other)
            gradient /= len(gradients)
            if slot.leaf in MUON_LEAVES:
                self.muon_update(slot, gradient, self.muon_lr * lr_factor)
            else:
                self.adam_update(slot, gradient, self.adam_lr * lr_factor)
            slot.view(self.parameters).copy_(self.masters[slot.name])

    def muon_update(self, slot: ParameterSlot, gradient: Tensor, lr: float) -> None:
        """Step along the orthogonalized Nesterov momentum, with decoupled weight decay."""
        momentum = self.first[slot.name].mul_(MUON_MOMENTUM).add_(gradient)
        update = gradient.add(momentum, alpha=MUON_MOMENTUM)
        # Each matrix by itself: query, key, value; gate and up of every expert.
        if slot.leaf == "qkv":
            parts = [part[None] for part in torch.split(update, self.shape.qkv_sizes)]
        elif slot.leaf == "gate_up":
            parts = [update.view(-1, self.shape.expert_size, self.shape.hidden_size)]
        else:
            parts = [update.view(-1, *update.shape[-2:])]
        steps = [orthogonalize(part) * (0.2 * max(part.shape[-2:]) ** 0.5) for part in parts]
        direction = torch.cat([part.reshape(-1) for part in steps]).view(slot.shape)
        self.masters[slot.name].mul_(1 - lr * self.weight_decay).sub_(direction, alpha=lr)

    def adam_update(self, slot: ParameterSlot, gradient: Tensor, lr: float) -> None:
        """Step with Adam, without weight decay; norm weights move at half the rate."""
        lr *= 0.5 if slot.leaf == "weight" else 1.0
        beta1, beta2 = ADAM_BETAS
        first = self.first[slot.name].lerp_(gradient, 1 - beta1)
        second = self.second[slot.name].lerp_(gradient * gradient, 1 - beta2)
        scale = (second / (1 - beta2**self.num_steps)).sqrt() + 1e-8
        step = first / (1 - beta1**self.num_steps) / scale
        self.masters[slot.name].sub_(step, alpha=lr)
