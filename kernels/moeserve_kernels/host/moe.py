"""The expert FFN in torch on the CPU: one product a slot, in float32."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
from torch.nn import functional

from moeserve_kernels.alignment import Alignment
from moeserve_kernels.host.quant import dequantize_experts
from moeserve_kernels.weights import ExpertWeights


def moe_up(
    hidden_states: torch.Tensor,
    w13: ExpertWeights,
    alignment: Alignment,
    *,
    activation: str = "silu",
    alpha: float = 1.702,
    limit: float = 7.0,
) -> torch.Tensor:
    """See ``operations.moe.moe_up``."""
    shape = (alignment.num_rows, w13.num_outputs // 2)
    h = torch.empty(shape, dtype=hidden_states.dtype)
    for slot, rows, pairs in _runs(alignment):
        x = hidden_states[pairs // alignment.top_k]
        gate, up = _product(x, w13, slot).chunk(2, dim=1)
        h[rows] = _activate(gate, up, activation, alpha, limit).to(h.dtype)
    return h


def moe_down(
    h: torch.Tensor,
    w2: ExpertWeights,
    alignment: Alignment,
    *,
    topk_weights: torch.Tensor | None = None,
) -> torch.Tensor:
    """See ``operations.moe.moe_down``."""
    out = torch.empty((alignment.num_pairs, w2.num_outputs), dtype=h.dtype)
    weights = None if topk_weights is None else topk_weights.reshape(-1)
    for slot, rows, pairs in _runs(alignment):
        y = _product(h[rows], w2, slot)
        if weights is not None:
            y *= weights[pairs, None]
        out[pairs] = y.to(h.dtype)
    top_k = alignment.top_k
    return out.view(alignment.num_pairs // top_k, top_k, w2.num_outputs)


def combine(
    pairs: torch.Tensor,
    *,
    topk_weights: torch.Tensor | None = None,
    topk_ids: torch.Tensor | None = None,
    expert_map: torch.Tensor | None = None,
    shared: torch.Tensor | None = None,
    residual: torch.Tensor | None = None,
) -> torch.Tensor:
    """See ``operations.moe.combine``."""
    num_tokens, top_k, hidden_size = pairs.shape
    here = None if topk_ids is None else _here(topk_ids, expert_map)
    total = torch.zeros(num_tokens, hidden_size)
    for choice in range(top_k):
        pair = pairs[:, choice].float()
        if topk_weights is not None:
            pair = pair * topk_weights[:, choice, None]
        # Not a product with 0: what a missing pair holds may be NaN.
        total += pair if here is None else torch.where(here[:, choice, None], pair, 0.0)
    for more in (shared, residual):
        if more is not None:
            total += more
    return total.to(pairs.dtype)


def choose_block_m(*unused: Any) -> int:
    """Rows of a block: no padding, as products take whole runs."""
    return 1


def _here(topk_ids: torch.Tensor, expert_map: torch.Tensor | None) -> torch.Tensor:
    """bool [T, k]: the pairs that are here."""
    if expert_map is None:
        return topk_ids >= 0
    return (topk_ids >= 0) & (expert_map[topk_ids.clamp(min=0).long()] >= 0)


def _activate(
    gate: torch.Tensor, up: torch.Tensor, activation: str, alpha: float, limit: float
) -> torch.Tensor:
    if activation == "silu":
        return functional.silu(gate) * up
    if activation == "gelu":
        return functional.gelu(gate, approximate="tanh") * up
    gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
    return (up + 1) * gate * torch.sigmoid(alpha * gate)


def _product(x: torch.Tensor, weights: ExpertWeights, slot: int) -> torch.Tensor:
    """Rows times the transposed matrix of a slot, plus bias, float32."""
    scales, bias = weights.scales, weights.bias
    one = replace(
        weights,
        data=weights.data[slot : slot + 1],
        scales=None if scales is None else scales[slot : slot + 1],
    )
    matrix = dequantize_experts(one)[0]
    return functional.linear(x.float(), matrix, None if bias is None else bias[slot].float())


def _runs(alignment: Alignment) -> Iterator[tuple[int, torch.Tensor, torch.Tensor]]:
    """Each slot that has pairs, with the rows that hold them and the pairs, both int64."""
    if alignment.sorted_pairs is None or alignment.counts is None:
        slots = alignment.block_slots
        for slot in sorted(set(slots.tolist())):
            if slot >= 0:
                pairs = torch.nonzero(slots == slot).flatten()
                yield slot, pairs, pairs
        return
    start, block_m = 0, alignment.block_m
    for slot, count in enumerate(alignment.counts.tolist()):
        if count > 0:
            rows = torch.arange(start, start + count)
            yield slot, rows, alignment.sorted_pairs[rows].long()
        start += -(-count // block_m) * block_m
