"""OLMoE: queries and keys are normalised over all heads at once, then clipped if so configured."""

from moeserve.model.architecture import Architecture

OLMOE = Architecture(
    name="OlmoeForCausalLM",
    model_type="olmoe",
    qk_norm="full",
    expert_size_field="intermediate_size",
    qkv_bias_field="attention_bias",
    output_bias_field="attention_bias",
    rms_norm_eps=1e-5,
)
