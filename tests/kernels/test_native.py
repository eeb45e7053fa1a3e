"""The compiled operations against float64, and that a row's bits are its own."""

from __future__ import annotations

import platform
import shutil
import sysconfig
from pathlib import Path

import pytest
import torch
from helpers_kernels import assert_close, random_experts, random_paged
from hypothesis import given, settings
from hypothesis import strategies as st

from moeserve_kernels import get_ops, native
from moeserve_kernels.cpu import CpuOps

REFERENCE = get_ops("reference")
few = settings(max_examples=60, deadline=None)
seeds = st.integers(0, 2**16)
sixteens = st.integers(1, 7).map(lambda n: 16 * n)
needs_native = pytest.mark.skipif(not native.is_available(), reason="no compiled operations here")


def can_be_built() -> bool:
    """Whether this machine has what the build needs: x86 with AVX2, a compiler, Python's header."""
    flags = Path("/proc/cpuinfo").read_text() if platform.system() == "Linux" else ""
    header = Path(sysconfig.get_paths()["include"], "Python.h")
    return " avx2 " in flags and shutil.which("cc") is not None and header.exists()


@pytest.mark.skipif(not can_be_built(), reason="no compiler, or another CPU")
def test_the_build_did_not_fail_in_silence():
    assert native.is_available(), "install the package again and look for the compiler's message"


def bfloat16(seed: int, *shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).bfloat16()


def rounds_right(got: torch.Tensor, want: torch.Tensor) -> bool:
    """Whether nearly all values are the float64 ones rounded once; ties may fall either way."""
    return got.numel() == 0 or float((got == want.bfloat16()).float().mean()) > 0.97


@needs_native
@few
@given(seeds, st.integers(0, 70), sixteens, st.integers(1, 130), st.sampled_from((1, 2)))
def test_linear_rounds_once(seed, rows, inputs, outputs, threads):
    torch.set_num_threads(threads)
    x, weight = bfloat16(seed, rows, inputs), bfloat16(seed + 1, outputs, inputs)
    got, want = native.linear(x, weight), x.double() @ weight.double().T
    assert_close(got, want)
    assert rounds_right(got, want)


@needs_native
@few
@given(seeds, st.integers(0, 80), st.integers(1, 4), st.integers(1, 9), sixteens, sixteens)
def test_moe_rounds_once(seed, rows, top_k, slots, hidden, size):
    torch.set_num_threads(2)
    experts = random_experts(
        seed,
        rows=rows,
        top_k=top_k,
        slots=slots,
        hidden=hidden,
        size=size,
        dtype=torch.bfloat16,
    )
    arguments = (experts.hidden_states, experts.w13, experts.w2, experts.slots)
    got, want = (
        native.moe_ffn(*arguments, experts.topk_weights),
        REFERENCE.moe_ffn(*experts.double()),
    )
    assert_close(got, want)
    assert rounds_right(got, want)
    pairs = native.moe_pairs(*arguments)
    assert_close(pairs, REFERENCE.moe_pairs(*experts.double()[:4]))
    assert not pairs[experts.slots < 0].any()


@needs_native
@few
@given(seeds, st.integers(1, 70), st.integers(1, 3), st.data())
def test_bits_of_a_row_do_not_depend_on_the_others(seed, rows, threads, data):
    torch.set_num_threads(threads)
    experts = random_experts(
        seed, rows=rows, top_k=3, slots=5, hidden=96, size=80, dtype=torch.bfloat16
    )
    row = data.draw(st.integers(0, rows - 1))
    one = slice(row, row + 1)
    w13, w2 = experts.w13, experts.w2
    together = native.moe_ffn(experts.hidden_states, w13, w2, experts.slots, experts.topk_weights)
    torch.set_num_threads(1)
    alone = native.moe_ffn(
        experts.hidden_states[one], w13, w2, experts.slots[one], experts.topk_weights[one]
    )
    assert torch.equal(together[one], alone)
    product = native.linear(experts.hidden_states, w13[0])
    assert torch.equal(product[one], native.linear(experts.hidden_states[one], w13[0]))


@needs_native
@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
def test_a_row_that_is_not_finite_stays_the_only_one(bad):
    experts = random_experts(5, rows=6, top_k=2, slots=4, hidden=64, size=48, dtype=torch.bfloat16)
    slots = torch.tensor([[0, 1]] * 6)
    hidden = experts.hidden_states.clone()
    clean = native.moe_ffn(hidden, experts.w13, experts.w2, slots, experts.topk_weights)
    hidden[2, 5] = bad
    got = native.moe_ffn(hidden, experts.w13, experts.w2, slots, experts.topk_weights)
    others = torch.arange(6) != 2
    assert not got[2].isfinite().any()
    assert torch.equal(got[others], clean[others])


