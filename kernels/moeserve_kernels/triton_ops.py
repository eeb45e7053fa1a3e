"""The operations of a decoder on a GPU: the Triton kernels behind the interface of ``Ops``.

Matrix products that are not of experts go to torch (cuBLAS, hipBLASLt). Results do not depend on
timing: no operation here uses atomics for a sum or an order.
"""

from __future__ import annotations

import torch
from torch.nn import functional

from moeserve_kernels.operations.align import align
from moeserve_kernels.operations.attention import attn_decode, attn_prefill
from moeserve_kernels.operations.kv_cache import kv_write
from moeserve_kernels.operations.moe import combine, moe_down, moe_ffn, moe_up
from moeserve_kernels.operations.norm import rms_norm
from moeserve_kernels.operations.routing import route
from moeserve_kernels.rotary import rope
from moeserve_kernels.weights import ExpertWeights

_PAIRS_BLOCK_M = 16  # rows of a block where single pairs are asked for: batches are small then


class TritonOps:
    """See ``ops.Ops`` for what each operation takes and returns; tensors are on one GPU."""

    description = "Triton kernels"

    def linear(
        self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None
    ) -> torch.Tensor:
        """See ``Ops.linear``."""
        return functional.linear(x, weight, bias)

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        """See ``Ops.rms_norm``."""
        return rms_norm(x, weight, eps)

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
        """See ``Ops.paged_attention``. A batch of single tokens decodes, all else prefills."""
        if not query_lens:
            return torch.empty_like(query)
        table = block_table.to(torch.int32)
        lengths = torch.tensor(seq_lens, dtype=torch.int32, device=query.device)
        if max(query_lens) == 1:
            return attn_decode(
                query,
                key_cache,
                value_cache,
                table,
                lengths,
                scale,
                max_seq_len=max(seq_lens),
                sliding_window=sliding_window,
            )
        starts = torch.zeros(len(query_lens) + 1, dtype=torch.int32)
        starts[1:] = torch.tensor(query_lens, dtype=torch.int32).cumsum(0)
        return attn_prefill(
            query,
            key_cache,
            value_cache,
            table,
            starts.to(query.device),
            lengths,
            scale,
            max_query_len=max(query_lens),
            sliding_window=sliding_window,
        )

    def route(
        self, router_logits: torch.Tensor, top_k: int, renormalize: bool
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """See ``Ops.route``."""
        weights, ids = route(router_logits, top_k, renormalize=renormalize)
        return weights, ids.to(torch.int64)

    def silu_mul(self, x: torch.Tensor) -> torch.Tensor:
        """See ``Ops.silu_mul``."""
        gate, up = x.float().chunk(2, dim=-1)
        return (functional.silu(gate) * up).to(x.dtype)

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
        if w13.shape[0] == 0:  # a rank without experts in this layer
            return torch.zeros_like(hidden_states)
        up, down = ExpertWeights("plain", w13), ExpertWeights("plain", w2)
        return moe_ffn(hidden_states, up, down, topk_weights, slots)

    def moe_pairs(
        self, hidden_states: torch.Tensor, w13: torch.Tensor, w2: torch.Tensor, slots: torch.Tensor
    ) -> torch.Tensor:
        """See ``Ops.moe_pairs``."""
        if w13.shape[0] == 0:
            return hidden_states.new_zeros(*slots.shape, hidden_states.shape[1])
        alignment = align(slots, w13.shape[0], _PAIRS_BLOCK_M)
        hidden = moe_up(hidden_states, ExpertWeights("plain", w13), alignment)
        pairs = moe_down(hidden, ExpertWeights("plain", w2), alignment)
        return pairs.masked_fill_((slots < 0).unsqueeze(-1), 0.0)

    def weighted_sum(self, pairs: torch.Tensor, topk_weights: torch.Tensor) -> torch.Tensor:
        """See ``Ops.weighted_sum``."""
        return combine(pairs, topk_weights=topk_weights)
