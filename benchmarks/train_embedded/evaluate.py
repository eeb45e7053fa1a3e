"""Held-out loss and routing skew of a checkpoint folder, per domain, computed by transformers.

    python -m benchmarks.train_embedded.evaluate --checkpoint FOLDER --tokens tokens
    python -m benchmarks.train_embedded.evaluate ... --write-sample sample.json

Windows are the first of each domain's held-out tokens, one after the other.
"""

import argparse
import hashlib
import json
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import Qwen3MoeForCausalLM

from .tokenizer import DOMAINS

COLD_SHARE = 0.25  # an expert is cold below this part of the mean load


@dataclass(frozen=True, slots=True, kw_only=True)
class DomainResult:
    """Mean loss in nats per token, and the load of each expert over the mean load."""

    loss: float
    load: np.ndarray  # [num_layers, num_experts]

    @property
    def skew(self) -> list[float]:
        """The load of the busiest expert over the mean load, per layer."""
        return [float(value) for value in self.load.max(1)]


def read_windows(path: Path, *, length: int, num_windows: int) -> np.ndarray:
    """Return [windows, length + 1] token ids; neighbours share one token."""
    token_ids = np.fromfile(path, dtype=np.uint16).astype(np.int64)
    count = min(num_windows, (len(token_ids) - 1) // length)
    if count == 0:
        raise ValueError(f"{path} holds {len(token_ids)} tokens, fewer than one window")
    return np.stack([token_ids[i * length : (i + 1) * length + 1] for i in range(count)])


@torch.inference_mode()
def evaluate_windows(model: Qwen3MoeForCausalLM, windows: np.ndarray) -> DomainResult:
    """Return the loss and the expert load over the windows, four at a time."""
    config = model.config
    counts = torch.zeros(config.num_hidden_layers, config.num_experts)
    losses = []
    for start in range(0, len(windows), 4):
        token_ids = torch.from_numpy(windows[start : start + 4])
        output = model(token_ids[:, :-1], output_router_logits=True)
        targets = token_ids[:, 1:].reshape(-1)
        logits = output.logits.float().view(len(targets), -1)
        losses.append(F.cross_entropy(logits, targets, reduction="none"))
        counts += count_choices(output.router_logits, config.num_experts_per_tok)
    load = counts / counts.mean(1, keepdim=True)
    return DomainResult(loss=torch.cat(losses).mean().item(), load=load.numpy())


def count_choices(router_logits: tuple[Tensor, ...], top_k: int) -> Tensor:
    """Return [num_layers, num_experts]: how many tokens chose each expert."""
    layers = []
    for logits in router_logits:
        chosen = logits.topk(top_k, -1).indices.reshape(-1)
        layers.append(torch.bincount(chosen, minlength=logits.shape[-1]))
    return torch.stack(layers).float()


def mean_result(results: dict[str, DomainResult]) -> DomainResult:
    """Return the mean loss and the load when every domain has the same weight."""
    return DomainResult(
        loss=sum(result.loss for result in results.values()) / len(results),
        load=np.mean([result.load for result in results.values()], axis=0),
    )


def print_table(results: dict[str, DomainResult]) -> None:
    """Print a Markdown table: loss, skew per layer, and the share of cold experts."""
    layers = range(len(next(iter(results.values())).skew))
    print("| domain | loss | " + " | ".join(f"L{layer}" for layer in layers) + " | cold |")
    print("|---" * (len(layers) + 3) + "|")
    for domain, result in {**results, "all": mean_result(results)}.items():
        skew = " | ".join(f"{value:.2f}" for value in result.skew)
        cold = (result.load < COLD_SHARE).mean()
        print(f"| {domain} | {result.loss:.4f} | {skew} | {cold:.0%} |")


def write_sample(
    path: Path, weights: Path, windows: dict[str, np.ndarray], losses: dict[str, float]
) -> None:
    """Write windows, their losses and the weights' checksum, for the test of the shipped file."""
    domains = {
        domain: {"loss": round(losses[domain], 5), "windows": windows[domain].tolist()}
        for domain in windows
    }
    sample = {"sha256": hashlib.sha256(weights.read_bytes()).hexdigest(), "domains": domains}
    path.write_text(json.dumps(sample, separators=(",", ":")) + "\n")


def parse_args() -> argparse.Namespace:
    """Return the command line options."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--checkpoint", type=Path, required=True)
    parser.add_argument("--tokens", type=Path, required=True)
    parser.add_argument("--domains", nargs="+", default=list(DOMAINS))
    parser.add_argument("--length", type=int, default=256)
    parser.add_argument("--num-windows", type=int, default=24)
    parser.add_argument("--json", type=Path, help="write losses and skew to this file")
    parser.add_argument("--write-sample", type=Path, help="write windows with their losses")
    return parser.parse_args()


def main() -> None:
    """Evaluate a checkpoint."""
    args = parse_args()
    model = Qwen3MoeForCausalLM.from_pretrained(args.checkpoint, dtype=torch.float32).eval()
    windows, results = {}, {}
    for domain in args.domains:
        path = args.tokens / f"{domain}.heldout.bin"
        windows[domain] = read_windows(path, length=args.length, num_windows=args.num_windows)
        results[domain] = evaluate_windows(model, windows[domain])
    print_table(results)
    if args.json:
        rows = {name: {"loss": r.loss, "skew": r.skew} for name, r in results.items()}
        args.json.write_text(json.dumps(rows, indent=1) + "\n")
    if args.write_sample:
        losses = {name: result.loss for name, result in results.items()}
        write_sample(args.write_sample, args.checkpoint / "model.safetensors", windows, losses)


if __name__ == "__main__":
    main()
