"""Builds the random-weight models that the benchmarks run: a Hugging Face folder, no download.

    python benchmarks/models.py mid-qwen3moe --out models/mid-qwen3moe

Seeds are fixed, so the weights are the same on every run. The tokenizer is a byte-level BPE trained
on the source text of the Python standard library, so it depends on the Python version.

Every linear has std gain / sqrt(fan_in), so that activations stay near unit scale at each depth.
The router's gain is 1: its logits are about N(0, 1) and the top-k varies from token to token, which
makes the number of distinct experts per step close to that of uniform random routing.
"""

from __future__ import annotations

import argparse
import math
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast, Qwen3MoeConfig, Qwen3MoeForCausalLM

SPECIAL_TOKENS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
PAD_TOKEN_ID, EOS_TOKEN_ID = 0, 2
SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
CHAT_TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
MODELS: dict[str, dict[str, Any]] = {
    "tiny-qwen3moe": {
        "vocab_size": 1024, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
        "num_key_value_heads": 2, "head_dim": 16, "num_experts": 8, "num_experts_per_tok": 2,
        "moe_intermediate_size": 32, "intermediate_size": 128,
    },
    # For bench_skew: most of a step is experts, and those are bound by arithmetic, not by reading.
    "skew-qwen3moe": {
        "vocab_size": 1024, "hidden_size": 256, "num_hidden_layers": 8, "num_attention_heads": 4,
        "num_key_value_heads": 2, "head_dim": 64, "num_experts": 16, "num_experts_per_tok": 8,
        "moe_intermediate_size": 512, "intermediate_size": 512,
    },
    "mid-qwen3moe": {
        "vocab_size": 32000, "hidden_size": 1024, "num_hidden_layers": 12,
        "num_attention_heads": 16, "num_key_value_heads": 4, "head_dim": 64, "num_experts": 64,
        "num_experts_per_tok": 8, "moe_intermediate_size": 256, "intermediate_size": 2048,
    },
}  # fmt: skip


def build(name: str, out: Path, *, seed: int = 0, dtype: torch.dtype = torch.bfloat16) -> int:
    """Writes the model ``name`` into the folder ``out``; returns its number of parameters.

    Raises:
        ValueError: no such model.
    """
    if name not in MODELS:
        raise ValueError(f"model = {name!r}: must be one of {', '.join(MODELS)}")
    config = _config(MODELS[name], dtype)
    torch.manual_seed(seed)
    model: Any = Qwen3MoeForCausalLM(config)  # the library's own annotations are incomplete
    model.to(dtype)
    _initialise(model, seed)
    model.generation_config.eos_token_id = EOS_TOKEN_ID
    model.generation_config.pad_token_id = PAD_TOKEN_ID
    model.save_pretrained(out, max_shard_size="2GB")
    train_tokenizer(config.vocab_size).save_pretrained(out)
    return sum(parameter.numel() for parameter in model.parameters())


def _config(shape: dict[str, Any], dtype: torch.dtype) -> Qwen3MoeConfig:
    config = Qwen3MoeConfig(
        **shape,
        norm_topk_prob=True,
        decoder_sparse_step=1,
        max_position_embeddings=4096,
        rms_norm_eps=1e-6,
        tie_word_embeddings=False,
        eos_token_id=EOS_TOKEN_ID,
        pad_token_id=PAD_TOKEN_ID,
        bos_token_id=None,
        rope_parameters={"rope_type": "default", "rope_theta": 1e6},
    )
    config.dtype = dtype
    return config


@torch.no_grad()
def _initialise(model: torch.nn.Module, seed: int) -> None:
    """Overwrites all parameters, in sorted order, from one generator."""
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in sorted(model.named_parameters()):
        if parameter.ndim == 1:  # norms: near 1, not exactly, so that they matter
            parameter.copy_(1.0 + 0.1 * torch.randn(parameter.shape, generator=generator))
            continue
        std = _std(name, fan_in=parameter.shape[-1])
        flat = parameter.view(-1)
        for start in range(0, flat.numel(), 1 << 24):  # 64 MiB of float32 at a time
            piece = flat[start : start + (1 << 24)]
            piece.copy_(torch.randn(piece.shape, generator=generator) * std)


def _std(name: str, *, fan_in: int) -> float:
    if "embed_tokens" in name:
        return 1.0  # tokens, not a shared mean, dominate the residual stream
    if "lm_head" in name:
        return 3.0 / math.sqrt(fan_in)
    return (2.0 if "down_proj" in name or "o_proj" in name else 1.0) / math.sqrt(fan_in)


def standard_library_text(num_chars: int) -> Iterator[str]:
    """The source files of the standard library in sorted order, about ``num_chars`` in all."""
    root = Path(sysconfig.get_path("stdlib"))
    for path in sorted(root.rglob("*.py")):
        if "site-packages" in path.parts or "dist-packages" in path.parts:
            continue
        try:
            text = path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError):  # the test suite holds files in odd encodings
            continue
        yield text
        num_chars -= len(text)
        if num_chars <= 0:
            return


def train_tokenizer(vocab_size: int) -> PreTrainedTokenizerFast:
    """A byte-level BPE with exactly ``vocab_size`` entries and a ChatML template.

    Raises:
        RuntimeError: the text at hand has too few distinct pieces for that many entries.
    """
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(SPLIT), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=SPECIAL_TOKENS,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(standard_library_text(vocab_size * 512), trainer)
    if tokenizer.get_vocab_size() != vocab_size:
        raise RuntimeError(f"tokenizer has {tokenizer.get_vocab_size()} entries, not {vocab_size}")
    return PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]
        tokenizer_object=tokenizer,
        eos_token=SPECIAL_TOKENS[EOS_TOKEN_ID],
        pad_token=SPECIAL_TOKENS[PAD_TOKEN_ID],
        chat_template=CHAT_TEMPLATE,
        model_max_length=4096,
        clean_up_tokenization_spaces=False,
    )


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description="Build a random-weight benchmark model.")
    parser.add_argument("name", choices=sorted(MODELS))
    parser.add_argument("--out", type=Path, required=True, help="folder to write")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    args = parser.parse_args()
    num_parameters = build(args.name, args.out, seed=args.seed, dtype=getattr(torch, args.dtype))
    print(f"{args.name}: {num_parameters / 1e6:.1f} M parameters in {args.out}")


if __name__ == "__main__":
    main()
