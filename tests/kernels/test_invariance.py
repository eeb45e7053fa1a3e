"""The invariant mode: a row has the same bits alone, in any company, at any place."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from helpers_kernels import random_experts, random_paged
from hypothesis import given, settings
from hypothesis import strategies as st

from moeserve_kernels import get_ops
from moeserve_kernels.invariant_linear import TileLinear, rows_are_independent

OPS = get_ops("invariant")

dtypes = st.sampled_from((torch.float32, torch.bfloat16))
seeds = st.integers(0, 2**16)
rows_of = st.integers(1, 70)
sizes = st.one_of(st.integers(1, 140), st.sampled_from((256, 1024)))
few = settings(max_examples=60, deadline=None)


def normal(seed: int, *shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def assert_rows_independent(function: Callable[..., torch.Tensor], *inputs: torch.Tensor) -> None:
    """``function`` of all rows, of a shuffled part of them, and of each alone: equal bits."""
    whole = function(*inputs)
    order = torch.randperm(len(inputs[0]), generator=torch.Generator().manual_seed(0))
    part = order[: 1 + len(order) // 2]
    assert torch.equal(function(*(x[part] for x in inputs)), whole[part])
    for row in {0, len(whole) // 2, len(whole) - 1}:
        alone = function(*(x[row : row + 1] for x in inputs))
        assert torch.equal(alone, whole[row : row + 1])


@few
@given(dtypes, seeds, rows_of, sizes, sizes)
def test_linear(dtype, seed, rows, inputs, outputs):
    weight, bias = normal(seed, outputs, inputs, dtype=dtype), normal(seed, outputs, dtype=dtype)
    x = normal(seed + 1, rows, inputs, dtype=dtype)
    assert_rows_independent(lambda x: OPS.linear(x, weight, bias), x)


@few
@given(seeds, rows_of, sizes, sizes)
def test_linear_does_not_depend_on_where_the_weight_lies(seed, rows, inputs, outputs):
    x, weight = normal(seed, rows, inputs), normal(seed + 1, outputs, inputs)
    for shift in (1, 3, 16):
        memory = torch.zeros(weight.numel() + shift)
        memory[shift:] = weight.flatten()
        moved = memory[shift:].view(outputs, inputs)
        assert torch.equal(OPS.linear(x, moved), OPS.linear(x, weight))


@few
@given(dtypes, seeds, rows_of, sizes)
def test_rms_norm(dtype, seed, rows, size):
    weight = normal(seed, size, dtype=dtype)
    x = normal(seed + 1, rows, size, dtype=dtype)
    assert_rows_independent(lambda x: OPS.rms_norm(x, weight, 1e-6), x)
    assert_rows_independent(lambda x: OPS.rms_norm(x.view(len(x), -1, 1), weight[:1], 1e-6), x)


@few
@given(dtypes, seeds, rows_of, sizes)
def test_elementwise(dtype, seed, rows, size):
    x = normal(seed, rows, 2 * size, dtype=dtype)
    assert_rows_independent(OPS.silu_mul, x)
    assert_rows_independent(OPS.sigmoid, x[:, :1])
    angles = normal(seed + 1, rows, size)
    assert_rows_independent(OPS.rope, x[:, None], angles.cos(), angles.sin())


@few
@given(dtypes, seeds, rows_of, st.integers(1, 130), st.booleans(), st.data())
def test_route(dtype, seed, rows, experts, renormalize, data):
    top_k = data.draw(st.integers(1, experts))
    logits = normal(seed, rows, experts, dtype=dtype)
    for part in (0, 1):
        assert_rows_independent(lambda x, i=part: OPS.route(x, top_k, renormalize)[i], logits)


@few
@given(dtypes, seeds, rows_of, st.integers(1, 6), st.integers(1, 9))
def test_experts(dtype, seed, rows, top_k, slots):
    experts = random_experts(seed, rows=rows, top_k=top_k, slots=slots, dtype=dtype)
    hidden, chosen, weights = experts.hidden_states, experts.slots, experts.topk_weights
    assert_rows_independent(
        lambda x, s: OPS.moe_pairs(x, experts.w13, experts.w2, s), hidden, chosen
    )
    assert_rows_independent(
        lambda x, s, w: OPS.moe_ffn(x, experts.w13, experts.w2, s, w), hidden, chosen, weights
    )


@few
@given(seeds, st.integers(1, 30), st.integers(2, 9))
def test_experts_do_not_depend_on_their_slot(seed, rows, slots):
    experts = random_experts(seed, rows=rows, top_k=2, slots=slots)
    order = torch.randperm(slots, generator=torch.Generator().manual_seed(seed))
    moved = torch.where(experts.slots >= 0, order.argsort()[experts.slots], -1)
    before = OPS.moe_pairs(experts.hidden_states, experts.w13, experts.w2, experts.slots)
    after = OPS.moe_pairs(experts.hidden_states, experts.w13[order], experts.w2[order], moved)
    assert torch.equal(after, before)


@few
@given(
    dtypes,
    seeds,
    st.integers(1, 150),
    st.sampled_from((1, 2, 4)),
    st.sampled_from((None, 1, 7, 64, 100)),
    st.data(),
)
def test_attention_whole_chunked_and_in_other_blocks(dtype, seed, length, group, window, data):
    """A prompt in one go, cut into chunks, in small and large blocks, beside another request."""
    shape = {"group": group, "dtype": dtype}
    one = random_paged(seed, [(length, length)], **shape)

    def attend(query, key_cache, value_cache, table, query_lens, seq_lens):
        return OPS.paged_attention(
            query, key_cache, value_cache, table, query_lens, seq_lens, 0.3, window
        )

    caches = (one.key_cache, one.value_cache)
    whole = attend(one.query, *caches, one.block_table, (length,), (length,))
    cuts = sorted(data.draw(st.sets(st.integers(1, length), max_size=6)) | {length})
    start = 0
    for end in cuts:
        chunk = attend(one.query[start:end], *caches, one.block_table, (end - start,), (end,))
        assert torch.equal(chunk, whole[start:end])
        start = end
    other = random_paged(seed + 1, [(3, 40), (1, 9)], block_size=16, **shape)
    moved = [torch.zeros(length // 16 + 9, 16, *cache.shape[2:], dtype=dtype) for cache in caches]
    blocks = torch.randperm(len(moved[0]), generator=torch.Generator().manual_seed(seed))
    table = torch.zeros(3, max(len(blocks), 1), dtype=torch.int64)
    table[1, : len(blocks)] = blocks
    places = torch.arange(length)
    for target, cache in zip(moved, caches, strict=True):
        tokens = cache[one.block_table[0]].flatten(0, 1)[:length]
        target[blocks[places // 16], places % 16] = tokens
    query = torch.cat((other.query[:3], one.query, other.query[3:]))
    beside = attend(query, *moved, table, (3, length, 1), (5, length, 1))
    assert torch.equal(beside[3:-1], whole)


def test_a_shape_that_fails_the_self_test_gets_smaller_tiles(monkeypatch):
    monkeypatch.setattr(
        "moeserve_kernels.invariant_linear.rows_are_independent", lambda weight, rows: rows <= 4
    )
    linear = TileLinear()
    x, weight = normal(0, 21, 8), normal(1, 5, 8)
    torch.testing.assert_close(linear(x, weight), x @ weight.T)
    assert linear._rows_by_shape == {(5, 8): 4}


def test_the_self_test_notices_dependence(monkeypatch):
    """A product that rounds by the company of a row does not pass."""
    weight = normal(0, 6, 8)
    assert rows_are_independent(weight, 4)

    class Company(torch.Tensor):
        """Its product with a tile adds a trifle that depends on the whole tile."""

        @classmethod
        def __torch_function__(cls, func, types, args=(), kwargs=None):
            result = super().__torch_function__(func, types, args, kwargs or {})
            if func is torch.Tensor.__rmatmul__ or func is torch.Tensor.matmul:
                return torch.Tensor(result) + args[0].sum() * 1e-3
            return result

    assert not rows_are_independent(weight.as_subclass(Company), 4)


@pytest.mark.parametrize("size", [1, 2, 3, 17, 64, 1000])
def test_sum_last(size):
    from moeserve_kernels.invariant_rows import sum_last

    x = normal(size, 3, size)
    torch.testing.assert_close(sum_last(x)[:, 0], x.sum(1), rtol=1e-5, atol=1e-5)
