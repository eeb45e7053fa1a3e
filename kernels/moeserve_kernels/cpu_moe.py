"""The experts of one rank in plain torch: sort the pairs by expert once, one product per expert.

(On CPUs torch's ``grouped_mm`` is such a loop too, and can not choose how to multiply by the number
of rows.) Results come back to token order in one fused gather and sum, in fixed order.
"""

from __future__ import annotations

import torch
from torch.nn import functional

from moeserve_kernels.cpu_linear import CpuLinear


def silu_mul(x: torch.Tensor) -> torch.Tensor:
    """See ``Ops.silu_mul``; rounds once."""
    gate, up = x.float().chunk(2, dim=-1)
    return functional.silu(gate).mul_(up).to(x.dtype)


def moe_ffn(
    linear: CpuLinear,
    hidden_states: torch.Tensor,
    w13: torch.Tensor,
    w2: torch.Tensor,
    slots: torch.Tensor,
    topk_weights: torch.Tensor,
) -> torch.Tensor:
    """See ``Ops.moe_ffn``; ``linear`` does the products."""
    rows, place = _expert_rows(linear, hidden_states, w13, w2, slots)
    if rows.shape[0] == 0:
        return torch.zeros_like(hidden_states)
    here = slots >= 0
    counts = here.sum(1)
    return functional.embedding_bag(
        place,
        rows,
        counts.cumsum(0) - counts,
        mode="sum",
        per_sample_weights=topk_weights[here].to(rows.dtype),
    )


def moe_pairs(
    linear: CpuLinear,
    hidden_states: torch.Tensor,
    w13: torch.Tensor,
    w2: torch.Tensor,
    slots: torch.Tensor,
) -> torch.Tensor:
    """See ``Ops.moe_pairs``; ``linear`` does the products."""
    rows, place = _expert_rows(linear, hidden_states, w13, w2, slots)
    pairs = hidden_states.new_zeros(*slots.shape, hidden_states.shape[1])
    pairs[slots >= 0] = rows[place]
    return pairs


def _expert_rows(
    linear: CpuLinear,
    hidden_states: torch.Tensor,
    w13: torch.Tensor,
    w2: torch.Tensor,
    slots: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Results of the P pairs that are here, sorted by expert.

    Returns:
        rows [P, H]; place: int64 [P], where in ``rows`` the pairs are, taken in the order in which
        they stand in ``slots``.
    """
    flat = slots.flatten()
    num_absent, *counts = torch.bincount(flat + 1, minlength=w13.shape[0] + 1).tolist()
    active = [slot for slot, count in enumerate(counts) if count]
    if not active:
        return hidden_states[:0], flat[:0]
    order = torch.argsort(flat, stable=True)[num_absent:]
    sizes = [counts[slot] for slot in active]
    hidden = hidden_states[order // slots.shape[1]]
    gate_up = _grouped(linear, hidden, w13, active, sizes)
    return _grouped(linear, silu_mul(gate_up), w2, active, sizes), torch.argsort(order)


def _grouped(
    linear: CpuLinear,
    x: torch.Tensor,
    weights: torch.Tensor,
    active: list[int],
    sizes: list[int],
) -> torch.Tensor:
    """[P, N]: each group of rows of ``x`` [P, K] times the weight of its slot, ``weights[slot].T``.

    Args:
        active: the groups' slots.
        sizes: rows of each group.
    """
    product = x.new_empty(x.shape[0], weights.shape[1])
    start = 0
    for slot, size in zip(active, sizes, strict=True):
        product[start : start + size] = linear(x[start : start + size], weights[slot])
        start += size
    return product
