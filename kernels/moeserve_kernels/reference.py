"""Every operation in the shortest torch that says what is meant: the oracle of the tests.

Works in the dtype it is given, float64 included; nothing here is meant to be fast.
"""

from __future__ import annotations

import torch
from torch.nn import functional

from moeserve_kernels.kv_blocks import gather_sequence, kv_write
from moeserve_kernels.rotary import rope


class ReferenceOps:
    """See ``ops.Ops`` for what each operation takes and returns."""

    description = "plain torch, for tests"

    def linear(
        self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None
    ) -> torch.Tensor:
        """See ``Ops.linear``."""
        product = x @ weight.T
        return product if bias is None else product + bias

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        """See ``Ops.rms_norm``."""
        return x / torch.sqrt(x.pow(2).mean(-1, keepdim=True) + eps) * weight

    def rope(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        """See ``Ops.rope``."""
        return rope(x, cos, sin)

    def kv_write(
        self,
        key: torch.Tensor,
        value: torch.Tensor,
        key_cache: torch.Tensor,
        value_cache: torch.Tensor,
        slot_mapping: torch.Tensor,
    ) -> None:
        """See ``Ops.kv_write``."""
        kv_write(key, value, key_cache, value_cache, slot_mapping)

    def paged_attention(
        self,
        query: torch.Tensor,
        key_cache: torch.Tensor,
        value_cache: torch.Tensor,
        block_table: torch.Tensor,
        query_lens: tuple[int, ...],
        seq_lens: tuple[int, ...],
        scale: float,
        sliding_window: int | None = None,
    ) -> torch.Tensor:
        """See ``Ops.paged_attention``."""
        outputs = [query.new_empty(0, *query.shape[1:])]
        for request, rows in enumerate(torch.split(query, list(query_lens))):
            length = seq_lens[request]
            key = gather_sequence(key_cache, block_table[request], length)
            value = gather_sequence(value_cache, block_table[request], length)
            outputs.append(_attend(rows, key, value, scale, sliding_window))
        return torch.cat(outputs)

    def route(
        self, router_logits: torch.Tensor, top_k: int, renormalize: bool
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """See ``Ops.route``."""
        dtype = torch.promote_types(router_logits.dtype, torch.float32)
        probabilities = torch.softmax(router_logits, dim=-1, dtype=dtype)
        weights, ids = torch.sort(probabilities, dim=-1, descending=True, stable=True)
        weights, ids = weights[:, :top_k], ids[:, :top_k]
        if renormalize:
            weights = weights / weights.sum(-1, keepdim=True)
        return weights.float(), ids

    def silu_mul(self, x: torch.Tensor) -> torch.Tensor:
        """See ``Ops.silu_mul``."""
        gate, up = x.chunk(2, dim=-1)
        return functional.silu(gate) * up

    def sigmoid(self, x: torch.Tensor) -> torch.Tensor:
        """See ``Ops.sigmoid``."""
        return torch.sigmoid(x)

    def moe_ffn(
        self,
        hidden_states: torch.Tensor,
        w13: torch.Tensor,
        w2: torch.Tensor,
        slots: torch.Tensor,
        topk_weights: torch.Tensor,
    ) -> torch.Tensor:
        """See ``Ops.moe_ffn``."""
        return self.weighted_sum(self.moe_pairs(hidden_states, w13, w2, slots), topk_weights)

    def moe_pairs(
        self, hidden_states: torch.Tensor, w13: torch.Tensor, w2: torch.Tensor, slots: torch.Tensor
    ) -> torch.Tensor:
        """See ``Ops.moe_pairs``."""
        pairs = hidden_states.new_zeros(*slots.shape, hidden_states.shape[1])
        for row, column in (slots >= 0).nonzero().tolist():
            slot = slots[row, column]
            hidden = self.silu_mul(self.linear(hidden_states[row : row + 1], w13[slot]))
            pairs[row, column] = self.linear(hidden, w2[slot])[0]
        return pairs

    def weighted_sum(self, pairs: torch.Tensor, topk_weights: torch.Tensor) -> torch.Tensor:
        """See ``Ops.weighted_sum``."""
        return (pairs * topk_weights.to(pairs.dtype).unsqueeze(-1)).sum(1)


def _attend(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    scale: float,
    sliding_window: int | None,
) -> torch.Tensor:
    """One request: query [Q, heads, d] against key, value [L, kv_heads, d] -> [Q, heads, d]."""
    num_queries, num_heads, _ = query.shape
    length, num_kv_heads, _ = key.shape
    key, value = (x.repeat_interleave(num_heads // num_kv_heads, dim=1) for x in (key, value))
    scores = torch.einsum("qhd,lhd->hql", query, key) * scale
    distance = torch.arange(length - num_queries, length)[:, None] - torch.arange(length)
    hidden = distance < 0
    if sliding_window is not None:
        hidden |= distance >= sliding_window
    return torch.einsum("hql,lhd->qhd", scores.masked_fill(hidden, -torch.inf).softmax(-1), value)
