"""Small random checkpoints of every architecture, written by transformers itself.

``make_checkpoint`` is the one entry; tests of the model, the engine and the command line share it.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import torch
import transformers

from moeserve.config import embedded_model_path

ARCHITECTURES = ("qwen3_moe", "qwen2_moe", "mixtral", "olmoe")
VOCAB_SIZE = 4096  # of the embedded model's tokenizer
_TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja")


def make_checkpoint(
    path: Path,
    arch: str,
    *,
    seed: int = 0,
    num_experts: int = 8,
    top_k: int = 2,
    num_layers: int = 2,
    dtype: str = "float32",
    fused: bool = False,
    max_shard_size: str = "5GB",
    std: float = 0.2,
    **changes: Any,
) -> Path:
    """Writes config.json, safetensors and the embedded model's tokenizer to ``path``.

    Args:
        arch: one of ``ARCHITECTURES``.
        fused: experts in the 3-D tensors of transformers' memory, else one by one.
        max_shard_size: small values, such as ``"100KB"``, give several files and an index.
        std: standard deviation of the weights; large enough that greedy text does not hang on
            the last bit.
        changes: further fields of transformers' config.

    Returns:
        ``path``.
    """
    config = _config(arch, num_experts, top_k, num_layers, changes)
    torch.manual_seed(seed)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.normal_(1.0 if name.endswith("norm.weight") else 0.0, std)
    model = model.to(getattr(torch, dtype))
    model.config.dtype = getattr(torch, dtype)
    model.save_pretrained(path, max_shard_size=max_shard_size, save_original_format=not fused)
    for name in _TOKENIZER_FILES:
        if (embedded_model_path() / name).exists():
            shutil.copy(embedded_model_path() / name, path)
    return path


def rewrite_config(path: Path, *, drop: tuple[str, ...] = (), **changes: Any) -> None:
    """Changes fields of the checkpoint's config.json."""
    file = path / "config.json"
    config = json.loads(file.read_text()) | changes
    file.write_text(json.dumps({key: value for key, value in config.items() if key not in drop}))


def _config(
    arch: str, num_experts: int, top_k: int, num_layers: int, changes: dict[str, Any]
) -> transformers.PretrainedConfig:
    fields: dict[str, Any] = {
        "vocab_size": VOCAB_SIZE,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": num_layers,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "num_experts_per_tok": top_k,
        "max_position_embeddings": 1024,
        "bos_token_id": 0,
        "eos_token_id": 2,
        "pad_token_id": 0,
    }
    if arch == "mixtral":
        fields |= {"num_local_experts": num_experts}
    else:
        fields |= {"num_experts": num_experts}
    if arch in ("qwen3_moe", "qwen2_moe"):
        fields |= {"moe_intermediate_size": 24}
    if arch == "qwen3_moe":
        fields |= {"head_dim": 16, "norm_topk_prob": True}
    if arch == "qwen2_moe":
        fields |= {"shared_expert_intermediate_size": 40}
    return transformers.AutoConfig.for_model(arch, **(fields | changes))
