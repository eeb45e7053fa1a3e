"""The fast operations for CPUs: plain torch, and compiled code where torch has nothing good."""

from __future__ import annotations

import torch
from torch.nn import functional

from moeserve_kernels import cpu_attention, cpu_moe, native
from moeserve_kernels.cpu_linear import CpuLinear, has_bfloat16
from moeserve_kernels.kv_blocks import kv_write
from moeserve_kernels.rotary import rope

# Up to so many rows of a weight, on average over the experts, compiled code beats widening it and
# calling the BLAS library, which for many rows gets more of the peak.
_COMPILED_ROWS = 32
_COMPILED_ROWS_PER_EXPERT = 128


class CpuOps:
    """See ``ops.Ops`` for what each operation takes and returns."""

    def __init__(self, *, compiled: bool | None = None) -> None:
        """compiled: whether to use ``native``; None: where it is there and torch has no better."""
        self._linear = CpuLinear()
        if compiled is None:
            compiled = native.is_available() and not has_bfloat16()
        self._compiled = compiled
        self.description = "torch and compiled AVX2 operations" if compiled else "torch operations"

    def linear(
        self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None
    ) -> torch.Tensor:
        """See ``Ops.linear``."""
        if self._compiled and x.shape[0] <= _COMPILED_ROWS and native.takes(x, weight):
            product = native.linear(x, weight)
        else:
            product = self._linear(x, weight).to(x.dtype).contiguous()
        return product if bias is None else product + bias

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        """See ``Ops.rms_norm``."""
        return functional.rms_norm(x, weight.shape, weight, eps)

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
        compiles = self._compiled and native.takes(query, key_cache, value_cache)
        return cpu_attention.paged_attention(
            native.attn_decode if compiles else cpu_attention.decode,
            query,
            key_cache,
            value_cache,
            block_table,
            query_lens,
            seq_lens,
            scale,
            sliding_window,
        )

    def route(
        self, router_logits: torch.Tensor, top_k: int, renormalize: bool
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """See ``Ops.route``."""
        probabilities = torch.softmax(router_logits, dim=-1, dtype=torch.float32)
        weights, ids = torch.sort(probabilities, dim=-1, descending=True, stable=True)
        weights, ids = weights[:, :top_k], ids[:, :top_k]
        if renormalize:
            weights = weights / weights.sum(-1, keepdim=True)
        return weights, ids

    def silu_mul(self, x: torch.Tensor) -> torch.Tensor:
        """See ``Ops.silu_mul``."""
        return cpu_moe.silu_mul(x)

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
        if self._compiles(hidden_states, w13, w2, slots):
            return native.moe_ffn(hidden_states, w13, w2, slots, topk_weights)
        return cpu_moe.moe_ffn(self._linear, hidden_states, w13, w2, slots, topk_weights)

    def moe_pairs(
        self, hidden_states: torch.Tensor, w13: torch.Tensor, w2: torch.Tensor, slots: torch.Tensor
    ) -> torch.Tensor:
        """See ``Ops.moe_pairs``."""
        if self._compiles(hidden_states, w13, w2, slots):
            return native.moe_pairs(hidden_states, w13, w2, slots)
        return cpu_moe.moe_pairs(self._linear, hidden_states, w13, w2, slots)

    def weighted_sum(self, pairs: torch.Tensor, topk_weights: torch.Tensor) -> torch.Tensor:
        """See ``Ops.weighted_sum``."""
        return torch.bmm(topk_weights.unsqueeze(1), pairs.float()).squeeze(1).to(pairs.dtype)

    def _compiles(
        self,
        hidden_states: torch.Tensor,
        w13: torch.Tensor,
        w2: torch.Tensor,
        slots: torch.Tensor,
    ) -> bool:
        """Whether compiled code does this MoE layer."""
        few = slots.numel() <= _COMPILED_ROWS_PER_EXPERT * w13.shape[0]
        return self._compiled and few and native.takes(hidden_states, w13, w2)
