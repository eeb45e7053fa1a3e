"""The expert FFN as its formula: pair by pair, in the dtype of the rows."""

from __future__ import annotations

from typing import Any

import torch
from torch.nn import functional

from moeserve_kernels.alignment import Alignment
from moeserve_kernels.formulas.quant import dequantize_experts
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
    """See ``operations.moe.moe_up``; other rows hold NaN."""
    h = hidden_states.new_full((alignment.num_rows, w13.num_outputs // 2), torch.nan)
    for row, pair, slot in _rows(alignment):
        both = _product(hidden_states[pair // alignment.top_k], w13, slot)
        gate, up = both.chunk(2)
        if activation == "silu":
            h[row] = functional.silu(gate) * up
        elif activation == "gelu":
            h[row] = functional.gelu(gate, approximate="tanh") * up
        else:
            gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
            h[row] = (up + 1) * gate * torch.sigmoid(alpha * gate)
    return h


def moe_down(
    h: torch.Tensor,
    w2: ExpertWeights,
    alignment: Alignment,
    *,
    topk_weights: torch.Tensor | None = None,
) -> torch.Tensor:
    """See ``operations.moe.moe_down``; pairs that are not here hold NaN."""
    top_k = alignment.top_k
    pairs = h.new_full((alignment.num_pairs, w2.num_outputs), torch.nan)
    for row, pair, slot in _rows(alignment):
        factor = 1.0 if topk_weights is None else topk_weights[pair // top_k, pair % top_k]
        pairs[pair] = _product(h[row], w2, slot) * factor
    return pairs.view(-1, top_k, w2.num_outputs)


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
    out = pairs.new_zeros(num_tokens, hidden_size)
    for token in range(num_tokens):
        for choice in range(top_k):
            expert = 0 if topk_ids is None else int(topk_ids[token, choice])
            if expert < 0 or (expert_map is not None and int(expert_map[expert]) < 0):
                continue
            factor = 1.0 if topk_weights is None else topk_weights[token, choice]
            out[token] += factor * pairs[token, choice]
    out = out if shared is None else out + shared
    return out if residual is None else out + residual


def choose_block_m(*unused: Any) -> int:
    """Rows of a block, which change no result."""
    return 4


def _product(row: torch.Tensor, weights: ExpertWeights, slot: int) -> torch.Tensor:
    """The slot's matrix times a row, plus bias."""
    y = dequantize_experts(weights, row.dtype)[slot] @ row
    return y if weights.bias is None else y + weights.bias[slot].to(row.dtype)


def _rows(alignment: Alignment) -> list[tuple[int, int, int]]:
    """Each row that holds a pair: row, pair, slot."""
    rows = []
    for row in range(alignment.num_rows):
        if alignment.sorted_pairs is None:
            pair, slot = row, int(alignment.block_slots[row])
        else:
            pair = int(alignment.sorted_pairs[row])
            slot = int(alignment.block_slots[row // alignment.block_m])
        if slot >= 0 and pair < alignment.num_pairs:
            rows.append((row, pair, slot))
    return rows
