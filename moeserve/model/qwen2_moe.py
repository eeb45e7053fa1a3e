"""Qwen2-MoE: a gated shared expert beside the routed ones; biases on q, k and v."""

from moeserve.model.architecture import Architecture

QWEN2_MOE = Architecture(
    name="Qwen2MoeForCausalLM",
    model_type="qwen2_moe",
    qkv_bias_field="qkv_bias",
    qkv_bias_default=True,
    window="switched_alternating",
    shared_expert=True,
)
