"""The routing kernel in the interpreter, against the formula."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from moeserve_kernels import backend
from moeserve_kernels.formulas import routing as formulas
from moeserve_kernels.operations.routing import route

from .. import guards

# Rows past the last token hold -inf alone, and a softmax over them is NaN; they are not stored.
pytestmark = pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")

_ROUTERS: dict[str, tuple[int, int, dict[str, Any]]] = {
    "mixtral": (8, 2, {}),
    "qwen3": (128, 8, {}),
    "olmoe": (64, 8, {"renormalize": False}),
    "not a power of two": (60, 6, {"scoring": "sigmoid"}),
    "one expert": (1, 1, {}),
    "all experts": (5, 5, {"scaling_factor": 3.0}),
    "deepseek-v2": (160, 6, {"num_expert_groups": 8, "topk_groups": 3, "renormalize": False}),
    "deepseek-v3": (
        256,
        8,
        {
            "scoring": "sigmoid",
            "num_expert_groups": 8,
            "topk_groups": 4,
            "scaling_factor": 2.5,
            "correction_bias": 1,
        },
    ),
    "biased softmax": (48, 4, {"correction_bias": 1}),
    "groups of one": (
        6,
        2,
        {"num_expert_groups": 6, "topk_groups": 3, "correction_bias": 1},
    ),
    "three groups": (9, 2, {"num_expert_groups": 3, "topk_groups": 2, "correction_bias": 1}),
    "largest": (1024, 4, {"num_expert_groups": 16, "topk_groups": 2}),
}


def run(logits: torch.Tensor, top_k: int, **options: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Twice, between canaries; the bits must be equal."""
    logits = guards.inside_nan(logits)
    results = []
    for _ in range(2):
        with backend.forced("triton-interpret"), guards.poisoned_empty():
            results.append(route(logits, top_k, **options))
    for one, other in zip(*results, strict=True):
        guards.assert_same_bits(one, other)
    return results[0]


def logits_of(num_tokens: int, num_experts: int) -> torch.Tensor:
    """All different in a row by more than rounding, in bfloat16 for up to 256 experts."""
    generator = torch.Generator().manual_seed(num_experts)
    order = [torch.randperm(num_experts, generator=generator) for _ in range(num_tokens)]
    return (torch.stack(order) - num_experts // 2).float() / 32


@pytest.mark.parametrize("name", _ROUTERS)
@pytest.mark.parametrize("num_tokens", [1, 37])
def test_route_equals_the_formula(name: str, num_tokens: int) -> None:
    num_experts, top_k, options = _ROUTERS[name]
    if "correction_bias" in options:
        generator = torch.Generator().manual_seed(5)
        bias = torch.rand(num_experts, generator=generator) - 0.5
        options = options | {"correction_bias": guards.inside_nan(bias)}
    logits = logits_of(num_tokens, num_experts)
    weights, ids = run(logits, top_k, **options)
    expected_weights, expected_ids = formulas.route(logits.double(), top_k, **options)
    assert weights.dtype == torch.float32
    assert ids.dtype == torch.int32
    assert torch.equal(ids, expected_ids)
    guards.assert_close(weights, expected_weights)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_logits_of_16_bits_with_strides(dtype: torch.dtype) -> None:
    logits = logits_of(9, 128).to(dtype)[:, ::2]
    weights, ids = run(logits, 4)
    expected_weights, expected_ids = formulas.route(logits.double(), 4)
    assert torch.equal(ids, expected_ids)
    guards.assert_close(weights, expected_weights)


def test_equals_take_the_lower_id() -> None:
    _, ids = run(torch.zeros(2, 37), 4)
    assert ids.tolist() == [[0, 1, 2, 3]] * 2
    _, ids = run(torch.zeros(1, 12), 4, num_expert_groups=4, topk_groups=2)
    assert ids.tolist() == [[0, 1, 2, 3]]


def test_without_tokens() -> None:
    weights, ids = run(torch.empty(0, 8), 2)
    assert weights.shape == ids.shape == (0, 2)


@pytest.mark.parametrize("scoring", ["softmax", "sigmoid"])
def test_a_nan_gives_valid_ids(scoring: str) -> None:
    logits = logits_of(3, 9)
    logits[1, 4] = torch.nan
    logits[2] = -torch.inf
    options: dict[str, Any] = {"scoring": scoring, "num_expert_groups": 3, "topk_groups": 3}
    weights, ids = run(logits, 8, **options)
    expected_weights, expected_ids = formulas.route(logits, 8, **options)
    assert torch.equal(ids, expected_ids)
    torch.testing.assert_close(weights, expected_weights, equal_nan=True)
    logits[0] = torch.nan
    _, ids = run(logits, 2, scoring=scoring, num_expert_groups=3, topk_groups=1)
    assert ids[0].tolist() == [0, 1]
