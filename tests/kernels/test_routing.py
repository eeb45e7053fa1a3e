"""Routing: the CPU implementation against the formula, token by token."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from moeserve_kernels.formulas import routing as formulas
from moeserve_kernels.operations.routing import route


def distinct_logits(num_tokens: int, num_experts: int, seed: int) -> torch.Tensor:
    """Logits whose scores are further apart than rounding."""
    generator = torch.Generator().manual_seed(seed)
    order = torch.stack(
        [torch.randperm(num_experts, generator=generator) for _ in range(num_tokens)]
        or [torch.empty(0, dtype=torch.long)]
    )[:num_tokens].view(num_tokens, num_experts)
    return (order.double() / num_experts * 6 - 3).float()


@st.composite
def routers(draw: st.DrawFn) -> tuple[torch.Tensor, int, dict[str, Any]]:
    num_groups = draw(st.integers(1, 6))
    num_experts = num_groups * draw(st.integers(1, 12))
    topk_groups = draw(st.integers(1, num_groups))
    top_k = draw(st.integers(1, min(8, num_experts // num_groups * topk_groups)))
    seed = draw(st.integers(0, 2**31))
    logits = distinct_logits(draw(st.integers(0, 5)), num_experts, seed)
    bias = None
    if draw(st.booleans()):
        generator = torch.Generator().manual_seed(seed)
        bias = torch.rand(num_experts, generator=generator) - 0.5
    return (
        logits,
        top_k,
        {
            "scoring": draw(st.sampled_from(["softmax", "sigmoid"])),
            "renormalize": draw(st.booleans()),
            "correction_bias": bias,
            "num_expert_groups": num_groups,
            "topk_groups": topk_groups,
            "scaling_factor": draw(st.sampled_from([1.0, 2.5])),
        },
    )


@settings(max_examples=500)
@given(routers())
def test_route_equals_the_formula(router: tuple[torch.Tensor, int, dict[str, Any]]) -> None:
    logits, top_k, options = router
    weights, ids = route(logits, top_k, **options)
    expected_weights, expected_ids = formulas.route(logits.double(), top_k, **options)
    assert weights.dtype == torch.float32
    assert ids.dtype == torch.int32
    assert torch.equal(ids, expected_ids)
    torch.testing.assert_close(weights, expected_weights.float(), rtol=1e-5, atol=1e-7)


def test_the_formula_keeps_float64() -> None:
    weights, _ = formulas.route(torch.randn(2, 8, dtype=torch.float64), 2)
    assert weights.dtype == torch.float64


def test_equals_take_the_lower_id() -> None:
    _, ids = route(torch.zeros(2, 37), 4)
    assert ids.tolist() == [[0, 1, 2, 3]] * 2
    _, ids = route(torch.zeros(1, 12), 4, num_expert_groups=4, topk_groups=2)
    assert ids.tolist() == [[0, 1, 2, 3]]


def test_the_bias_chooses_but_does_not_weigh() -> None:
    bias = torch.tensor([0.0, 0.0, 5.0, 0.0])
    weights, ids = route(
        torch.zeros(1, 4), 1, scoring="sigmoid", correction_bias=bias, renormalize=False
    )
    assert ids.tolist() == [[2]]
    assert weights.tolist() == [[0.5]]


def test_a_group_counts_by_its_two_best_when_there_is_a_bias() -> None:
    """Group 0 has the best expert, group 1 the best two."""
    logits = torch.tensor([[3.0, -9.0, 2.0, 2.0]])
    groups = {"scoring": "sigmoid", "num_expert_groups": 2, "topk_groups": 1}
    _, ids = route(logits, 1, **groups)  # type: ignore[arg-type]
    assert ids.tolist() == [[0]]
    _, ids = route(logits, 1, correction_bias=torch.zeros(4), **groups)  # type: ignore[arg-type]
    assert ids.tolist() == [[2]]


@pytest.mark.parametrize("scoring", ["softmax", "sigmoid"])
def test_a_nan_gives_valid_ids(scoring: str) -> None:
    logits = torch.randn(3, 9)
    logits[1, 4] = torch.nan
    weights, ids = route(logits, 8, scoring=scoring)
    assert ids.sort(1).values.diff().min() > 0
    assert 0 <= int(ids.min()) <= int(ids.max()) < 9
    assert weights[[0, 2]].isfinite().all()
    assert bool(weights[1].isnan().all()) == (scoring == "softmax")
    if scoring == "sigmoid":
        assert 4 not in ids[1].tolist()


def test_rows_with_a_stride_and_other_dtypes() -> None:
    logits = torch.randn(4, 40, dtype=torch.bfloat16)[:, ::2]
    weights, ids = route(logits, 3)
    expected = formulas.route(logits.float(), 3)
    assert torch.equal(ids, expected[1])
    torch.testing.assert_close(weights, expected[0])


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"router_logits": torch.zeros(8)}, "router_logits: shape"),
        ({"router_logits": torch.zeros(2, 8, dtype=torch.int32)}, "router_logits: dtype"),
        ({"router_logits": torch.zeros(2, 1032)}, "1032 experts"),
        ({"top_k": 0}, "top_k = 0"),
        ({"top_k": 9}, "top_k = 9"),
        ({"top_k": 5, "num_expert_groups": 4, "topk_groups": 2}, "top_k = 5"),
        ({"scoring": "tanh"}, "scoring = 'tanh'"),
        ({"num_expert_groups": 3}, "num_expert_groups = 3"),
        ({"num_expert_groups": 2, "topk_groups": 3}, "topk_groups = 3"),
        ({"correction_bias": torch.zeros(7)}, "correction_bias: shape"),
    ],
)
def test_a_wrong_argument_is_named(change: dict[str, object], named: str) -> None:
    arguments: dict[str, object] = {"router_logits": torch.zeros(2, 8), "top_k": 2}
    with pytest.raises(ValueError, match=named):
        route(**(arguments | change))  # type: ignore[arg-type]
