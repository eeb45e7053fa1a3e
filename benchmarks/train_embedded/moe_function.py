"""The experts of one layer as a single autograd function: sort by expert, one matmul each.

A custom function keeps the activations that backward needs to four tensors and lets
torch.compile fuse the element-wise parts, while the matmuls go to the BLAS library.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor


@torch.compile(dynamic=False)
def swiglu(gate_up: Tensor) -> Tensor:
    """Return silu(gate) * up for [rows, 2 * expert_size]."""
    gate, up = gate_up.float().chunk(2, -1)
    return (F.silu(gate) * up).to(gate_up.dtype)


@torch.compile(dynamic=False)
def swiglu_backward(gate_up: Tensor, grad: Tensor) -> tuple[Tensor, Tensor]:
    """Return the gradient of gate_up and, recomputed, the output of swiglu."""
    gate, up = gate_up.float().chunk(2, -1)
    grad = grad.float()
    sigmoid = torch.sigmoid(gate)
    silu = gate * sigmoid
    grad_gate = grad * up * (sigmoid + silu * (1 - sigmoid))
    grad_gate_up = torch.cat([grad_gate, grad * silu], 1)
    return grad_gate_up.to(gate_up.dtype), (silu * up).to(gate_up.dtype)


@torch.compile(dynamic=False)
def weighted_sum(rows: Tensor, positions: Tensor, weights: Tensor) -> Tensor:
    """Return for each token the weighted sum of its rows; positions: [num_tokens * top_k]."""
    per_token = rows[positions].view(*weights.shape, -1).float()
    return (per_token * weights[..., None]).sum(1).to(rows.dtype)


@torch.compile(dynamic=False)
def weighted_sum_backward(
    grad: Tensor, tokens: Tensor, weights: Tensor, rows: Tensor
) -> tuple[Tensor, Tensor]:
    """Return the gradients of the rows and of their weights, both in expert order."""
    grad_rows = grad[tokens].float()
    return (grad_rows * weights[:, None]).to(rows.dtype), (grad_rows * rows.float()).sum(1)


@torch.compile(dynamic=False)
def sum_over_choices(rows: Tensor, positions: Tensor, top_k: int) -> Tensor:
    """Return for each token the sum of its rows."""
    num_tokens = rows.shape[0] // top_k
    return rows[positions].view(num_tokens, top_k, -1).float().sum(1).to(rows.dtype)


def group_slices(counts: list[int]) -> list[tuple[int, slice]]:
    """Return each expert that has rows, with the slice of its rows."""
    slices, start = [], 0
    for expert_id, count in enumerate(counts):
        if count:
            slices.append((expert_id, slice(start, start + count)))
        start += count
    return slices


class MoeFunction(torch.autograd.Function):
    """y = sum over the chosen experts of weight * down(silu(gate(x)) * up(x))."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, topk_ids: Tensor, weights: Tensor, gate_up: Tensor, down: Tensor
    ) -> Tensor:
        """Return [num_tokens, hidden_size].

        x: [num_tokens, hidden_size]; topk_ids, weights: [num_tokens, top_k];
        gate_up: [num_experts, 2 * expert_size, hidden_size];
        down: [num_experts, hidden_size, expert_size].
        """
        num_tokens, top_k = topk_ids.shape
        order = torch.argsort(topk_ids.reshape(-1), stable=True)
        counts = torch.bincount(topk_ids.reshape(-1), minlength=gate_up.shape[0]).tolist()
        groups = group_slices(counts)
        tokens, positions = order // top_k, torch.empty_like(order)
        positions[order] = torch.arange(order.numel())
        inputs = x[tokens]  # [num_tokens * top_k, hidden_size]
        hidden = x.new_empty(num_tokens * top_k, gate_up.shape[1])
        outputs = torch.empty_like(inputs)
        for expert_id, rows in groups:
            torch.mm(inputs[rows], gate_up[expert_id].t(), out=hidden[rows])
        activated = swiglu(hidden)
        for expert_id, rows in groups:
            torch.mm(activated[rows], down[expert_id].t(), out=outputs[rows])
        saved = (inputs, hidden, outputs, weights, tokens, positions, order, gate_up, down)
        ctx.save_for_backward(*saved)
        ctx.groups = groups
        return weighted_sum(outputs, positions, weights)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradients of x, weights, gate_up and down."""
        (grad,) = grads
        inputs, hidden, outputs, weights, tokens, positions, order, gate_up, down = (
            ctx.saved_tensors
        )
        sorted_weights = weights.reshape(-1)[order]
        grad_outputs, grad_sorted = weighted_sum_backward(grad, tokens, sorted_weights, outputs)
        grad_activated = hidden.new_empty(hidden.shape[0], down.shape[2])
        for expert_id, rows in ctx.groups:
            torch.mm(grad_outputs[rows], down[expert_id], out=grad_activated[rows])
        grad_hidden, activated = swiglu_backward(hidden, grad_activated)
        grad_gate_up, grad_down = torch.zeros_like(gate_up), torch.zeros_like(down)
        grad_inputs = torch.empty_like(inputs)
        for expert_id, rows in ctx.groups:
            torch.mm(grad_outputs[rows].t(), activated[rows], out=grad_down[expert_id])
            torch.mm(grad_hidden[rows].t(), inputs[rows], out=grad_gate_up[expert_id])
            torch.mm(grad_hidden[rows], gate_up[expert_id], out=grad_inputs[rows])
        grad_x = sum_over_choices(grad_inputs, positions, weights.shape[1])
        return grad_x, None, grad_sorted[positions].view_as(weights), grad_gate_up, grad_down


@torch.compiler.disable
def apply_experts(
    x: Tensor, topk_ids: Tensor, weights: Tensor, gate_up: Tensor, down: Tensor
) -> Tensor:
    """Return the output of the experts; the arguments are those of MoeFunction.forward."""
    output: Tensor = MoeFunction.apply(x, topk_ids, weights, gate_up, down)
    return output
