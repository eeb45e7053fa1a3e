"""The benchmarks' arithmetic against hand numbers, and one tiny run of bench_offline."""

from __future__ import annotations

import asyncio
import json
import math
import shlex
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from benchmarks import bench_offline, limits, report
from benchmarks.engines import Outcome
from benchmarks.shares import overhead_share, shares_of

MID_CONFIG = {
    "num_hidden_layers": 12, "hidden_size": 1024, "num_attention_heads": 16,
    "num_key_value_heads": 4, "head_dim": 64, "num_local_experts": 64, "num_experts_per_tok": 8,
    "moe_intermediate_size": 256, "intermediate_size": 2048, "vocab_size": 32000,
    "dtype": "bfloat16",
}  # fmt: skip
MACHINE = limits.Machine(read_bytes_per_s=42e9, flops_per_s=900e9)


@pytest.fixture
def mid_shape(tmp_path: Path) -> limits.ModelShape:
    (tmp_path / "config.json").write_text(json.dumps(MID_CONFIG))
    return limits.read_shape(tmp_path)


# --- percentiles ---


@given(
    st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=50),
    st.floats(0, 100),
)
def test_percentile_is_numpys(values: list[float], percent: float) -> None:
    expected = float(np.percentile(values, percent))
    assert report.percentile(values, percent) == pytest.approx(expected, rel=1e-9, abs=1e-6)


def test_percentile_of_nothing_is_refused() -> None:
    with pytest.raises(ValueError, match="no values"):
        report.percentile([], 50)
    with pytest.raises(ValueError, match="percent = 101"):
        report.percentile([1.0], 101)


def test_summary_is_in_milliseconds() -> None:
    summary = report.summary_ms([0.001 * i for i in range(1, 102)])
    assert summary == {"p50": 51.0, "p90": 91.0, "p99": 100.0, "mean": 51.0}
    assert report.summary_ms([]) is None


# --- floors ---


def test_shape_sizes_are_the_hand_numbers(mid_shape: limits.ModelShape) -> None:
    assert mid_shape.expert_weights == 3 * 1024 * 256
    assert mid_shape.attention_weights == 1024 * 1024 * 2 + 2 * 1024 * 256 + 1024 * 64
    assert mid_shape.head_weights == 32_768_000
    assert mid_shape.kv_bytes_per_token == 12 * 2 * 4 * 64 * 2


@pytest.mark.parametrize(("num_tokens", "distinct"), [(1, 8.0), (2, 15.0), (8, 42.0), (32, 63.1)])
def test_expected_distinct_experts(num_tokens: int, distinct: float) -> None:
    found = limits.expected_distinct_experts(64, 8, num_tokens)
    assert found == pytest.approx(distinct, abs=0.05)


def test_decode_of_one_request_reads_its_weights_once(mid_shape: limits.ModelShape) -> None:
    floor = limits.decode_floor(mid_shape, MACHINE, concurrency=1, context=160)
    layer = 2_621_440 + 65_536 + 8 * 786_432
    num_bytes = (12 * layer + 32_768_000) * 2 + 160 * 12_288
    assert floor.num_bytes == pytest.approx(num_bytes)
    assert floor.time_s == pytest.approx(num_bytes / 42e9)  # bound by memory


def test_prefill_is_bound_by_arithmetic(mid_shape: limits.ModelShape) -> None:
    floor = limits.prefill_floor(mid_shape, MACHINE, concurrency=1, input_len=1024)
    per_token = 12 * (2_621_440 + 65_536 + 8 * 786_432)
    attention = 12 * 2 * 16 * 64 * 1024 * 1025  # causal: half of 4 * heads * head_dim * length**2
    assert floor.flops == pytest.approx(2 * 1024 * per_token + attention + 2 * 32_768_000)
    assert floor.time_s == pytest.approx(floor.flops / 900e9)


def test_closed_loop_is_prefill_then_steps(mid_shape: limits.ModelShape) -> None:
    floor = limits.closed_loop_floor(
        mid_shape, MACHINE, concurrency=8, input_len=128, output_len=64
    )
    total_s = floor["prefill_s"] + 63 * floor["decode_step_s"]
    assert floor["output_tokens_per_s"] == pytest.approx(8 * 64 / total_s)
    assert floor["prefill_tokens_per_s"] == pytest.approx(8 * 128 / floor["prefill_s"])


