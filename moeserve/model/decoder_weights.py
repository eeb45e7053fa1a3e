"""The tensors of a decoder other than its experts, as a tree; reading it says what is needed."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from moeserve.model.architecture import ExpertNames
from moeserve.model.architectures import ARCHITECTURES
from moeserve.model.layers.attention import AttentionWeights
from moeserve.model.layers.mlp import MlpWeights
from moeserve.model.spec import ModelSpec
from moeserve.model.weights import WeightSource, layer_prefix, moe_block


@dataclass(frozen=True, kw_only=True, slots=True)
class MoeWeights:
    """router: [E, H]; shared_gate: [1, H], with the shared expert or not at all."""

    router: torch.Tensor
    shared_expert: MlpWeights | None
    shared_gate: torch.Tensor | None


@dataclass(frozen=True, kw_only=True, slots=True)
class LayerWeights:
    """One layer: both norms [H], attention, and experts or a dense block."""

    input_norm: torch.Tensor
    attention: AttentionWeights
    post_attention_norm: torch.Tensor
    mlp: MoeWeights | MlpWeights


@dataclass(frozen=True, kw_only=True, slots=True)
class DecoderWeights:
    """embedding: [vocab, H]; head: [vocab, H], the embedding itself where the two are tied."""

    embedding: torch.Tensor
    layers: tuple[LayerWeights, ...]
    norm: torch.Tensor
    head: torch.Tensor


def read_weights(spec: ModelSpec, source: WeightSource) -> DecoderWeights:
    """Asks ``source`` for every tensor that is not an expert's."""
    matrix = (spec.vocab_size, spec.hidden_size)
    embedding = source.take("model.embed_tokens.weight", matrix)
    names = ARCHITECTURES[spec.architecture].expert_names
    return DecoderWeights(
        embedding=embedding,
        layers=tuple(_read_layer(spec, source, names, i) for i in range(spec.num_layers)),
        norm=source.take("model.norm.weight", (spec.hidden_size,)),
        head=embedding if spec.tie_word_embeddings else source.take("lm_head.weight", matrix),
    )


def _read_layer(
    spec: ModelSpec, source: WeightSource, names: ExpertNames, layer: int
) -> LayerWeights:
    prefix, hidden = layer_prefix(layer), spec.hidden_size
    mlp: MoeWeights | MlpWeights
    if layer in spec.moe_layers:
        mlp = _read_moe(spec, source, moe_block(source, names, layer))
    else:
        mlp = MlpWeights.read(source, f"{prefix}mlp.", hidden, spec.intermediate_size)
    return LayerWeights(
        input_norm=source.take(f"{prefix}input_layernorm.weight", (hidden,)),
        attention=AttentionWeights.read(spec, source, f"{prefix}self_attn."),
        post_attention_norm=source.take(f"{prefix}post_attention_layernorm.weight", (hidden,)),
        mlp=mlp,
    )


def _read_moe(spec: ModelSpec, source: WeightSource, block: str) -> MoeWeights:
    hidden, size = spec.hidden_size, spec.shared_expert_size
    return MoeWeights(
        router=source.take(f"{block}gate.weight", (spec.num_experts, hidden)),
        shared_expert=MlpWeights.read(source, f"{block}shared_expert.", hidden, size)
        if size
        else None,
        shared_gate=source.take(f"{block}shared_expert_gate.weight", (1, hidden)) if size else None,
    )
