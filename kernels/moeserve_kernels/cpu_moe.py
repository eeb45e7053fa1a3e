"""The experts of one rank: sort the pairs by expert once, one product per expert or two experts.

(On CPUs torch's ``grouped_mm`` is such a loop too, and can not choose how to multiply by the number
of rows.) Experts with equally few rows go two by two, so that each thread widens and multiplies a
weight of its own. Results come back to token order in one fused gather and sum, in fixed order.
"""

from __future__ import annotations

import torch
from torch.nn import functional

from moeserve_kernels.cpu_linear import NARROW_ROWS, CpuLinear, compute_dtype, pairs_pay


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
    """Results of the P pairs that are here, sorted by expert, those with fewest rows first.

    Returns:
        rows [P, H]; place: int64 [P], where in ``rows`` the pairs are, taken in the order in which
        they stand in ``slots``.
    """
    flat = slots.flatten()
    num_absent, *counts = torch.bincount(flat + 1, minlength=w13.shape[0] + 1).tolist()
    active = sorted((s for s, count in enumerate(counts) if count), key=counts.__getitem__)
    if not active:
        return hidden_states[:0], flat[:0]
    position = torch.zeros(len(counts) + 1, dtype=torch.int64)
    position[torch.tensor(active) + 1] = torch.arange(1, len(active) + 1)
    order = torch.argsort(position[flat + 1], stable=True)[num_absent:]
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
        active: the groups' slots; where sizes are equal, rising.
        sizes: rows of each group, rising.
    """
    wide = x.to(compute_dtype(x.dtype)) if sizes[-1] > NARROW_ROWS else x
    product = x.new_empty(x.shape[0], weights.shape[1])
    group = start = 0
    while group < len(active):
        slot, size = active[group], sizes[group]
        end = start + size
        if pairs_pay(x.dtype, size) and size in sizes[group + 1 : group + 2]:
            end += size
            other = active[group + 1]
            both = weights[slot : other + 1 : other - slot]  # one view of two experts
            product[start:end] = linear.pair(wide[start:end].view(2, size, -1), both).flatten(0, 1)
            group += 2
        else:
            rows = x if size <= NARROW_ROWS else wide
            product[start:end] = linear(rows[start:end], weights[slot])
            group += 1
        start = end
    return product
