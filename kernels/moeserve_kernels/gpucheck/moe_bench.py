"""The expert FFN of known models: microseconds, share of the floor, and against libraries."""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import Any

import torch
from torch.nn import functional

from moeserve_kernels import floors, libraries
from moeserve_kernels.floors import MoeShape
from moeserve_kernels.gpucheck.measure import Timing, num_sets, time_calls
from moeserve_kernels.gpucheck.plan import Context, Item
from moeserve_kernels.operations.align import align
from moeserve_kernels.operations.moe import combine, moe_down, moe_ffn, moe_up
from moeserve_kernels.operations.quant import quantize_experts
from moeserve_kernels.weights import ExpertWeights

MODELS = {
    "qwen3-30b": MoeShape(128, 8, 2048, 768, 128),
    "deepseek-v3-ep8": MoeShape(256, 8, 7168, 2048, 32),
    "mixtral-8x7b": MoeShape(8, 2, 4096, 14336, 8),
    "olmoe-1b-7b": MoeShape(64, 8, 2048, 1024, 64),
}
_TOKENS = (1, 16, 64, 256, 1024, 4096, 16384)
_TINY = MoeShape(4, 2, 64, 32, 4)
_WEIGHT_BYTES = {"plain": 2.0, "fp8_channel": 1.0, "fp8_block": 1.0, "int8": 1.0, "int4": 0.53}


@dataclass(frozen=True)
class Experts:
    """A model's experts on one device; ``expert_map`` is None where it has them all."""

    shape: MoeShape
    w13: ExpertWeights
    w2: ExpertWeights
    expert_map: torch.Tensor | None


@dataclass(frozen=True)
class Step:
    """The inputs of one call."""

    x: torch.Tensor
    topk_weights: torch.Tensor
    topk_ids: torch.Tensor


def shape_of(model: str, *, dry: bool) -> MoeShape:
    """The model's shape; in a dry run a tiny one, sharded where the model is."""
    shape = MODELS[model]
    if not dry:
        return shape
    is_sharded = shape.local_experts < shape.num_experts
    return replace(_TINY, local_experts=2) if is_sharded else _TINY


def items(*, dry: bool) -> list[Item]:
    """Each model at each number of tokens."""
    if dry:
        return [_item("deepseek-v3-ep8", tokens, "plain") for tokens in (1, 9)]
    return [_item(model, tokens, "plain") for model in MODELS for tokens in _TOKENS]


def format_items(*, dry: bool) -> list[Item]:
    """Narrow weights, where reading them takes the time."""
    if dry:
        return [_item("qwen3-30b", 3, "int8")]
    return [
        _item("qwen3-30b", tokens, format)
        for format in ("int8", "fp8_block", "int4", "fp8_channel")
        for tokens in (1, 64, 1024)
    ]


def step_items(*, dry: bool) -> list[Item]:
    """What each of the four steps takes, and routing where a few experts take most tokens."""
    sizes = [("qwen3-30b", 3)] if dry else [("qwen3-30b", 64), ("qwen3-30b", 4096)]
    steps = [
        Item("moe_steps", f"{model} T={tokens}", 4.0, partial(_run_steps, model, tokens))
        for model, tokens in sizes
    ]
    skewed = [] if dry else [_item("qwen3-30b", tokens, "plain", True) for tokens in (64, 1024)]
    return [*steps, *skewed]


def _item(model: str, tokens: int, format: str, skewed: bool = False) -> Item:
    name = f"{model} {format} T={tokens}{' skewed' if skewed else ''}"
    return Item("moe", name, 6.0, partial(_run, model, tokens, format, skewed, name))


def _run(model: str, tokens: int, format: str, skewed: bool, name: str, context: Context) -> None:
    experts = experts_of(model, format, context.device, context.dry)
    shape = replace(experts.shape, bytes_per_weight=_WEIGHT_BYTES[format])
    floor = floors.moe_ffn(shape, tokens)
    steps = draw_steps(experts, tokens, floor.num_bytes, context, skewed=skewed)
    ours = time_calls([partial(ffn, experts, step) for step in steps])
    least = floor.microseconds(context.limits)
    peers = _peers(experts, steps, context) if format == "plain" else {}
    context.report.add(
        "moe",
        name,
        microseconds=ours.microseconds,
        floor_us=least,
        share_of_floor=least / ours.microseconds,
        bound=floor.bound(context.limits),
        tflops=floor.flops / ours.microseconds / 1e6,
        spread=ours.spread,
        graph=ours.is_graph,
        sets=len(steps),
        **{f"{peer}_us": one.microseconds for peer, one in peers.items()},
        **{f"{peer}_ratio": one.microseconds / ours.microseconds for peer, one in peers.items()},
    )


def ffn(experts: Experts, step: Step) -> torch.Tensor:
    """Our whole FFN."""
    return moe_ffn(
        step.x,
        experts.w13,
        experts.w2,
        step.topk_weights,
        step.topk_ids,
        expert_map=experts.expert_map,
    )


def experts_of(model: str, format: str, device: torch.device, dry: bool) -> Experts:
    """The experts with random weights; of several models the last one stays in memory."""
    key = model, format, device, dry
    if key not in _in_memory:
        _in_memory.clear()
        gc.collect()
        torch.cuda.empty_cache()
        _in_memory[key] = _draw_experts(*key)
    return _in_memory[key]


_in_memory: dict[tuple[str, str, torch.device, bool], Experts] = {}


