"""Self-attention over the paged cache: project, normalise, rotate, write K and V, attend."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from moeserve.model.batch import Batch
from moeserve.model.spec import ModelSpec
from moeserve.model.weights import Shape, WeightSource
from moeserve_kernels import Ops


@dataclass(frozen=True, kw_only=True, slots=True)
class AttentionWeights:
    """qkv: [(heads + 2 * kv_heads) * d, H], queries first, then keys, then values, as one product.

    output: [H, heads * d]; the norms are [d] or as wide as all heads together.
    """

    qkv: torch.Tensor
    qkv_bias: torch.Tensor | None
    output: torch.Tensor
    output_bias: torch.Tensor | None
    query_norm: torch.Tensor | None
    key_norm: torch.Tensor | None

    @classmethod
    def read(cls, spec: ModelSpec, source: WeightSource, prefix: str) -> AttentionWeights:
        """From tensors whose names begin with ``prefix``, such as ``model.layers.0.self_attn.``"""
        widths = {
            "q": spec.num_heads * spec.head_dim,
            "k": spec.num_kv_heads * spec.head_dim,
            "v": spec.num_kv_heads * spec.head_dim,
        }

        def stacked(kind: str, *inputs: int) -> torch.Tensor:
            parts = widths.items()
            return torch.cat(
                [source.take(f"{prefix}{p}_proj.{kind}", (w, *inputs)) for p, w in parts]
            )

        def norm(part: str) -> torch.Tensor | None:
            shapes: dict[str, Shape] = {"head": (spec.head_dim,), "full": (widths[part],)}
            shape = shapes.get(spec.qk_norm)
            return source.take(f"{prefix}{part}_norm.weight", shape) if shape else None

        hidden = (spec.hidden_size,)
        return cls(
            qkv=stacked("weight", *hidden),
            qkv_bias=stacked("bias") if spec.qkv_bias else None,
            output=source.take(f"{prefix}o_proj.weight", (*hidden, widths["q"])),
            output_bias=source.take(f"{prefix}o_proj.bias", hidden) if spec.output_bias else None,
            query_norm=norm("q"),
            key_norm=norm("k"),
        )


class Attention:
    """The attention of one layer."""

    def __init__(self, spec: ModelSpec, layer: int, weights: AttentionWeights, ops: Ops) -> None:
        self._spec = spec
        self._weights = weights
        self._ops = ops
        self._sliding_window = spec.sliding_windows[layer]
        self._scale = spec.head_dim**-0.5
        kv_width = spec.num_kv_heads * spec.head_dim
        self._widths = [spec.num_heads * spec.head_dim, kv_width, kv_width]

    def __call__(
        self,
        hidden_states: torch.Tensor,
        cache: tuple[torch.Tensor, torch.Tensor],
        rotation: tuple[torch.Tensor, torch.Tensor],
        batch: Batch,
    ) -> torch.Tensor:
        """hidden_states [T, H], this layer's cache, cos and sin of the positions -> [T, H]."""
        ops, weights = self._ops, self._weights
        qkv = ops.linear(hidden_states, weights.qkv, weights.qkv_bias)
        query, key, value = torch.split(qkv, self._widths, dim=-1)
        query = ops.rope(self._heads(query, weights.query_norm), *rotation)
        key = ops.rope(self._heads(key, weights.key_norm), *rotation)
        ops.kv_write(key, self._heads(value, None), *cache, batch.slot_mapping)
        attended = ops.paged_attention(
            query,
            *cache,
            batch.block_table,
            batch.query_lens,
            batch.seq_lens,
            self._scale,
            self._sliding_window,
        )
        return ops.linear(attended.flatten(1), weights.output, weights.output_bias)

    def _heads(self, x: torch.Tensor, norm: torch.Tensor | None) -> torch.Tensor:
        """x [T, heads * d] -> [T, heads, d], normalised over a head or all of them, and clipped."""
        num_tokens, width = x.shape
        if norm is not None:
            x = x.reshape(num_tokens, width // norm.shape[0], norm.shape[0])
            x = self._ops.rms_norm(x, norm, self._spec.rms_norm_eps)
        if self._spec.clip_qkv is not None:
            x = x.clamp(-self._spec.clip_qkv, self._spec.clip_qkv)
        return x.reshape(num_tokens, width // self._spec.head_dim, self._spec.head_dim)
