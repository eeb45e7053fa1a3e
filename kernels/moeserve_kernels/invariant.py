"""Operations whose result for a row has the same bits whatever else is computed with it.

Not with how many other rows, not with which, at whichever place in the batch; not with the sequence
cut into whichever chunks or stored in whichever blocks. What this rests on:

- sums are trees or sequences written out as elementwise additions, which IEEE 754 fixes;
- matrix products run in tiles of one shape (``invariant_linear.py``, tested at first use);
- exp runs on a multiple of 64 elements, so that no element falls into the scalar tail of a
  vectorised loop, whose exp differs in the last bit.

Products of one shape still depend on the number of threads: a rank runs this mode with one thread
(``torch.set_num_threads(1)``), or at least always with the same number.
"""

from __future__ import annotations

import torch

from moeserve_kernels.invariant_attention import paged_attention
from moeserve_kernels.invariant_linear import TileLinear
from moeserve_kernels.invariant_rows import sigmoid, softmax, sum_last
from moeserve_kernels.kv_blocks import kv_write
from moeserve_kernels.rotary import rope


class InvariantOps:
    """See ``ops.Ops`` for what each operation takes and returns."""

    description = "batch invariant"

    def __init__(self) -> None:
        self._tiles = TileLinear()

    def linear(
        self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None
    ) -> torch.Tensor:
        """See ``Ops.linear``."""
        product = self._tiles(x, weight)
        return product if bias is None else product + bias

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        """See ``Ops.rms_norm``."""
        wide = x.float()
        mean = sum_last(wide * wide) / x.shape[-1]
        return (wide / torch.sqrt(mean + eps) * weight).to(x.dtype)

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
        return paged_attention(
            self._tiles,
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
        probabilities = softmax(router_logits)
        weights, ids = torch.sort(probabilities, dim=-1, descending=True, stable=True)
        weights, ids = weights[:, :top_k], ids[:, :top_k]
        if renormalize:
            weights = weights / sum_last(weights)
        return weights, ids

    def silu_mul(self, x: torch.Tensor) -> torch.Tensor:
        """See ``Ops.silu_mul``."""
        gate, up = x.float().chunk(2, dim=-1)
        return (gate * sigmoid(gate) * up).to(x.dtype)

    def sigmoid(self, x: torch.Tensor) -> torch.Tensor:
        """See ``Ops.sigmoid``."""
        return sigmoid(x.float()).to(x.dtype)

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
        for slot in sorted(set(slots[slots >= 0].tolist())):
            rows, columns = (slots == slot).nonzero(as_tuple=True)
            hidden = self.silu_mul(self.linear(hidden_states[rows], w13[slot]))
            pairs[rows, columns] = self.linear(hidden, w2[slot])
        return pairs

    def weighted_sum(self, pairs: torch.Tensor, topk_weights: torch.Tensor) -> torch.Tensor:
        """See ``Ops.weighted_sum``."""
        weighted = pairs.float() * topk_weights.unsqueeze(-1)
        total = torch.zeros_like(weighted[:, 0])
        for column in weighted.unbind(1):
            total = total + column
        return total.to(pairs.dtype)
