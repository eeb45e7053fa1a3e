"""Operations by libraries give what ours give."""

from __future__ import annotations

import pytest
import torch

from moeserve_kernels import libraries
from moeserve_kernels.operations.align import align
from moeserve_kernels.operations.moe import combine, moe_down, moe_up
from moeserve_kernels.operations.quant import quantize_experts
from moeserve_kernels.weights import ExpertWeights

from . import guards

CPU = torch.device("cpu")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("activation", ["silu", "gelu", "swiglu_clamped"])
@pytest.mark.parametrize(("num_tokens", "slots"), [(1, 16), (40, 4), (3, 8)])
def test_grouped_mm_equals_our_products(
    dtype: torch.dtype, activation: str, num_tokens: int, slots: int
) -> None:
    generator = torch.Generator().manual_seed(num_tokens)
    x = torch.randn(num_tokens, 64, generator=generator).to(dtype)
    w13 = ExpertWeights("plain", torch.randn(slots, 64, 64, generator=generator).to(dtype) / 8)
    w2 = ExpertWeights("plain", torch.randn(slots, 64, 32, generator=generator).to(dtype) / 6)
    ids = torch.randint(-1, slots, (num_tokens, 2), generator=generator, dtype=torch.int32)
    weights = torch.rand(num_tokens, 2, generator=generator)
    alignment = align(ids, slots, 16)
    h = libraries.moe_up(x, w13, alignment, activation=activation)
    pairs = libraries.moe_down(h, w2, alignment, topk_weights=weights)
    h = moe_up(x, w13, alignment, activation=activation)
    expected = moe_down(h, w2, alignment, topk_weights=weights)
    got, want = (combine(one, topk_ids=ids) for one in (pairs, expected))
    guards.assert_close(got, want, 1e-5 if dtype == torch.float32 else 1.2e-2)


def test_weights_in_other_formats_are_refused() -> None:
    w13 = quantize_experts(torch.randn(4, 64, 64), "int8")
    alignment = align(torch.zeros(8, 2, dtype=torch.int32), 4, 16)
    with pytest.raises(ValueError, match="int8, must be plain"):
        libraries.moe_up(torch.randn(8, 64), w13, alignment)


def test_a_library_is_offered_only_where_it_pays_and_is_right(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert libraries.self_test(CPU) is None
    assert libraries.available(CPU) == {"grouped_mm": "a loop of products on a CPU"}
    real = torch.nn.functional.grouped_mm
    monkeypatch.setattr(torch.nn.functional, "grouped_mm", lambda *a, **k: real(*a, **k) * 1.1)
    assert "wrong: relative error" in (libraries.self_test(CPU) or "")
    monkeypatch.delattr(torch.nn.functional, "grouped_mm")
    assert "fails" in (libraries.self_test(CPU) or "")
    assert "no torch.nn.functional.grouped_mm" in (libraries.available(CPU)["grouped_mm"] or "")
