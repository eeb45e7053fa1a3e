"""The expert FFN on the CPU against the formulas, and what its operations refuse."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from moeserve_kernels import backend
from moeserve_kernels.alignment import Alignment
from moeserve_kernels.device import tiles
from moeserve_kernels.device.histogram import HistogramTracker
from moeserve_kernels.formulas import moe as formulas
from moeserve_kernels.operations.align import align
from moeserve_kernels.operations.moe import combine, moe_down, moe_ffn, moe_up
from moeserve_kernels.operations.quant import quantize_experts
from moeserve_kernels.weights import FORMATS, ExpertWeights

from .guards import assert_close, assert_same_bits, inside_nan, poisoned_empty

DTYPES = [torch.float32, torch.bfloat16]


def experts(
    shape: tuple[int, int, int], format: str, dtype: torch.dtype, rng: torch.Generator, bias: bool
) -> ExpertWeights:
    weights = torch.randn(shape, generator=rng) * shape[2] ** -0.5
    made = quantize_experts(
        weights, format, torch.randn(shape[:2], generator=rng) if bias else None
    )
    return replace(made, data=made.data.to(dtype)) if format == "plain" else made


@settings(max_examples=300)
@given(st.data())
def test_cpu_equals_the_formula(data: st.DataObject) -> None:
    draw = data.draw
    rng = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    num_tokens, num_slots = draw(st.integers(0, 12)), draw(st.integers(1, 9))
    num_experts = num_slots + draw(st.integers(0, 3))
    top_k = draw(st.integers(1, min(4, num_experts)))
    format, dtype = draw(st.sampled_from(FORMATS)), draw(st.sampled_from(DTYPES))
    sizes = st.just(128) if format == "int4" else st.sampled_from([1, 24, 130])
    hidden, inner, bias = draw(sizes), draw(sizes), draw(st.booleans())
    x = torch.randn(num_tokens, hidden, generator=rng).to(dtype)
    w13 = experts((num_slots, 2 * inner, hidden), format, dtype, rng, bias)
    w2 = experts((num_slots, hidden, inner), format, dtype, rng, bias)
    ids = torch.rand(num_tokens, num_experts, generator=rng).topk(top_k, 1).indices
    slots = torch.arange(num_experts, dtype=torch.int32)
    slots[num_slots:] = -1
    expert_map = slots[torch.randperm(num_experts, generator=rng)]
    weights = torch.rand(num_tokens, top_k, generator=rng)
    alignment = align(ids, num_slots, draw(st.sampled_from([1, 4, 16])), expert_map=expert_map)
    options = {"activation": draw(st.sampled_from(["silu", "gelu", "swiglu_clamped"]))}

    with poisoned_empty():
        h = moe_up(inside_nan(x), w13, alignment, **options)
        pairs = moe_down(h, w2, alignment, topk_weights=weights)
    out = combine(pairs, topk_ids=ids, expert_map=expert_map, residual=x)

    expected = formulas.moe_up(x.double(), w13, alignment, **options)
    live = ~expected.isnan()
    assert_close(h[live], expected[live])
    expected = formulas.moe_down(h.double(), w2, alignment, topk_weights=weights)
    here = ~expected.isnan()
    assert_close(pairs[here], expected[here])
    expected = formulas.combine(
        pairs.double(), topk_ids=ids, expert_map=expert_map, residual=x.double()
    )
    assert_close(out, expected)
    whole = moe_ffn(x, w13, w2, weights, ids, expert_map=expert_map, residual=x, **options)
    assert_close(whole, out, tolerance=1e-5 if dtype == torch.float32 else 1e-2)


def test_formula_of_the_whole_is_the_sum_over_experts() -> None:
    rng = torch.Generator().manual_seed(0)
    x = torch.randn(5, 8, generator=rng)
    w13 = experts((3, 12, 8), "plain", torch.float32, rng, False)
    w2 = experts((3, 8, 6), "plain", torch.float32, rng, False)
    probabilities = torch.rand(5, 3, generator=rng)
    ids = torch.arange(3).repeat(5, 1)
    with backend.forced("reference"):
        out = moe_ffn(x, w13, w2, probabilities, ids)
    gate, up = torch.einsum("th,snh->tsn", x, w13.data).chunk(2, 2)
    each = torch.einsum("tsi,shi->tsh", torch.nn.functional.silu(gate) * up, w2.data)
    torch.testing.assert_close(out, (each * probabilities[:, :, None]).sum(1))


def test_combine_without_ids_sums_all_and_a_token_without_pairs_gets_zeros() -> None:
    pairs = torch.arange(12.0).view(2, 2, 3)
    assert torch.equal(combine(pairs), pairs.sum(1))
    pairs[0] = torch.nan
    ids = torch.tensor([[-1, -1], [0, 1]])
    assert torch.equal(combine(pairs, topk_ids=ids)[0], torch.zeros(3))


@pytest.mark.parametrize("dtype", DTYPES)
def test_results_repeat_bit_for_bit(dtype: torch.dtype) -> None:
    rng = torch.Generator().manual_seed(3)
    x = torch.randn(20, 64, generator=rng).to(dtype)
    w13 = experts((4, 64, 64), "int8", dtype, rng, True)
    w2 = experts((4, 64, 32), "int8", dtype, rng, True)
    ids, weights = torch.rand(20, 4).topk(2, 1).indices, torch.rand(20, 2)
    first = moe_ffn(x, w13, w2, weights, ids)
    assert_same_bits(moe_ffn(x, w13, w2, weights, ids), first)


def test_tracker_sees_the_counts_of_the_alignment() -> None:
    rng = torch.Generator().manual_seed(4)
    x = torch.randn(6, 16, generator=rng)
    w13 = experts((3, 32, 16), "plain", torch.float32, rng, False)
    w2 = experts((3, 16, 16), "plain", torch.float32, rng, False)
    tracker = HistogramTracker(3)
    ids = torch.tensor([[0, 1]] * 6)
    moe_ffn(x, w13, w2, torch.rand(6, 2), ids, tracker=tracker)
    assert tracker.expected(24) == [12.0, 12.0, 0.0]


# What is wrong, changed in a call that is right, and what the message must say.
X, TALL = torch.zeros(2, 128), torch.zeros(4, 3, 1).expand(4, 3, 128)
ALIGNMENT = align(torch.tensor([[0, 1], [1, 2]]), 4, 16)
UP = ExpertWeights("plain", torch.zeros(4, 6, 128))
DOWN = ExpertWeights("plain", torch.zeros(4, 128, 3))
INT4 = quantize_experts(torch.zeros(4, 6, 128), "int4")

BAD_UP: dict[str, tuple[dict[str, Any], str]] = {
    "dtype": ({"hidden_states": X.double()}, "hidden_states: dtype"),
    "plain dtype": ({"hidden_states": X.half()}, "w13.data: dtype is float32, must be float16"),
    "rank": ({"hidden_states": X[0]}, "hidden_states: shape"),
    "strides": ({"hidden_states": torch.zeros(128, 2).T}, "hidden_states: stride"),
    "inputs": ({"hidden_states": X[:, :64]}, "w13: takes 128 inputs, must take 64"),
    "tokens": ({"hidden_states": torch.zeros(3, 128)}, "alignment: of 4 pairs"),
    "activation": ({"activation": "relu"}, "activation = 'relu'"),
    "odd": ({"w13": replace(UP, data=UP.data[:, :5])}, "w13: has 5 rows a slot"),
    "slots": ({"w13": replace(UP, data=UP.data[:3])}, "alignment: over 4 slots"),
    "format": ({"w13": replace(UP, format="int2")}, "w13.format = 'int2'"),
    "no scales": ({"w13": replace(INT4, scales=None)}, "w13.scales: must be"),
    "scales of plain": ({"w13": replace(UP, scales=X)}, "w13.scales: must be None"),
    "scales shape": ({"w13": replace(INT4, scales=torch.zeros(4, 6))}, "w13.scales: shape"),
    "bias": ({"w13": replace(UP, bias=torch.zeros(4, 3))}, "w13.bias: shape"),
    "weights' strides": ({"w13": replace(UP, data=UP.data.mT.contiguous().mT)}, "w13.data: stri"),
}
BAD_DOWN: dict[str, tuple[dict[str, Any], str]] = {
    "rows": ({"h": torch.zeros(3, 3)}, "h: shape"),
    "inputs": ({"h": torch.zeros(ALIGNMENT.num_rows, 4)}, "w2: takes 3 inputs, must take 4"),
    "weights": ({"topk_weights": torch.ones(4, 1)}, "topk_weights: shape"),
    "weights' dtype": ({"topk_weights": torch.ones(2, 2).double()}, "topk_weights: dtype"),
}
BAD_COMBINE: dict[str, tuple[dict[str, Any], str]] = {
    "rank": ({"pairs": X}, "pairs: shape"),
    "weights": ({"topk_weights": torch.ones(2, 3)}, "topk_weights: shape"),
    "ids' dtype": ({"topk_ids": torch.ones(2, 2)}, "topk_ids: dtype"),
    "map alone": ({"expert_map": torch.zeros(4).int()}, "expert_map: given without topk_ids"),
    "shared": ({"shared": torch.zeros(2, 5)}, "shared: shape"),
    "residual": ({"residual": torch.zeros(2, 4).half()}, "residual: dtype"),
}
BAD_FFN: dict[str, tuple[dict[str, Any], str]] = {
    "weights": ({"topk_weights": torch.ones(2, 3)}, "topk_weights: shape"),
    "outputs": ({"w2": replace(DOWN, data=DOWN.data[:, :7])}, "w2: has 4 slots of 7 outputs"),
    "slots": ({"w2": replace(DOWN, data=DOWN.data[:3])}, "w2: has 3 slots"),
    "inputs": ({"w2": replace(DOWN, data=torch.zeros(4, 128, 4))}, "w2: takes 4 inputs"),
    "no choices": (
        {"topk_ids": torch.zeros(2, 0).long(), "topk_weights": torch.ones(2, 0)},
        "top_k = 0",
    ),
    "ids": ({"topk_ids": torch.zeros(3, 2).int()}, "topk_ids: shape"),
}


def check_refused(
    operation: Callable[..., Any],
    good: dict[str, Any],
    bad: dict[str, tuple[dict[str, Any], str]],
    name: str,
) -> None:
    operation(**good)
    change, message = bad[name]
    with pytest.raises(ValueError) as caught:
        operation(**good | change)
    assert str(caught.value).startswith(message)


@pytest.mark.parametrize("name", BAD_UP)
def test_moe_up_names_what_is_wrong(name: str) -> None:
    good = {"hidden_states": X, "w13": UP, "alignment": ALIGNMENT}
    check_refused(moe_up, good, BAD_UP, name)


@pytest.mark.parametrize("name", BAD_DOWN)
def test_moe_down_names_what_is_wrong(name: str) -> None:
    good = {"h": torch.zeros(ALIGNMENT.num_rows, 3), "w2": DOWN, "alignment": ALIGNMENT}
    check_refused(moe_down, good, BAD_DOWN, name)


@pytest.mark.parametrize("name", BAD_COMBINE)
def test_combine_names_what_is_wrong(name: str) -> None:
    check_refused(combine, {"pairs": torch.zeros(2, 2, 4)}, BAD_COMBINE, name)


@pytest.mark.parametrize("name", BAD_FFN)
def test_moe_ffn_names_what_is_wrong(name: str) -> None:
    ids, weights = torch.tensor([[0, 1], [1, 2]]), torch.ones(2, 2)
    good = {
        "hidden_states": X,
        "w13": UP,
        "w2": DOWN,
        "topk_weights": weights,
        "topk_ids": ids,
    }
    check_refused(moe_ffn, good, BAD_FFN, name)


def test_fp8_on_a_chip_without_it_is_refused_by_name() -> None:
    for format in ("fp8_channel", "fp8_block"):
        with pytest.raises(ValueError, match=f"format = '{format}': .* sm_80, must be one of"):
            tiles.load("sm_80").of(format)


def test_block_size_without_a_tile_is_refused() -> None:
    alignment: Alignment = align(torch.tensor([[0, 1], [1, 2]]), 4, 48)
    with (
        backend.forced("triton-interpret"),
        pytest.raises(ValueError, match="block_m = 48: plain weights on interpret take blocks of"),
    ):
        moe_up(X, UP, alignment)
