"""The decoder's operations as Triton kernels, in the interpreter, against float64."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from helpers_kernels import assert_close, random_experts, random_paged
from hypothesis import given, settings
from hypothesis import strategies as st

from moeserve_kernels import backend, get_ops

REFERENCE = get_ops("reference")
OPS = get_ops("triton")
few = settings(max_examples=8, deadline=None)
dtypes = st.sampled_from((torch.float32, torch.bfloat16))
seeds = st.integers(0, 2**16)


@pytest.fixture(autouse=True, scope="module")
def interpreted() -> Iterator[None]:
    with backend.forced("triton-interpret"):
        yield


@few
@given(dtypes, seeds, st.integers(0, 20), st.integers(1, 3), st.integers(0, 5))
def test_experts(dtype: torch.dtype, seed: int, rows: int, top_k: int, slots: int) -> None:
    with backend.forced("triton-interpret"):
        experts = random_experts(seed, rows=rows, top_k=top_k, slots=slots, dtype=dtype)
        arguments = (experts.hidden_states, experts.w13, experts.w2, experts.slots)
        got = OPS.moe_ffn(*arguments, experts.topk_weights)
        pairs = OPS.moe_pairs(*arguments)
        summed = OPS.weighted_sum(pairs, experts.topk_weights)
    assert_close(got, REFERENCE.moe_ffn(*experts.double()))
    assert_close(pairs, REFERENCE.moe_pairs(*experts.double()[:4]))
    assert_close(summed, REFERENCE.weighted_sum(pairs.double(), experts.topk_weights))


@few
@given(
    dtypes,
    seeds,
    st.lists(st.tuples(st.sampled_from((1, 1, 5)), st.integers(0, 40)), max_size=3),
    st.sampled_from((1, 4)),
    st.sampled_from((None, 3, 16)),
)
def test_paged_attention(
    dtype: torch.dtype, seed: int, lens: list[tuple[int, int]], group: int, window: int | None
) -> None:
    paged = random_paged(
        seed, [(q, q + n) for q, n in lens], kv_heads=2, group=group, block_size=4, dtype=dtype
    )
    shape = (paged.block_table, paged.query_lens, paged.seq_lens, 0.3, window)
    caches = (paged.key_cache, paged.value_cache)
    with backend.forced("triton-interpret"):
        got = OPS.paged_attention(paged.query, *caches, *shape)
    want = REFERENCE.paged_attention(
        paged.query.double(), *(cache.double() for cache in caches), *shape
    )
    assert_close(got, want)


@few
@given(dtypes, seeds, st.integers(0, 9), st.integers(2, 20))
def test_small_operations(dtype: torch.dtype, seed: int, rows: int, size: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, 2 * size, generator=generator).to(dtype)
    weight = torch.randn(2 * size, generator=generator).to(dtype)
    with backend.forced("triton-interpret"):
        normed = OPS.rms_norm(x, weight, 1e-6)
        weights, ids = OPS.route(x.float(), 2, True)
        activated, gate = OPS.silu_mul(x), OPS.sigmoid(x)
    assert_close(normed, REFERENCE.rms_norm(x.double(), weight.double(), 1e-6))
    want, want_ids = REFERENCE.route(x.double(), 2, True)
    assert ids.dtype == torch.int64
    assert torch.equal(ids, want_ids)
    assert_close(weights, want.double())
    assert_close(activated, REFERENCE.silu_mul(x.double()))
    assert_close(gate, torch.sigmoid(x.double()))
