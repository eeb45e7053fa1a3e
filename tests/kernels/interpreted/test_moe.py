"""The expert FFN's Triton kernels in the interpreter, against the formulas in float64."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from transformers import Qwen3MoeConfig
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeSparseMoeBlock

from moeserve_kernels import backend
from moeserve_kernels.alignment import Alignment
from moeserve_kernels.device import moe_launch
from moeserve_kernels.device.histogram import HistogramTracker
from moeserve_kernels.device.launch import Launch
from moeserve_kernels.device.targets import INTERPRET
from moeserve_kernels.device.tiles import MoeTile, Tile
from moeserve_kernels.formulas import moe as formulas
from moeserve_kernels.operations import moe
from moeserve_kernels.operations.align import align
from moeserve_kernels.operations.quant import quantize_experts
from moeserve_kernels.operations.routing import route
from moeserve_kernels.weights import FORMATS, ExpertWeights

from ..guards import (
    TOLERANCES,
    assert_close,
    assert_same_bits,
    inside_nan,
    poisoned_empty,
    relative_error,
)

F32, F16, BF16 = torch.float32, torch.float16, torch.bfloat16
NAMES = {F32: "f32", F16: "f16", BF16: "bf16"}


class Problem:
    """A random expert FFN of S slots, weights small enough that sums stay near 1."""

    def __init__(
        self,
        *,
        num_tokens: int = 9,
        num_slots: int = 4,
        top_k: int = 2,
        sizes: tuple[int, int] = (160, 96),
        format: str = "plain",
        dtype: torch.dtype = F32,
        bias: bool = True,
        seed: int = 0,
    ) -> None:
        self.rng = torch.Generator().manual_seed(seed)
        hidden, inner = (256, 128) if format == "int4" else sizes
        self.num_slots, self.top_k, self.dtype = num_slots, top_k, dtype
        self.x = inside_nan(self.normal(num_tokens, hidden).to(dtype))
        self.w13 = self.experts((num_slots, 2 * inner, hidden), format, bias)
        self.w2 = self.experts((num_slots, hidden, inner), format, bias)
        scores = torch.rand(num_tokens, num_slots + 2, generator=self.rng)
        self.topk_ids = scores.topk(top_k, 1).indices.int()
        self.topk_weights = torch.rand(num_tokens, top_k, generator=self.rng)
        # Two experts are another rank's.
        slots = torch.cat([torch.arange(num_slots), torch.tensor([-1, -1])])
        order = torch.randperm(num_slots + 2, generator=self.rng)
        self.expert_map = slots[order].int()

    def normal(self, *shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=self.rng)

    def experts(self, shape: tuple[int, int, int], format: str, bias: bool) -> ExpertWeights:
        weights = self.normal(*shape) * shape[2] ** -0.5
        made = quantize_experts(weights, format, self.normal(*shape[:2]) if bias else None)
        data = made.data.to(self.dtype) if format == "plain" else made.data
        scales = None if made.scales is None else inside_nan(made.scales)
        return replace(made, data=inside_nan(data), scales=scales)

    def align(self, block_m: int = 16) -> Alignment:
        return align(self.topk_ids, self.num_slots, block_m, expert_map=self.expert_map)


def live_rows(alignment: Alignment) -> torch.Tensor:
    rows = torch.arange(alignment.num_rows)
    if alignment.sorted_pairs is None:
        return rows[alignment.block_slots >= 0]
    return rows[alignment.sorted_pairs < alignment.num_pairs]


def check_products(problem: Problem, alignment: Alignment, **options: Any) -> None:
    """Both products against the formulas; the second starts from what the first gave."""
    with backend.forced("triton-interpret"), poisoned_empty():
        h = moe.moe_up(problem.x, problem.w13, alignment, **options)
        pairs = moe.moe_down(h, problem.w2, alignment, topk_weights=problem.topk_weights)
        again = moe.moe_up(problem.x, problem.w13, alignment, **options)
    compare(problem, alignment, h, pairs, **options)
    rows = live_rows(alignment)
    assert_same_bits(again[rows], h[rows])


def compare(
    problem: Problem,
    alignment: Alignment,
    h: torch.Tensor,
    pairs: torch.Tensor,
    **options: Any,
) -> None:
    rows = live_rows(alignment)
    expected = formulas.moe_up(problem.x.double(), problem.w13, alignment, **options)
    assert_close(h[rows], expected[rows])
    weights = problem.topk_weights
    expected = formulas.moe_down(h.double(), problem.w2, alignment, topk_weights=weights)
    here = ~expected.isnan().any(2)
    assert_close(pairs[here], expected[here])
    assert pairs[~here].isnan().all()  # left unwritten


@pytest.mark.parametrize("dtype", [F32, BF16], ids=NAMES.get)
@pytest.mark.parametrize("format", FORMATS)
def test_products_follow_the_formula_in_every_format(format: str, dtype: torch.dtype) -> None:
    problem = Problem(format=format, dtype=dtype)
    check_products(problem, problem.align())


@pytest.mark.parametrize("activation", ["gelu", "swiglu_clamped"])
def test_activations_follow_the_formula(activation: str) -> None:
    problem = Problem(dtype=F16, num_tokens=20)
    check_products(problem, problem.align(32), activation=activation, alpha=1.3, limit=0.5)


@pytest.mark.parametrize("format", ["plain", "fp8_block", "int4"])
def test_identity_alignment_leaves_out_pairs_of_other_ranks(format: str) -> None:
    problem = Problem(num_tokens=1, num_slots=16, top_k=4, format=format)
    problem.topk_ids[0, 0] = problem.expert_map.tolist().index(-1)
    alignment = problem.align()
    assert alignment.is_identity
    check_products(problem, alignment)


def test_all_tokens_may_choose_one_expert_and_others_stay_empty() -> None:
    problem = Problem(num_tokens=33, top_k=1, bias=False)
    problem.topk_ids[:] = problem.expert_map.tolist().index(2)
    check_products(problem, problem.align())


def test_strided_rows_and_weights_are_read_in_place() -> None:
    problem = Problem()
    wide = torch.full((9, 3, 160), torch.nan)
    wide[:, 1] = problem.x
    problem.x = wide[:, 1]
    data = torch.full((4, 192, 170), torch.nan)
    data[:, :, 5:165] = problem.w13.data
    problem.w13 = replace(problem.w13, data=data[:, :, 5:165])
    check_products(problem, problem.align())


PLAIN = Tile(block_n=64, block_k=64, num_warps=4, num_stages=2)
VARIANTS = {
    "swap": replace(PLAIN, swap=True),
    "swap_tma": replace(PLAIN, swap=True, tma_weights=True),
    "tma": replace(PLAIN, tma_weights=True, tma_rows=True),
    "persistent": replace(PLAIN, persistent=True, group_m=2),
    "persistent_tma": replace(PLAIN, persistent=True, tma_weights=True, tma_rows=True, group_m=4),
}


@pytest.mark.parametrize("variant", VARIANTS)
def test_variants_of_the_kernels_follow_the_formula(variant: str) -> None:
    problem = Problem(num_tokens=40, bias=False, dtype=BF16 if "swap" in variant else F32)
    launches = run_variant(problem, VARIANTS[variant])
    cut = VARIANTS[variant]
    for launch in launches:
        assert (launch.args["w_desc"] is not None) == cut.tma_weights
    assert (launches[1].args["h_desc"] is not None) == cut.tma_rows
    assert (launches[1].grid[0] == 2 * INTERPRET.num_sms) == cut.persistent


@pytest.mark.parametrize("format", ["int8", "fp8_block", "int4"])
def test_swapped_operands_take_every_format(format: str) -> None:
    run_variant(Problem(format=format), VARIANTS["swap"])


def run_variant(problem: Problem, cut: Tile) -> list[Launch]:
    """Both products with the tile, run twice and checked."""
    alignment = problem.align()
    inner, (num_tokens, hidden) = problem.w2.num_inputs, problem.x.shape
    h = torch.full((alignment.num_rows, inner), torch.nan, dtype=problem.dtype)
    pairs = torch.full((num_tokens, problem.top_k, hidden), torch.nan, dtype=problem.dtype)
    tile = MoeTile(16, cut, cut)
    up = moe_launch.moe_up_launch(
        problem.x,
        problem.w13,
        alignment,
        h,
        activation="silu",
        alpha=0.0,
        limit=0.0,
        tile=tile,
    )
    down = moe_launch.moe_down_launch(
        h,
        problem.w2,
        alignment,
        pairs,
        topk_weights=problem.topk_weights,
        tile=tile,
        target=INTERPRET,
    )
    for launch in (up, down):
        launch.run()
    compare(problem, alignment, h, pairs)
    first = pairs.clone()
    for launch in (up, down):
        launch.run()
    here = ~first.isnan()
    assert_same_bits(pairs[here], first[here])
    return [up, down]


def test_descriptors_are_not_made_of_rows_that_they_can_not_read() -> None:
    problem = Problem(sizes=(162, 97), bias=False)  # rows of 162 and 97 values are not aligned
    for launch in run_variant(problem, VARIANTS["tma"]):
        assert launch.args["w_desc"] is None


@pytest.mark.parametrize("dtype", [F32, BF16], ids=NAMES.get)
@pytest.mark.parametrize("with_map", [False, True])
def test_combine_adds_in_order_and_never_reads_missing_pairs(
    dtype: torch.dtype, with_map: bool
) -> None:
    problem = Problem(num_tokens=5, top_k=3, dtype=dtype)
    ids = problem.topk_ids.long() if with_map else problem.topk_ids.clone()
    if not with_map:
        ids[1] = -1
        ids[2, 1] = -3
    expert_map = problem.expert_map if with_map else None
    pairs = problem.normal(5, 3, 160).to(dtype)
    missing = ids < 0 if expert_map is None else expert_map[ids] < 0
    pairs[missing] = torch.nan
    options: dict[str, Any] = {
        "topk_weights": problem.topk_weights,
        "topk_ids": ids,
        "expert_map": expert_map,
        "shared": problem.normal(5, 160).to(dtype),
        "residual": inside_nan(problem.normal(5, 160).to(dtype)),
    }
    with backend.forced("triton-interpret"), poisoned_empty():
        out = moe.combine(pairs, **options)
        assert_same_bits(moe.combine(pairs, **options), out)
        bare = moe.combine(pairs, topk_ids=ids, expert_map=expert_map)
    wide = {
        name: one.double() if one is not None and one.is_floating_point() else one
        for name, one in options.items()
    }
    assert_close(out, formulas.combine(pairs.double(), **wide), tolerance=TOLERANCES[dtype])
    expected = formulas.combine(pairs.double(), topk_ids=ids, expert_map=expert_map)
    assert_close(bare, expected, tolerance=TOLERANCES[dtype])


def test_no_tokens_give_no_rows() -> None:
    problem = Problem(num_tokens=0)
    with backend.forced("triton-interpret"):
        out = moe.moe_ffn(
            problem.x, problem.w13, problem.w2, problem.topk_weights, problem.topk_ids
        )
    assert out.shape == (0, 160)


@pytest.mark.parametrize("num_tokens", [1, 48])
def test_whole_block_of_qwen3_moe_equals_transformers(num_tokens: int) -> None:
    config = Qwen3MoeConfig(
        hidden_size=128,
        moe_intermediate_size=96,
        num_experts=16,
        num_experts_per_tok=4,
        norm_topk_prob=True,
    )
    rng = torch.Generator().manual_seed(5)
    block = Qwen3MoeSparseMoeBlock(config)
    parameters = dict(block.named_parameters())
    with torch.no_grad():
        for parameter in parameters.values():
            parameter.normal_(std=0.1, generator=rng)
        x = torch.randn(num_tokens, 128, generator=rng)
        expected = block(x[None])[0]
        logits = x @ parameters["gate.weight"].T
    w13 = ExpertWeights("plain", parameters["experts.gate_up_proj"].detach())
    w2 = ExpertWeights("plain", parameters["experts.down_proj"].detach())
    tracker = HistogramTracker(16)
    with backend.forced("triton-interpret"), poisoned_empty():
        topk_weights, topk_ids = route(logits, 4)
        out = moe.moe_ffn(x, w13, w2, topk_weights, topk_ids, tracker=tracker)
        with_others = moe.moe_ffn(x, w13, w2, topk_weights, topk_ids, shared=x, residual=out)
    assert relative_error(out, expected) < 1e-4
    assert_close(with_others, 2 * out + x)
    shares = tracker.expected(num_tokens * 4)
    if num_tokens == 1:
        assert shares is None  # nothing was counted: the pairs were not sorted
    else:
        assert shares == pytest.approx(topk_ids.flatten().bincount(minlength=16).tolist())