@given(st.integers(1, 256), st.integers(1, 64), st.integers(1, 8))
def test_more_tokens_never_need_fewer_experts(tokens: int, experts: int, top_k: int) -> None:
    top_k = min(top_k, experts)
    fewer = limits.expected_distinct_experts(experts, top_k, tokens)
    more = limits.expected_distinct_experts(experts, top_k, tokens + 1)
    assert top_k - 1e-9 <= fewer <= more <= experts


def test_models_without_experts_have_no_floor(tmp_path: Path) -> None:
    dense = {key: value for key, value in MID_CONFIG.items() if key != "num_local_experts"}
    (tmp_path / "config.json").write_text(json.dumps(dense))
    with pytest.raises(ValueError, match="experts in every layer"):
        limits.read_shape(tmp_path)


def test_dtype_may_be_overridden_and_is_checked(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(MID_CONFIG))
    assert limits.read_shape(tmp_path, "float32").dtype_bytes == 4
    with pytest.raises(ValueError, match="dtype = 'int4'"):
        limits.read_shape(tmp_path, "int4")


def test_measured_limits_are_positive() -> None:
    measured = limits.measure(threads=1, num_bytes=1 << 22, size=64)
    machine = limits.machine_of(measured)
    assert machine.read_bytes_per_s > 1e6
    assert machine.flops_per_s == max(
        measured["float32_flops_per_s"], measured["bfloat16_flops_per_s"]
    )


# --- bench_offline's arithmetic ---


def _sample(wall_s: float, *first_tokens: int) -> bench_offline.Sample:
    outcome = Outcome(wall_s=wall_s, first_tokens=list(first_tokens))
    return bench_offline.Sample(outcome=outcome, other_cores=0.0)


def test_record_has_ratios_and_share_of_the_floor() -> None:
    cell = bench_offline.Cell(concurrency=2, input_len=128, output_len=64)
    samples = {
        "moeserve:bfloat16": [_sample(1.0, 5, 6), _sample(2.0, 7, 8), _sample(4.0, 9, 9)],
        "generate:bfloat16": [_sample(4.0, 5, 6), _sample(4.0, 7, 1), _sample(4.0, 9, 9)],
    }
    record = bench_offline.record(cell, samples, {"tokens_per_s": 256.0})
    assert (record["result"], record["share_of_floor"]) == (64.0, 0.25)
    assert record["ratio"] == {"generate:bfloat16": 2.0}
    assert record["engines"]["generate:bfloat16"]["same_first_token"] == round(5 / 6, 3)
    assert record["unit"] == "output tokens/s"


def test_prefill_cell_counts_prompt_tokens() -> None:
    cell = bench_offline.Cell(concurrency=1, input_len=1024, output_len=1)
    record = bench_offline.record(
        cell, {"moeserve:bfloat16": [_sample(0.5, 1)]}, {"tokens_per_s": 4096.0}
    )
    assert (record["result"], record["unit"]) == (2048.0, "prompt tokens/s")
    assert record["share_of_floor"] == 0.5


def test_floor_is_taken_at_the_median_of_the_limits(mid_shape: limits.ModelShape) -> None:
    cell = bench_offline.Cell(concurrency=1, input_len=128, output_len=64)
    measured = [
        {"read_bytes_per_s": read, "float32_flops_per_s": 200e9, "bfloat16_flops_per_s": 900e9}
        for read in (1e9, 42e9, 80e9)
    ]
    floor = bench_offline.floor_of(cell, mid_shape, measured)
    expected = limits.closed_loop_floor(
        mid_shape, MACHINE, concurrency=1, input_len=128, output_len=64
    )
    assert math.isclose(floor["tokens_per_s"], expected["output_tokens_per_s"], rel_tol=1e-5)


def test_prompts_are_the_same_for_every_engine() -> None:
    cell = bench_offline.Cell(concurrency=3, input_len=9, output_len=1)
    prompts = bench_offline.prompts_of(cell, 1000, "seed")
    assert prompts == bench_offline.prompts_of(cell, 1000, "seed")
    assert [len(prompt) for prompt in prompts] == [9, 9, 9]
    assert all(300 <= token < 1000 for prompt in prompts for token in prompt)


