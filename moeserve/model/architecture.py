"""What sets one architecture apart from the next: plain data, no torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

QkNorm = Literal["none", "head", "full"]


@dataclass(frozen=True, kw_only=True, slots=True)
class ExpertNames:
    """How a checkpoint names the tensors of its experts.

    block: the MoE block within a layer; gate, up, down: the projections of one expert, as in
    ``model.layers.0.{block}.experts.7.{gate}.weight``. Fused, all experts of a layer are in
    ``experts.gate_up_proj`` [E, 2I, H] (gate rows first) and ``experts.down_proj`` [E, H, I].
    Written by transformers in its in-memory layout, the block is always called ``mlp``.
    """

    block: str = "mlp"
    gate: str = "gate_proj"
    up: str = "up_proj"
    down: str = "down_proj"


@dataclass(frozen=True, kw_only=True, slots=True)
class Architecture:
    """What an architecture fixes or assumes beyond what a ``config.json`` says.

    name, model_type: as in the config's ``architectures`` and ``model_type``.
    qk_norm: RMS norm of queries and keys before rotation: none, per head, or over all heads.
    expert_size_field: the field with the width of an expert.
    qkv_bias_field, output_bias_field: the field that switches the bias on; None: there is none.
    qkv_bias_default: what holds where the config is silent.
    renormalize: whether router weights are scaled to sum to 1; None: the config says.
    window: layers with the sliding window: none; all, if a width is given; all or every other one,
    if ``use_sliding_window``.
    shared_expert: whether each MoE layer has an expert that every token passes.
    rope_theta, rms_norm_eps: where the config is silent.
    """

    name: str
    model_type: str
    expert_names: ExpertNames = ExpertNames()
    qk_norm: QkNorm = "none"
    expert_size_field: str = "moe_intermediate_size"
    qkv_bias_field: str | None = None
    qkv_bias_default: bool = False
    output_bias_field: str | None = None
    renormalize: bool | None = None
    window: Literal["none", "all", "switched", "switched_alternating"] = "none"
    shared_expert: bool = False
    rope_theta: float = 10000.0
    rms_norm_eps: float = 1e-6
