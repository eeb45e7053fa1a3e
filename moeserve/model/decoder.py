"""The decoder: embed, attention and experts layer by layer, logits of the rows that are wanted."""

from __future__ import annotations

import torch

from moeserve.model.batch import Batch
from moeserve.model.decoder_weights import DecoderWeights, LayerWeights, MoeWeights
from moeserve.model.kv_cache import KVCache
from moeserve.model.layers.attention import Attention
from moeserve.model.layers.mlp import Mlp, SharedExpert
from moeserve.model.layers.moe import ExpertRuntime, MoeLayer
from moeserve.model.layers.rotary import Rotary
from moeserve.model.layers.router import Router, SoftmaxRouter
from moeserve.model.spec import ModelSpec
from moeserve_kernels import Ops


class Decoder:
    """The one decoder that all architectures here are made of; see ``registry.Model``."""

    def __init__(
        self,
        spec: ModelSpec,
        weights: DecoderWeights,
        ops: Ops,
        experts: ExpertRuntime,
        max_model_len: int,
    ) -> None:
        """Puts the parts together; see ``registry.build``."""
        self._spec = spec
        self._weights = weights
        self._ops = ops
        self._rotary = Rotary(spec.rope, spec.head_dim, max_model_len)
        self._layers = tuple(
            _DecoderLayer(spec, index, layer, ops, experts)
            for index, layer in enumerate(weights.layers)
        )

    @torch.inference_mode()
    def forward(self, batch: Batch, kv: KVCache) -> torch.Tensor:
        """See ``registry.Model.forward``."""
        hidden_states = self._weights.embedding[batch.input_ids]
        rotation = self._rotary(batch.positions)
        for layer, cache in zip(self._layers, kv.layers, strict=True):
            hidden_states = layer(hidden_states, cache, rotation, batch)
        wanted = hidden_states[batch.logits_indices]
        normed = self._ops.rms_norm(wanted, self._weights.norm, self._spec.rms_norm_eps)
        return self._ops.linear(normed, self._weights.head).float()


class _DecoderLayer:
    def __init__(
        self,
        spec: ModelSpec,
        index: int,
        weights: LayerWeights,
        ops: Ops,
        experts: ExpertRuntime,
    ) -> None:
        self._weights = weights
        self._ops = ops
        self._eps = spec.rms_norm_eps
        self._attention = Attention(spec, index, weights.attention, ops)
        self._moe: MoeLayer | None = None
        self._mlp: Mlp | None = None
        if isinstance(weights.mlp, MoeWeights):
            router = _router(spec, index, weights.mlp, ops, experts)
            shared = _shared_expert(weights.mlp, ops)
            self._moe = MoeLayer(index, router, shared, experts, ops)
        else:
            self._mlp = Mlp(weights.mlp, ops)

    def __call__(
        self,
        hidden_states: torch.Tensor,
        cache: tuple[torch.Tensor, torch.Tensor],
        rotation: tuple[torch.Tensor, torch.Tensor],
        batch: Batch,
    ) -> torch.Tensor:
        normed = self._ops.rms_norm(hidden_states, self._weights.input_norm, self._eps)
        hidden_states = hidden_states + self._attention(normed, cache, rotation, batch)
        normed = self._ops.rms_norm(hidden_states, self._weights.post_attention_norm, self._eps)
        if self._moe is not None:
            return hidden_states + self._moe(normed, batch.sizes)
        assert self._mlp is not None
        return hidden_states + self._mlp(normed)


def _router(
    spec: ModelSpec, index: int, weights: MoeWeights, ops: Ops, experts: ExpertRuntime
) -> Router:
    if experts.forced is not None:
        return experts.forced.router(index, experts.store.slot_map.rank)
    return SoftmaxRouter(weights.router, spec.top_k, spec.renormalize, ops)


def _shared_expert(weights: MoeWeights, ops: Ops) -> SharedExpert | None:
    if weights.shared_expert is None or weights.shared_gate is None:
        return None
    return SharedExpert(weights.shared_expert, weights.shared_gate, ops)
