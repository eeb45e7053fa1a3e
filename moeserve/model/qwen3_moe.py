"""Qwen3-MoE: queries and keys are normalised per head; an optional window for all layers."""

from moeserve.model.architecture import Architecture

QWEN3_MOE = Architecture(
    name="Qwen3MoeForCausalLM",
    model_type="qwen3_moe",
    qk_norm="head",
    qkv_bias_field="attention_bias",
    output_bias_field="attention_bias",
    window="switched",
)
