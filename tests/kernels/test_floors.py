"""The least times, against figures worked out by hand for an H200."""

from __future__ import annotations

import pytest

from moeserve_kernels import floors
from moeserve_kernels.floors import H200, MoeShape

MIXTRAL = MoeShape(8, 2, 4096, 14336, 8)
QWEN3 = MoeShape(128, 8, 2048, 768, 128)
OLMOE = MoeShape(64, 8, 2048, 1024, 64)
DEEPSEEK_EP8 = MoeShape(256, 8, 7168, 2048, 32)


@pytest.mark.parametrize(
    ("shape", "num_tokens", "expected_us", "bound"),
    [
        (MIXTRAL, 1, 163.9, "memory"),
        (MIXTRAL, 1024, 913.4, "compute"),
        (QWEN3, 1, 17.6, "memory"),
        (QWEN3, 64, 277.9, "memory"),
        (QWEN3, 4096, 391.4, "compute"),
        (OLMOE, 16, 165.6, "memory"),
        (OLMOE, 16384, 2087.7, "compute"),
        (DEEPSEEK_EP8, 16, 261.3, "memory"),
        (DEEPSEEK_EP8, 4096, 717.9, "memory"),
    ],
)
def test_expert_ffn(shape: MoeShape, num_tokens: int, expected_us: float, bound: str) -> None:
    floor = floors.moe_ffn(shape, num_tokens)
    assert floor.microseconds(H200) == pytest.approx(expected_us, abs=0.051)
    assert floor.bound(H200) == bound


def test_narrow_weights_lower_the_memory_bound_floor_in_proportion() -> None:
    narrow = MoeShape(128, 8, 2048, 768, 128, bytes_per_weight=1.0)
    wide, half = (floors.moe_ffn(one, 64).num_bytes for one in (QWEN3, narrow))
    weights = QWEN3.experts_hit(64) * 3 * 2048 * 768 * 2
    assert wide - half == pytest.approx(weights / 2)


def test_break_even_rows_of_bf16_and_fp8() -> None:
    assert floors.break_even_rows(H200) == pytest.approx(184, abs=0.5)
    assert floors.break_even_rows(H200, 1.0) == pytest.approx(92, abs=0.5)


@pytest.mark.parametrize(
    ("batch", "seq_len", "heads", "kv_heads", "expected_us"),
    [
        (1, 1024, 32, 8, 1.0),
        (32, 8192, 32, 8, 249.8),
        (256, 32768, 32, 4, 3996.3),
        (128, 1024, 64, 8, 125.8),
    ],
)
def test_decode_attention(
    batch: int, seq_len: int, heads: int, kv_heads: int, expected_us: float
) -> None:
    floor = floors.attn_decode(batch, seq_len, heads, kv_heads, 128)
    assert floor.microseconds(H200) == pytest.approx(expected_us, abs=0.051)


def test_mla_decode_is_compute_bound_with_all_heads_and_memory_bound_with_few() -> None:
    assert floors.mla_decode(128, 8192, 128).microseconds(H200) == pytest.approx(369.7, abs=0.051)
    assert floors.mla_decode(128, 8192, 128).bound(H200) == "compute"
    assert floors.mla_decode(128, 8192, 16).bound(H200) == "memory"


def test_causal_prefill_counts_what_each_query_sees() -> None:
    whole = floors.attn_prefill(4, 4, 1, 1, 64)
    assert whole.flops == 4 * (1 + 2 + 3 + 4) * 64
    last = floors.attn_prefill(1, 4, 1, 1, 64)
    assert last.flops == 4 * 4 * 64
