"""Mixtral: few large experts with names of their own; weights of the chosen always sum to 1."""

from moeserve.model.architecture import Architecture, ExpertNames

MIXTRAL = Architecture(
    name="MixtralForCausalLM",
    model_type="mixtral",
    expert_names=ExpertNames(block="block_sparse_moe", gate="w1", up="w3", down="w2"),
    expert_size_field="intermediate_size",
    renormalize=True,
    window="all",
    rope_theta=1e6,
    rms_norm_eps=1e-5,
)
