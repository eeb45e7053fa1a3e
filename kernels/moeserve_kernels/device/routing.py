"""Routing on a GPU: one launch, a few tokens a program."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
import triton

from moeserve_kernels import tables
from moeserve_kernels.device.kernels import routing as kernels
from moeserve_kernels.device.launch import Launch
from moeserve_kernels.device.targets import Target, target_of


def route(
    router_logits: torch.Tensor,
    top_k: int,
    *,
    scoring: str = "softmax",
    renormalize: bool = True,
    correction_bias: torch.Tensor | None = None,
    num_expert_groups: int = 1,
    topk_groups: int = 1,
    scaling_factor: float = 1.0,
) -> tuple[torch.Tensor, torch.Tensor]:
    """See ``operations.routing.route``."""
    outputs, launch = route_launch(
        router_logits,
        top_k,
        scoring=scoring,
        renormalize=renormalize,
        correction_bias=correction_bias,
        num_expert_groups=num_expert_groups,
        topk_groups=topk_groups,
        scaling_factor=scaling_factor,
        target=target_of(router_logits.device),
    )
    launch.run()
    return outputs


def route_launch(
    router_logits: torch.Tensor,
    top_k: int,
    *,
    scoring: str,
    renormalize: bool,
    correction_bias: torch.Tensor | None,
    num_expert_groups: int,
    topk_groups: int,
    scaling_factor: float,
    target: Target,
    tile: Mapping[str, int] | None = None,
) -> tuple[tuple[torch.Tensor, torch.Tensor], Launch]:
    """Weights and ids, unwritten, and what writes them."""
    tile = tables.load("rows", target.name)["route"] if tile is None else tile
    num_tokens, num_experts = router_logits.shape
    device = router_logits.device
    weights = torch.empty(num_tokens, top_k, dtype=torch.float32, device=device)
    ids = torch.empty(num_tokens, top_k, dtype=torch.int32, device=device)
    block_e = triton.next_power_of_2(num_experts)
    block_t = max(1, tile["elements"] // block_e)
    args = {
        "logits_ptr": router_logits,
        "bias_ptr": router_logits if correction_bias is None else correction_bias.contiguous(),
        "weights_ptr": weights,
        "ids_ptr": ids,
        "num_tokens": num_tokens,
        "num_experts": num_experts,
        "stride_t": router_logits.stride(0),
        "stride_e": router_logits.stride(1),
        "scaling_factor": float(scaling_factor),
    }
    constants = {
        "TOP_K": top_k,
        "NUM_GROUPS": num_expert_groups,
        "TOPK_GROUPS": topk_groups,
        "SIGMOID": scoring == "sigmoid",
        "RENORMALIZE": renormalize,
        "HAS_BIAS": correction_bias is not None,
        # A group of one has no second best.
        "TWO_BEST": correction_bias is not None and num_experts > num_expert_groups,
        "BLOCK_T": block_t,
        "BLOCK_E": block_e,
        "BLOCK_G": triton.next_power_of_2(num_expert_groups),
        "BLOCK_K": triton.next_power_of_2(top_k),
    }
    grid = (triton.cdiv(num_tokens, block_t),)
    options = {"num_warps": tile["num_warps"]}
    return (weights, ids), Launch(kernels.route_kernel, grid, args, constants, options)


def aot_cases(target: Target) -> Iterator[tuple[str, Launch]]:
    """The routers of models, on the ``meta`` device."""
    models = [  # name, experts, top_k, scoring, groups, kept groups, has a bias
        ("qwen3-30b", 128, 8, "softmax", 1, 1, False),
        ("mixtral", 8, 2, "softmax", 1, 1, False),
        ("olmoe", 64, 8, "softmax", 1, 1, False),
        ("gpt-oss-120b", 128, 4, "softmax", 1, 1, False),
        ("deepseek-v2", 160, 6, "softmax", 8, 3, False),
        ("deepseek-v3", 256, 8, "sigmoid", 8, 4, True),
        ("kimi-k2", 384, 8, "sigmoid", 1, 1, True),
        ("qwen3-next", 512, 10, "softmax", 1, 1, False),
        ("largest", 1024, 16, "sigmoid", 16, 4, True),
    ]
    for name, num_experts, top_k, scoring, groups, kept, has_bias in models:
        for dtype in (torch.float32, torch.bfloat16):
            logits = torch.empty(4096, num_experts, dtype=dtype, device="meta")
            bias = torch.empty(num_experts, dtype=torch.float32, device="meta")
            _, launch = route_launch(
                logits,
                top_k,
                scoring=scoring,
                renormalize=True,
                correction_bias=bias if has_bias else None,
                num_expert_groups=groups,
                topk_groups=kept,
                scaling_factor=2.5,
                target=target,
            )
            yield f"route_kernel {name} {dtype}", launch
