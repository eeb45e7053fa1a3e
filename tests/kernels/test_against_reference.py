"""Every operation of the cpu and invariant modes against the reference in float64."""

from __future__ import annotations

import pytest
import torch
from helpers_kernels import assert_close, random_experts, random_paged
from hypothesis import given, settings
from hypothesis import strategies as st

from moeserve_kernels import get_ops

REFERENCE = get_ops("reference")
MODES = {name: get_ops(name) for name in ("cpu", "invariant")}

modes = st.sampled_from(sorted(MODES))
dtypes = st.sampled_from((torch.float32, torch.bfloat16))
seeds = st.integers(0, 2**16)
few = settings(max_examples=40, deadline=None)


def normal(seed: int, *shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


@few
@given(modes, dtypes, seeds, st.integers(0, 40), st.integers(1, 90), st.integers(1, 90))
def test_linear(mode, dtype, seed, rows, inputs, outputs):
    x = normal(seed, rows, inputs, dtype=dtype)
    weight, bias = (
        normal(seed + 1, outputs, inputs, dtype=dtype),
        normal(seed, outputs, dtype=dtype),
    )
    ops = MODES[mode]
    assert_close(ops.linear(x, weight), x.double() @ weight.double().T)
    assert_close(ops.linear(x, weight, bias), x.double() @ weight.double().T + bias.double())


@pytest.mark.parametrize("rows", [1, 2, 3, 64, 65, 200])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_linear_wide_weight(rows, dtype):
    """More than one tile of a widened weight, and each number of rows that takes another way."""
    x, weight = normal(1, rows, 1024, dtype=dtype), normal(2, 1100, 1024, dtype=dtype)
    assert_close(MODES["cpu"].linear(x, weight), x.double() @ weight.double().T)


@few
@given(modes, dtypes, seeds, st.integers(0, 9), st.integers(1, 4), st.integers(1, 70))
def test_rms_norm(mode, dtype, seed, rows, heads, size):
    x, weight = normal(seed, rows, heads, size, dtype=dtype), normal(seed + 1, size, dtype=dtype)
    got = MODES[mode].rms_norm(x, weight, 1e-6)
    assert got.dtype == dtype
    assert_close(got, REFERENCE.rms_norm(x.double(), weight.double(), 1e-6))


@few
@given(modes, dtypes, seeds, st.integers(0, 9), st.integers(1, 4), st.integers(1, 20))
def test_rope(mode, dtype, seed, rows, heads, half):
    x = normal(seed, rows, heads, 2 * half, dtype=dtype)
    angle = normal(seed + 1, rows, half) * 100
    got = MODES[mode].rope(x, angle.cos(), angle.sin())
    turned = torch.view_as_complex(torch.stack(x.double().chunk(2, -1), -1).contiguous())
    turned = turned * torch.polar(torch.ones(rows, half), angle).to(torch.complex128)[:, None]
    assert got.dtype == dtype
    assert_close(got, torch.cat((turned.real, turned.imag), -1))


@few
@given(modes, dtypes, seeds, st.integers(0, 30), st.integers(1, 40))
def test_silu_mul_and_sigmoid(mode, dtype, seed, rows, size):
    x = normal(seed, rows, 2 * size, dtype=dtype) * 3
    assert_close(MODES[mode].silu_mul(x), REFERENCE.silu_mul(x.double()))
    assert_close(MODES[mode].sigmoid(x), torch.sigmoid(x.double()))


@few
@given(modes, seeds, st.integers(0, 30), st.integers(1, 70), st.booleans(), st.data())
def test_route(mode, seed, rows, experts, renormalize, data):
    top_k = data.draw(st.integers(1, experts))
    logits = normal(seed, rows, experts).mul(2).round()  # plenty of ties
    weights, ids = MODES[mode].route(logits, top_k, renormalize)
    probabilities = torch.softmax(logits.double(), -1)
    order = sorted_with_ties(logits)
    assert ids.tolist() == [row[:top_k] for row in order]
    want = probabilities.gather(1, ids)
    assert weights.dtype == torch.float32
    assert_close(weights, want / want.sum(-1, keepdim=True) if renormalize else want)


def sorted_with_ties(logits: torch.Tensor) -> list[list[int]]:
    """By falling logit, equal ones by rising id, in plain Python."""
    return [sorted(range(len(row)), key=lambda i, row=row: (-row[i], i)) for row in logits.tolist()]


@few
@given(modes, dtypes, seeds, st.integers(0, 40), st.integers(1, 4), st.integers(1, 9))
def test_moe(mode, dtype, seed, rows, top_k, slots):
    experts = random_experts(seed, rows=rows, top_k=top_k, slots=slots, dtype=dtype)
    arguments = (experts.hidden_states, experts.w13, experts.w2, experts.slots)
    got = MODES[mode].moe_ffn(*arguments, experts.topk_weights)
    assert got.dtype == dtype
    assert_close(got, REFERENCE.moe_ffn(*experts.double()))
    pairs = MODES[mode].moe_pairs(*arguments)
    assert pairs.dtype == dtype
    assert_close(pairs, REFERENCE.moe_pairs(*experts.double()[:4]))
    summed = MODES[mode].weighted_sum(pairs, experts.topk_weights)
    assert_close(summed, REFERENCE.weighted_sum(pairs.double(), experts.topk_weights))


@pytest.mark.parametrize("mode", sorted(MODES))
@pytest.mark.parametrize("slot", [-1, 0, 4])
def test_moe_all_pairs_alike(mode, slot):
    """All rows to one expert, or all to other ranks."""
    experts = random_experts(3, rows=33, top_k=1, slots=5)
    slots = torch.full_like(experts.slots, slot)
    got = MODES[mode].moe_ffn(
        experts.hidden_states, experts.w13, experts.w2, slots, experts.topk_weights
    )
    hidden, w13, w2, _, weights = experts.double()
    assert_close(got, REFERENCE.moe_ffn(hidden, w13, w2, slots, weights))
    assert slot >= 0 or not got.any()


@pytest.mark.parametrize("mode", sorted(MODES))
def test_moe_without_slots(mode):
    """A rank may hold no expert of a layer."""
    experts = random_experts(3, rows=4, top_k=2, slots=0)
    arguments = (experts.hidden_states, experts.w13, experts.w2, experts.slots)
    assert not MODES[mode].moe_ffn(*arguments, experts.topk_weights).any()
    assert MODES[mode].moe_pairs(*arguments).shape == (4, 2, 72)


lengths = st.lists(
    st.tuples(st.sampled_from((1, 1, 1, 2, 5, 17)), st.integers(0, 70)).map(
        lambda p: (p[0], sum(p))
    ),
    max_size=6,
)


@settings(max_examples=80, deadline=None)
@given(
    modes,
    dtypes,
    seeds,
    lengths,
    st.sampled_from((1, 2)),
    st.sampled_from((1, 4, 8)),
    st.sampled_from((1, 4, 16)),
    st.sampled_from((None, 1, 3, 16, 200)),
)
def test_paged_attention(mode, dtype, seed, lens, kv_heads, group, block_size, window):
    paged = random_paged(
        seed, lens, kv_heads=kv_heads, group=group, block_size=block_size, dtype=dtype
    )
    shape = (paged.block_table, paged.query_lens, paged.seq_lens, 0.3, window)
    got = MODES[mode].paged_attention(paged.query, paged.key_cache, paged.value_cache, *shape)
    want = REFERENCE.paged_attention(
        paged.query.double(), paged.key_cache.double(), paged.value_cache.double(), *shape
    )
    assert got.dtype == dtype
    assert_close(got, want)


@few
@given(st.sampled_from(("cpu", "invariant", "reference")), seeds, st.integers(0, 20))
def test_kv_write(mode, seed, num_tokens):
    key, value = normal(seed, num_tokens, 2, 4), normal(seed + 1, num_tokens, 2, 4)
    caches = torch.zeros(2, 6, 4, 2, 4)
    slots = torch.randperm(24, generator=torch.Generator().manual_seed(seed))[:num_tokens]
    get_ops(mode).kv_write(key, value, caches[0], caches[1], slots)
    want = torch.zeros(2, 24, 2, 4)
    for place, slot in enumerate(slots.tolist()):
        want[0, slot], want[1, slot] = key[place], value[place]
    assert torch.equal(caches.view(2, 24, 2, 4), want)


def test_unknown_mode():
    with pytest.raises(ValueError, match="mode = 'fast': must be one of cpu, invariant"):
        get_ops("fast")