def test_command_line_makes_cells_and_engines() -> None:
    arguments = bench_offline.parser().parse_args(
        shlex.split(
            "folder --peers generate,continuous:float32 --ep 2 --threads 2"
            " --engine-arg num_blocks=64 --engine-arg dispatcher=all_gather"
        )
    )
    own, generate, continuous = bench_offline.specs_of(arguments)
    assert (own.name, own.ep) == ("moeserve:bfloat16", 2)
    assert own.args == {"num_blocks": 64, "dispatcher": "all_gather"}
    assert (generate.name, generate.ep, continuous.dtype) == ("generate:bfloat16", 1, "float32")
    cells = bench_offline.cells_of(arguments)
    assert [(c.concurrency, c.input_len, c.output_len) for c in cells] == [
        *((c, 128, 64) for c in (1, 8, 32)),
        (1, 1024, 1),
    ]


def test_unknown_peer_is_refused() -> None:
    arguments = bench_offline.parser().parse_args(["folder", "--peers", "nonsense"])
    with pytest.raises(ValueError, match="peers = 'nonsense'"):
        bench_offline.specs_of(arguments)


@pytest.mark.slow
def test_a_tiny_run_compares_all_engines(tmp_path: Path) -> None:
    from benchmarks.models import build

    build("tiny-qwen3moe", tmp_path)
    arguments = bench_offline.parser().parse_args(
        shlex.split(
            f"{tmp_path} --concurrency 2 --input-len 8 --output-len 3 --prefill-len 0"
            " --repetitions 1 --threads 1 --dtype float32 --engine-arg num_blocks=64"
        )
    )
    specs, cells = bench_offline.specs_of(arguments), bench_offline.cells_of(arguments)
    (record,) = asyncio.run(bench_offline.bench(specs, cells, options=arguments))
    assert list(record["engines"]) == [
        "moeserve:float32",
        "generate:float32",
        "continuous:float32",
    ]
    for peer in ("generate:float32", "continuous:float32"):
        assert record["engines"][peer]["same_first_token"] == 1.0
        assert record["ratio"][peer] > 0
    assert record["overhead"]["step_s"] > 0
    assert {"commit", "hardware", "versions", "limits", "peak_memory_mb"} <= record.keys()
    bench_offline.print_summary([record])


# --- shares of a step ---


def test_shares_of_a_step_sum_to_one() -> None:
    inside = {
        "aten::mm": 4.0,
        "mkldnn::_linear_pointwise": 0.0,
        "aten::_scaled_dot_product_flash_attention_for_cpu": 2.0,
        "aten::copy_": 1.0,
        "aten::silu": 1.0,
    }
    shares = shares_of(inside, 10.0, 5)
    assert shares.step_s == 2.0
    assert (shares.matrix_products, shares.attention) == (0.4, 0.2)
    assert (shares.copies, shares.other_operations) == (0.1, 0.1)
    assert shares.outside_operations == pytest.approx(0.2)
    assert shares.overhead == pytest.approx(0.4)


@given(
    st.dictionaries(
        st.sampled_from(["aten::mm", "aten::add", "aten::copy_", "x::attention"]), st.floats(0, 100)
    ),
    st.floats(0.01, 100),
)
def test_shares_are_a_partition_whatever_the_profiler_says(
    inside: dict[str, float], total_s: float
) -> None:
    shares = shares_of(inside, total_s, 1)
    parts = [
        shares.matrix_products,
        shares.attention,
        shares.copies,
        shares.other_operations,
        shares.outside_operations,
    ]
    assert sum(parts) == pytest.approx(1.0)
    assert all(-1e-9 <= part <= 1 + 1e-9 for part in parts)


def test_a_step_of_one_product_is_no_overhead() -> None:
    torch.set_num_threads(1)
    matrix = torch.randn(512, 512)
    shares = overhead_share(lambda: torch.mm(matrix, matrix), num_steps=5)
    assert shares.matrix_products > shares.copies + shares.other_operations