def _draw_experts(model: str, format: str, device: torch.device, dry: bool) -> Experts:
    shape = shape_of(model, dry=dry)
    dtype = torch.float32 if dry else torch.bfloat16

    def draw(outputs: int, inputs: int) -> ExpertWeights:
        size = (shape.local_experts, outputs, inputs)
        weights = torch.empty(size, dtype=dtype, device=device).normal_(0, inputs**-0.5)
        return quantize_experts(weights, format)

    expert_map = None
    if shape.local_experts < shape.num_experts:
        expert_map = torch.full((shape.num_experts,), -1, dtype=torch.int32, device=device)
        mine = torch.arange(shape.local_experts, dtype=torch.int32, device=device)
        expert_map[: shape.local_experts] = mine
    inner, hidden = shape.intermediate_size, shape.hidden_size
    return Experts(shape, draw(2 * inner, hidden), draw(hidden, inner), expert_map)


def draw_steps(
    experts: Experts, tokens: int, num_bytes: float, context: Context, *, skewed: bool = False
) -> list[Step]:
    """Inputs whose experts differ, so many that the L2 has forgotten the first when it returns."""
    shape = experts.shape
    generator = torch.Generator(device=context.device).manual_seed(context.seed)
    # Later experts are chosen less often when skewed, as by Zipf's law.
    order = torch.arange(shape.num_experts, device=context.device)
    preference = -torch.log(order + 1.0) if skewed else torch.zeros_like(order, dtype=torch.float)
    steps = []
    for index in range(num_sets(num_bytes)):
        noise = torch.rand(tokens, shape.num_experts, generator=generator, device=context.device)
        scores = preference - torch.log(-torch.log(noise.clamp(1e-9, 1 - 1e-6)))
        ids = scores.topk(shape.top_k, dim=1).indices.to(torch.int32)
        if tokens == 1:  # other experts in each set, and each rank has its share of them
            step = shape.num_experts // shape.top_k
            ids[0] = torch.arange(shape.top_k, device=context.device) * step + index % step
        x = torch.randn(tokens, shape.hidden_size, generator=generator, device=context.device)
        weights = torch.full_like(ids, 1, dtype=torch.float32) / shape.top_k
        steps.append(Step(x.to(context.dtype), weights, ids))
    return steps


def _peers(experts: Experts, steps: Sequence[Step], context: Context) -> dict[str, Timing]:
    """Others doing the same; one that fails is reported and left out."""
    peers: dict[str, Callable[[Experts, Step], Callable[[], object]]] = {"cublas": _per_expert}
    if context.dry or _libraries(context.device)["grouped_mm"] is None:
        peers["grouped_mm"] = _grouped_mm
    found = {}
    for name, prepare in peers.items():
        try:
            found[name] = time_calls([prepare(experts, step) for step in steps], seconds=0.06)
        except Exception as error:  # a peer may fail in any way; our own result stands
            context.report.failed("peer", name, error, matters=False)
    return found


@cache
def _libraries(device: torch.device) -> dict[str, str | None]:
    return libraries.available(device)


def _grouped_mm(experts: Experts, step: Step) -> Callable[[], object]:
    """The FFN by F.grouped_mm: our order of pairs and our sum, its products."""

    def call() -> object:
        ids, slots = step.topk_ids, experts.w13.num_slots
        alignment = align(ids, slots, 16, expert_map=experts.expert_map)
        h = libraries.moe_up(step.x, experts.w13, alignment)
        pairs = libraries.moe_down(h, experts.w2, alignment, topk_weights=step.topk_weights)
        return combine(pairs, topk_ids=ids, expert_map=experts.expert_map)

    return call


def _per_expert(experts: Experts, step: Step) -> Callable[[], object]:
    """A loop of products over the experts that are hit, known beforehand: no sync is timed."""
    slots = step.topk_ids.long()
    if experts.expert_map is not None:
        slots = experts.expert_map[slots].long()
    hit = sorted(set(slots.flatten().tolist()) - {-1})
    tokens = {slot: (slots == slot).nonzero()[:, 0] for slot in hit}

    def call() -> object:
        out = torch.zeros_like(step.x)
        for slot, rows in tokens.items():
            both = step.x[rows] @ experts.w13.data[slot].T
            gate, up = both.chunk(2, dim=-1)
            out.index_add_(0, rows, (functional.silu(gate) * up) @ experts.w2.data[slot].T)
        return out

    return call


def _run_steps(model: str, tokens: int, context: Context) -> None:
    """The four steps one by one."""
    experts = experts_of(model, "plain", context.device, context.dry)
    num_bytes = floors.moe_ffn(experts.shape, tokens).num_bytes
    steps = draw_steps(experts, tokens, num_bytes, context)
    block_m = 64 if tokens > 1024 else 16
    calls: dict[str, list[Callable[[], object]]] = {}
    for step in steps:
        for name, call in _calls(experts, step, block_m):
            calls.setdefault(name, []).append(call)
    times: dict[str, Any] = {
        f"{name}_us": time_calls(same, seconds=0.06).microseconds for name, same in calls.items()
    }
    context.report.add("moe_steps", f"{model} T={tokens} block_m={block_m}", **times)


def _calls(experts: Experts, step: Step, block_m: int) -> list[tuple[str, Callable[[], object]]]:
    ids, slots, expert_map = step.topk_ids, experts.w13.num_slots, experts.expert_map
    alignment = align(ids, slots, block_m, expert_map=expert_map)
    h = moe_up(step.x, experts.w13, alignment)
    weights = step.topk_weights
    pairs = moe_down(h, experts.w2, alignment, topk_weights=weights)
    return [
        ("align", partial(align, ids, slots, block_m, expert_map=expert_map)),
        ("moe_up", partial(moe_up, step.x, experts.w13, alignment)),
        ("moe_down", partial(moe_down, h, experts.w2, alignment, topk_weights=weights)),
        ("combine", partial(combine, pairs, topk_ids=ids, expert_map=expert_map)),
    ]
