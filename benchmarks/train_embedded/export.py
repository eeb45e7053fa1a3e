"""Convert between the trainer's parameters and a checkpoint folder in Hugging Face layout.

    python -m benchmarks.train_embedded.export --trained run/trained.safetensors \\
        --tokenizer tokenizer.json --out checkpoint
"""

import argparse
import json
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from .model import NORM_EPSILON, ModelShape

CHAT_TEMPLATE = (
    "{% for m in messages %}"
    "{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
# Parameters that only change their name: trainer -> checkpoint.
LAYER_NAMES = {
    "attention.out": "self_attn.o_proj.weight",
    "attention.query_norm.weight": "self_attn.q_norm.weight",
    "attention.key_norm.weight": "self_attn.k_norm.weight",
    "attention_norm.weight": "input_layernorm.weight",
    "expert_norm.weight": "post_attention_layernorm.weight",
    "router": "mlp.gate.weight",
}
MODEL_NAMES = {"embedding": "model.embed_tokens.weight", "norm.weight": "model.norm.weight"}
QKV_NAMES = [f"self_attn.{kind}_proj.weight" for kind in "qkv"]


def to_checkpoint(trained: dict[str, Tensor], shape: ModelShape) -> dict[str, Tensor]:
    """Return the tensors of a published checkpoint, in bfloat16."""
    tensors = {target: trained[source] for source, target in MODEL_NAMES.items()}
    for layer in range(shape.num_layers):
        source, target = f"blocks.{layer}.", f"model.layers.{layer}."
        for name, published in LAYER_NAMES.items():
            tensors[target + published] = trained[source + name]
        parts = torch.split(trained[source + "attention.qkv"], shape.qkv_sizes)
        tensors |= {target + name: part for name, part in zip(QKV_NAMES, parts, strict=True)}
        for expert_id in range(shape.num_experts):
            expert = f"{target}mlp.experts.{expert_id}."
            gate, up = trained[source + "gate_up"][expert_id].chunk(2)
            tensors[expert + "gate_proj.weight"] = gate
            tensors[expert + "up_proj.weight"] = up
            tensors[expert + "down_proj.weight"] = trained[source + "down"][expert_id]
    return {name: tensor.to(torch.bfloat16).contiguous() for name, tensor in tensors.items()}


def from_checkpoint(tensors: dict[str, Tensor], shape: ModelShape) -> dict[str, Tensor]:
    """Return the trainer's parameters; the inverse of to_checkpoint up to rounding."""
    trained = {source: tensors[target] for source, target in MODEL_NAMES.items()}
    for layer in range(shape.num_layers):
        source, target = f"blocks.{layer}.", f"model.layers.{layer}."
        for name, published in LAYER_NAMES.items():
            trained[source + name] = tensors[target + published]
        trained[source + "attention.qkv"] = torch.cat([tensors[target + n] for n in QKV_NAMES])
        experts = [f"{target}mlp.experts.{i}." for i in range(shape.num_experts)]
        trained[source + "gate_up"] = torch.stack(
            [
                torch.cat([tensors[e + "gate_proj.weight"], tensors[e + "up_proj.weight"]])
                for e in experts
            ]
        )
        trained[source + "down"] = torch.stack([tensors[e + "down_proj.weight"] for e in experts])
    return trained


def load_pretrained(folder: Path) -> dict[str, Tensor]:
    """Return the trainer's parameters from a checkpoint folder of the default shape."""
    return from_checkpoint(load_file(folder / "model.safetensors"), ModelShape())


def blend(
    base: dict[str, Tensor], trained: dict[str, Tensor], *, share: float
) -> dict[str, Tensor]:
    """Return base + share * (trained - base): averages out the noise of an undecayed end."""
    return {name: torch.lerp(base[name].float(), trained[name], share) for name in trained}


def model_config(shape: ModelShape) -> dict[str, Any]:
    """Return config.json of the checkpoint."""
    return {
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "hidden_size": shape.hidden_size,
        "num_hidden_layers": shape.num_layers,
        "num_attention_heads": shape.num_heads,
        "num_key_value_heads": shape.num_kv_heads,
        "head_dim": shape.head_dim,
        "intermediate_size": shape.expert_size * shape.top_k,
        "moe_intermediate_size": shape.expert_size,
        "num_experts": shape.num_experts,
        "num_experts_per_tok": shape.top_k,
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "vocab_size": shape.vocab_size,
        "tie_word_embeddings": True,
        "rms_norm_eps": NORM_EPSILON,
        "rope_theta": shape.rope_theta,
        "max_position_embeddings": shape.max_length,
        "hidden_act": "silu",
        "attention_bias": False,
        "attention_dropout": 0.0,
        "router_aux_loss_coef": 0.01,
        "torch_dtype": "bfloat16",
        "bos_token_id": 0,
        "eos_token_id": 2,
        "pad_token_id": 0,
        "initializer_range": 0.02,
        "use_cache": True,
        "use_sliding_window": False,
        "sliding_window": None,
        "max_window_layers": shape.num_layers,
        "output_router_logits": False,
    }


def tokenizer_config(shape: ModelShape) -> dict[str, Any]:
    """Return tokenizer_config.json, with the ChatML template."""
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<|endoftext|>",
        "eos_token": "<|im_end|>",
        "pad_token": "<|endoftext|>",
        "model_max_length": shape.max_length,
        "chat_template": CHAT_TEMPLATE,
        "clean_up_tokenization_spaces": False,
        "add_bos_token": False,
    }


def generation_config() -> dict[str, Any]:
    """Return generation_config.json; generation ends at the end of a turn or of a text."""
    return {
        "bos_token_id": 0,
        "eos_token_id": [2, 0],
        "pad_token_id": 0,
        "do_sample": True,
        "temperature": 0.7,
        "top_p": 0.9,
    }


def write_checkpoint(trained: dict[str, Tensor], tokenizer: Path, out: Path) -> None:
    """Write the checkpoint folder."""
    shape = ModelShape()
    out.mkdir(parents=True, exist_ok=True)
    tensors = to_checkpoint(trained, shape)
    weights = out / "model.safetensors"
    save_file(tensors, weights, metadata={"format": "pt"})
    weights.chmod(0o644)  # safetensors writes files that only their owner can read
    configs = {
        "config": model_config(shape),
        "tokenizer_config": tokenizer_config(shape),
        "generation_config": generation_config(),
    }
    for name, config in configs.items():
        (out / f"{name}.json").write_text(json.dumps(config, indent=1) + "\n")
    if tokenizer.resolve() != (out / "tokenizer.json").resolve():
        shutil.copyfile(tokenizer, out / "tokenizer.json")


def parse_args() -> argparse.Namespace:
    """Return the command line options."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--trained", type=Path, required=True, help="trained.safetensors")
    parser.add_argument("--tokenizer", type=Path, required=True, help="tokenizer.json")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--base", type=Path, help="checkpoint folder to blend with")
    parser.add_argument("--share", type=float, default=1.0, help="of the trained model")
    return parser.parse_args()


def main() -> None:
    """Export a trained model."""
    args = parse_args()
    trained = load_file(args.trained)
    if args.base:
        trained = blend(load_pretrained(args.base), trained, share=args.share)
    write_checkpoint(trained, args.tokenizer, args.out)


if __name__ == "__main__":
    main()
