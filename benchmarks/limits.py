"""The physical limit of a machine for a model: what no engine can beat, in seconds and tokens/s.

    python -m benchmarks.limits MODEL_FOLDER [--threads N]

Two things are measured: how fast all threads together read memory that no cache holds, and the rate
of large matrix products. Everything else is arithmetic on the shape in config.json:

- a decode step must read the attention weights, the router, the *distinct* experts that its tokens
  chose (uniform routing expected) and the head once, and the KV cache of every request;
- a prefill must do the multiplications of its tokens;
- a step takes at least the larger of its memory time and its arithmetic time.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks import report

DTYPE_BYTES = {"bfloat16": 2, "float16": 2, "float32": 4}


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class ModelShape:
    """The sizes of a decoder whose every layer is a mixture-of-experts layer."""

    num_layers: int
    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    num_experts: int
    top_k: int
    expert_size: int
    vocab_size: int
    dtype_bytes: int

    @property
    def attention_weights(self) -> int:
        """Weights of the q, k, v and o projections and the router of one layer."""
        q_and_o = 2 * self.hidden_size * self.num_heads * self.head_dim
        k_and_v = 2 * self.hidden_size * self.num_kv_heads * self.head_dim
        return q_and_o + k_and_v + self.hidden_size * self.num_experts

    @property
    def expert_weights(self) -> int:
        """Weights of one expert: gate, up and down."""
        return 3 * self.hidden_size * self.expert_size

    @property
    def head_weights(self) -> int:
        """Weights of the output head."""
        return self.hidden_size * self.vocab_size

    @property
    def kv_bytes_per_token(self) -> int:
        """KV cache bytes of one token over all layers."""
        return self.num_layers * 2 * self.num_kv_heads * self.head_dim * self.dtype_bytes


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Machine:
    """Measured ceilings."""

    read_bytes_per_s: float
    flops_per_s: float


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class StepFloor:
    """Least work of one forward pass, and the least time it takes."""

    num_bytes: float
    flops: float
    time_s: float


def read_shape(folder: Path, dtype: str | None = None) -> ModelShape:
    """The shape in ``folder``/config.json; ``dtype`` overrides the checkpoint's.

    Raises:
        ValueError: the model is not a mixture of experts in every layer, or the dtype is unknown.
    """
    config: dict[str, Any] = json.loads((folder / "config.json").read_text())
    num_experts = config.get("num_experts") or config.get("num_local_experts")
    if not num_experts or config.get("mlp_only_layers") or config.get("decoder_sparse_step", 1) > 1:
        raise ValueError(f"{folder}: the floor is known for models with experts in every layer")
    dtype = dtype or config.get("dtype") or config.get("torch_dtype")
    if dtype not in DTYPE_BYTES:
        raise ValueError(f"dtype = {dtype!r}: must be one of {', '.join(DTYPE_BYTES)}")
    num_heads = config["num_attention_heads"]
    return ModelShape(
        num_layers=config["num_hidden_layers"],
        hidden_size=config["hidden_size"],
        num_heads=num_heads,
        num_kv_heads=config.get("num_key_value_heads") or num_heads,
        head_dim=config.get("head_dim") or config["hidden_size"] // num_heads,
        num_experts=num_experts,
        top_k=config["num_experts_per_tok"],
        expert_size=config.get("moe_intermediate_size") or config["intermediate_size"],
        vocab_size=config["vocab_size"],
        dtype_bytes=DTYPE_BYTES[dtype],
    )


def expected_distinct_experts(num_experts: int, top_k: int, num_tokens: int) -> float:
    """Distinct experts of a layer that ``num_tokens`` tokens choose, if all are equally likely."""
    return num_experts * (1 - (1 - top_k / num_experts) ** num_tokens)


def step_floor(
    shape: ModelShape, machine: Machine, *, num_tokens: int, num_logits: int, context: float
) -> StepFloor:
    """Floor of a forward pass of ``num_tokens`` tokens that yields ``num_logits`` rows of logits.

    context: mean number of KV entries a token attends to, itself included.
    KV bytes are those of ``num_logits`` requests of that context: each is read once.
    """
    distinct = expected_distinct_experts(shape.num_experts, shape.top_k, num_tokens)
    layer = shape.attention_weights + distinct * shape.expert_weights
    weights = shape.num_layers * layer + shape.head_weights
    num_bytes = weights * shape.dtype_bytes + num_logits * context * shape.kv_bytes_per_token
    per_token = shape.attention_weights + shape.top_k * shape.expert_weights
    attention = 2 * shape.num_heads * shape.head_dim * context  # q.k and the weighted sum of v
    flops = 2 * num_tokens * shape.num_layers * (per_token + attention)
    flops += 2 * num_logits * shape.head_weights
    time_s = max(num_bytes / machine.read_bytes_per_s, flops / machine.flops_per_s)
    return StepFloor(num_bytes=num_bytes, flops=flops, time_s=time_s)


def decode_floor(
    shape: ModelShape, machine: Machine, *, concurrency: int, context: float
) -> StepFloor:
    """Floor of one decode step of ``concurrency`` requests with ``context`` tokens each."""
    return step_floor(
        shape, machine, num_tokens=concurrency, num_logits=concurrency, context=context
    )


def prefill_floor(
    shape: ModelShape, machine: Machine, *, concurrency: int, input_len: int
) -> StepFloor:
    """Floor of the prefill of ``concurrency`` prompts of ``input_len`` tokens."""
    return step_floor(
        shape,
        machine,
        num_tokens=concurrency * input_len,
        num_logits=concurrency,
        context=(input_len + 1) / 2,
    )


def closed_loop_floor(
    shape: ModelShape, machine: Machine, *, concurrency: int, input_len: int, output_len: int
) -> dict[str, float]:
    """Floor of ``concurrency`` requests that start together.

    Returns prefill_s, decode_step_s, total_s, output_tokens_per_s and prefill_tokens_per_s. The
    first token comes out of the prefill, the others out of ``output_len - 1`` decode steps.
    """
    prefill = prefill_floor(shape, machine, concurrency=concurrency, input_len=input_len)
    step = decode_floor(shape, machine, concurrency=concurrency, context=input_len + output_len / 2)
    total_s = prefill.time_s + (output_len - 1) * step.time_s
    return {
        "prefill_s": prefill.time_s,
        "decode_step_s": step.time_s,
        "decode_step_bytes": step.num_bytes,
        "total_s": total_s,
        "output_tokens_per_s": concurrency * output_len / total_s,
        "prefill_tokens_per_s": concurrency * input_len / prefill.time_s,
    }


def measure(*, threads: int, num_bytes: int = 1 << 30, size: int = 1024) -> dict[str, float]:
    """Measures this machine with ``threads`` threads; bytes/s and FLOP/s, best of several runs.

    num_bytes: size of the array that is read; must be many times the last-level cache.
    size: the matrices are [size, size].
    """
    import torch

    torch.set_num_threads(threads)
    read_s = _best_s(torch.ones(num_bytes // 4).sum, 5)
    result = {"read_bytes_per_s": num_bytes / read_s}
    for name in ("float32", "bfloat16"):
        left = torch.randn(size, size).to(getattr(torch, name))
        seconds = _best_s(functools.partial(torch.nn.functional.linear, left, left), 5)
        result[f"{name}_flops_per_s"] = 2 * size**3 / seconds
    return result


def machine_of(measured: dict[str, float]) -> Machine:
    """The ceilings for a floor; arithmetic at the faster of the two precisions.

    An engine is free to widen bf16 weights in its kernels, so the floor of a bf16 model must not
    assume a slow bf16 matrix product on a CPU without bf16 instructions.
    """
    return Machine(
        read_bytes_per_s=measured["read_bytes_per_s"],
        flops_per_s=max(measured["float32_flops_per_s"], measured["bfloat16_flops_per_s"]),
    )


def _best_s(run: Callable[[], object], repetitions: int) -> float:
    run()
    seconds = []
    for _ in range(repetitions):
        start = time.perf_counter()
        run()
        seconds.append(time.perf_counter() - start)
    return min(seconds)  # a limit: being held up by others must not lower it


def main() -> None:
    """Command line: measures, then prints one JSON line."""
    parser = argparse.ArgumentParser(description="Print the floor of a model on this machine.")
    parser.add_argument("model", type=Path, help="folder with a config.json")
    parser.add_argument("--dtype", choices=sorted(DTYPE_BYTES), help="default: the checkpoint's")
    parser.add_argument("--threads", type=int, default=report.usable_cores())
    parser.add_argument("--concurrency", default="1,8,32")
    parser.add_argument("--input-len", type=int, default=128)
    parser.add_argument("--output-len", type=int, default=64)
    parser.add_argument("--prefill-len", type=int, default=1024)
    args = parser.parse_args()
    shape = read_shape(args.model, args.dtype)
    measured = measure(threads=args.threads)
    machine = machine_of(measured)
    lengths = [(int(c), args.input_len, args.output_len) for c in args.concurrency.split(",")]
    floors = [
        {"concurrency": concurrency, "input_len": input_len, "output_len": output_len}
        | report.rounded(
            closed_loop_floor(
                shape, machine, concurrency=concurrency, input_len=input_len, output_len=output_len
            )
        )
        for concurrency, input_len, output_len in [*lengths, (1, args.prefill_len, 1)]
    ]
    report.print_json(
        {
            "benchmark": "limits",
            "model": args.model.name,
            "threads": args.threads,
            "measured": report.rounded(measured),
            "floors": floors,
            **report.provenance("torch"),
        }
    )


if __name__ == "__main__":
    main()
