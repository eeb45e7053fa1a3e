"""What a model is: a frozen ``ModelSpec`` read from a Hugging Face ``config.json``.

Both generations of spelling are read (``num_experts`` and ``num_local_experts``; ``rope_theta``
plus ``rope_scaling`` and ``rope_parameters``; ``torch_dtype`` and ``dtype``). What can not be
honoured is refused by name, never ignored. No torch here: whoever needs only the numbers can
import this.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from moeserve.model import architectures
from moeserve.model.architecture import Architecture, QkNorm
from moeserve.model.config_fields import ConfigFields
from moeserve.model.rope_spec import RopeSpec, read_rope


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelSpec:
    """The shape of a decoder and how its parts behave.

    moe_layers: model layer indices that have experts, the others are dense with
    ``intermediate_size``; moe_intermediate_size: width of one expert; shared_expert_size: width of
    the expert that every token passes, 0 for none; renormalize: whether the k router weights are
    scaled to sum to 1; sliding_windows: per layer, tokens that a token sees including itself, None
    for all; clip_qkv: bound of |q|, |k|, |v| or None; dtype: of the checkpoint.
    """

    architecture: str
    vocab_size: int
    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_position_embeddings: int
    rms_norm_eps: float
    rope: RopeSpec
    sliding_windows: tuple[int | None, ...]
    qk_norm: QkNorm
    qkv_bias: bool
    output_bias: bool
    clip_qkv: float | None
    intermediate_size: int
    moe_layers: tuple[int, ...]
    num_experts: int
    top_k: int
    moe_intermediate_size: int
    renormalize: bool
    shared_expert_size: int
    tie_word_embeddings: bool
    dtype: Literal["float32", "bfloat16", "float16"]
    bos_token_id: int | None
    eos_token_ids: tuple[int, ...]


def read_spec(folder: Path) -> ModelSpec:
    """The spec of the checkpoint in ``folder``.

    Raises:
        ValueError: no readable ``config.json``, or a field is missing, unsupported or nonsense;
            the text names it, its value and what would be right.
    """
    path = folder / "config.json"
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ValueError(f"{path}: {error.strerror}") from error
    except ValueError as error:
        raise ValueError(f"{path}: not valid JSON: {error}") from error
    if not isinstance(config, dict):
        raise ValueError(f"{path}: must be a JSON object")
    return spec_from_config(config)


def spec_from_config(config: Mapping[str, Any]) -> ModelSpec:
    """The spec that the content of a ``config.json`` describes.

    Raises:
        ValueError: as ``read_spec``.
    """
    fields = ConfigFields(config)
    traits = architectures.find(config.get("architectures"), config.get("model_type"))
    fields.one_of("hidden_act", ("silu",), default="silu")
    fields.refuse("quantization_config", "quantised checkpoints are not supported")
    hidden_size = fields.integer("hidden_size")
    num_layers = fields.integer("num_hidden_layers", most=1 << 16)
    num_heads = fields.integer("num_attention_heads")
    num_experts = fields.integer("num_experts", "num_local_experts")
    moe_layers = _moe_layers(fields, num_layers)
    return ModelSpec(
        architecture=traits.name,
        vocab_size=fields.integer("vocab_size"),
        hidden_size=hidden_size,
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=_num_kv_heads(fields, num_heads),
        head_dim=_head_dim(fields, hidden_size, num_heads),
        max_position_embeddings=fields.integer("max_position_embeddings"),
        rms_norm_eps=fields.number("rms_norm_eps", default=traits.rms_norm_eps, most=1.0),
        rope=read_rope(fields, traits.rope_theta),
        sliding_windows=_sliding_windows(fields, traits, num_layers),
        qk_norm=traits.qk_norm,
        qkv_bias=_bias(fields, traits.qkv_bias_field, traits.qkv_bias_default),
        output_bias=_bias(fields, traits.output_bias_field, False),
        clip_qkv=fields.number("clip_qkv", default=None),
        intermediate_size=_dense_size(fields, num_layers > len(moe_layers)),
        moe_layers=moe_layers,
        num_experts=num_experts,
        top_k=fields.integer("num_experts_per_tok", most=num_experts),
        moe_intermediate_size=fields.integer(traits.expert_size_field),
        renormalize=_renormalize(fields, traits),
        shared_expert_size=_shared_expert_size(fields, traits),
        tie_word_embeddings=fields.flag("tie_word_embeddings", default=False),
        dtype=fields.one_of(
            "dtype", ("float32", "bfloat16", "float16"), "torch_dtype", default="float32"
        ),
        bos_token_id=fields.optional_integer("bos_token_id", least=0),
        eos_token_ids=fields.integers("eos_token_id"),
    )


def _num_kv_heads(fields: ConfigFields, num_heads: int) -> int:
    num_kv_heads = fields.integer("num_key_value_heads", default=num_heads, most=num_heads)
    if num_heads % num_kv_heads:
        raise ValueError(
            f"num_key_value_heads = {num_kv_heads}: must divide num_attention_heads = {num_heads}"
        )
    return num_kv_heads


def _head_dim(fields: ConfigFields, hidden_size: int, num_heads: int) -> int:
    head_dim = fields.integer("head_dim", default=0, least=0)
    if not head_dim and hidden_size % num_heads:
        raise ValueError(
            f"hidden_size = {hidden_size}: must be a multiple of num_attention_heads = "
            f"{num_heads} where head_dim is not given"
        )
    head_dim = head_dim or hidden_size // num_heads
    if head_dim % 2:
        raise ValueError(f"head_dim = {head_dim}: must be even")
    return head_dim


def _moe_layers(fields: ConfigFields, num_layers: int) -> tuple[int, ...]:
    step = fields.integer("decoder_sparse_step", default=1)
    dense = fields.integers("mlp_only_layers")
    for index in dense:
        if index >= num_layers:
            raise ValueError(f"mlp_only_layers has {index}: there are {num_layers} layers")
    layers = tuple(i for i in range(num_layers) if i not in dense and (i + 1) % step == 0)
    if not layers:
        raise ValueError(
            f"decoder_sparse_step = {step}, mlp_only_layers = {list(dense)}: leave no layer with "
            "experts; dense models are not served"
        )
    return layers


def _dense_size(fields: ConfigFields, has_dense_layers: bool) -> int:
    if has_dense_layers:
        return fields.integer("intermediate_size")
    return fields.integer("intermediate_size", default=0, least=0)


def _bias(fields: ConfigFields, name: str | None, default: bool) -> bool:
    return fields.flag(name, default=default) if name is not None else False


def _renormalize(fields: ConfigFields, traits: Architecture) -> bool:
    if traits.renormalize is not None:
        return traits.renormalize
    return fields.flag("norm_topk_prob", default=False)


def _shared_expert_size(fields: ConfigFields, traits: Architecture) -> int:
    return fields.integer("shared_expert_intermediate_size") if traits.shared_expert else 0


def _sliding_windows(
    fields: ConfigFields, traits: Architecture, num_layers: int
) -> tuple[int | None, ...]:
    if traits.window == "all":
        return (fields.optional_integer("sliding_window", least=1),) * num_layers
    if traits.window == "none" or not fields.flag("use_sliding_window", default=False):
        return (None,) * num_layers
    window = fields.integer("sliding_window")
    if traits.window == "switched":
        return (window,) * num_layers
    kinds = _layer_types(fields, num_layers)
    return tuple(window if kind == "sliding_attention" else None for kind in kinds)


def _layer_types(fields: ConfigFields, num_layers: int) -> list[str]:
    kinds = fields.raw.get("layer_types")
    if kinds is None:
        most = fields.integer("max_window_layers", default=28, least=0)
        return [
            "sliding_attention" if i % 2 == 0 and i < most else "full_attention"
            for i in range(num_layers)
        ]
    known = {"sliding_attention", "full_attention"}
    if not isinstance(kinds, list) or len(kinds) != num_layers or not known.issuperset(kinds):
        raise ValueError(
            f"layer_types = {str(kinds)[:80]}: must be {num_layers} of {', '.join(sorted(known))}"
        )
    return kinds