@needs_native
@pytest.mark.parametrize("scale", [1e-12, 1e-3, 20.0, 300.0, 1e6])
def test_gates_of_any_size(scale):
    """exp() of the gate must neither overflow nor lose the small ones."""
    experts = random_experts(7, rows=9, top_k=1, slots=1, hidden=64, size=64, dtype=torch.bfloat16)
    slots = torch.zeros_like(experts.slots)
    w13 = experts.w13 * scale
    got = native.moe_ffn(experts.hidden_states, w13, experts.w2, slots, experts.topk_weights)
    hidden, _, w2, _, weights = experts.double()
    want = REFERENCE.moe_ffn(hidden, w13.double(), w2, slots, weights)
    assert float((got.double() - want).norm() / want.norm()) < 4e-3


@needs_native
@pytest.mark.parametrize("slot", [-2, 4, 2**40])
def test_a_slot_out_of_range_is_refused(slot):
    experts = random_experts(5, rows=3, top_k=2, slots=4, hidden=64, size=48, dtype=torch.bfloat16)
    slots = torch.full_like(experts.slots, slot)
    with pytest.raises(ValueError, match="slots"):
        native.moe_pairs(experts.hidden_states, experts.w13, experts.w2, slots)


@needs_native
def test_what_it_does_not_take_goes_to_torch():
    """Odd depths, views with gaps, float32: the result must be right all the same."""
    ops = CpuOps(compiled=True)
    for x, weight in (
        (bfloat16(1, 3, 40), bfloat16(2, 8, 40)),
        (bfloat16(1, 3, 32), bfloat16(2, 8, 64)[:, ::2]),
        (bfloat16(1, 3, 32).float(), bfloat16(2, 8, 32).float()),
        (bfloat16(1, 3, 64)[:, ::2], bfloat16(2, 8, 32)),
    ):
        assert_close(ops.linear(x, weight), x.double() @ weight.double().T)
    assert not native.takes(bfloat16(1, 3, 40), bfloat16(2, 8, 40))
    assert not native.takes(bfloat16(1, 3, 32).float(), bfloat16(2, 8, 32))


@needs_native
def test_both_ways_agree_on_a_layer():
    experts = random_experts(
        9, rows=40, top_k=4, slots=8, hidden=128, size=96, dtype=torch.bfloat16
    )
    arguments = (experts.hidden_states, experts.w13, experts.w2, experts.slots)
    for compiled in (False, True):
        got = CpuOps(compiled=compiled).moe_ffn(*arguments, experts.topk_weights)
        assert_close(got, REFERENCE.moe_ffn(*experts.double()))


lengths = st.lists(st.integers(1, 300), min_size=1, max_size=6)


@needs_native
@few
@given(
    seeds,
    lengths,
    st.sampled_from((1, 3, 16, 64)),
    st.sampled_from((1, 2, 3)),
    st.sampled_from((1, 2, 3, 4, 7, 8)),
    st.sampled_from((16, 64, 80)),
    st.sampled_from((None, 1, 5, 64, 100)),
)
def test_decode_attention(seed, lens, block_size, kv_heads, group, head_dim, window):
    torch.set_num_threads(2)
    paged = random_paged(
        seed,
        [(1, length) for length in lens],
        kv_heads=kv_heads,
        group=group,
        head_dim=head_dim,
        block_size=block_size,
        dtype=torch.bfloat16,
    )
    caches = (paged.key_cache, paged.value_cache, paged.block_table)
    seq_lens = torch.tensor(paged.seq_lens)
    got = native.attn_decode(paged.query, *caches, seq_lens, 0.3, window)
    want = REFERENCE.paged_attention(
        paged.query.double(),
        paged.key_cache.double(),
        paged.value_cache.double(),
        paged.block_table,
        paged.query_lens,
        paged.seq_lens,
        0.3,
        window,
    )
    assert_close(got, want)
    assert rounds_right(got, want)
    alone = native.attn_decode(
        paged.query[-1:], *caches[:2], caches[2][-1:], seq_lens[-1:], 0.3, window
    )
    assert torch.equal(alone, got[-1:])


@needs_native
def test_scores_of_any_size():
    """A later chunk with a far larger score makes all before it vanish, without overflow."""
    paged = random_paged(1, [(1, 200)], head_dim=16, block_size=16, dtype=torch.bfloat16)
    for scale in (1e-4, 30.0, 1e4):
        got = native.attn_decode(
            paged.query,
            paged.key_cache,
            paged.value_cache,
            paged.block_table,
            torch.tensor([200]),
            scale,
        )
        want = REFERENCE.paged_attention(
            paged.query.double(),
            paged.key_cache.double(),
            paged.value_cache.double(),
            paged.block_table,
            (1,),
            (200,),
            scale,
        )
        assert_close(got, want)


@needs_native
@pytest.mark.parametrize("change", ["length", "block", "negative"])
def test_a_block_table_that_does_not_fit_is_refused(change):
    paged = random_paged(1, [(1, 30)], block_size=16, dtype=torch.bfloat16)
    table, length = paged.block_table.clone(), 30
    if change == "length":
        length = 33
    else:
        table[0, 1] = paged.key_cache.shape[0] if change == "block" else -1
    with pytest.raises(ValueError, match="block_table"):
        native.attn_decode(
            paged.query,
            paged.key_cache,
            paged.value_cache,
            table,
            torch.tensor([length]),
            1.0,
        )
