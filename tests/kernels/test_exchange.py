"""Packing rows for other ranks: the CPU implementation against loops over ranks and tokens."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from moeserve_kernels import check
from moeserve_kernels.formulas import exchange as formulas
from moeserve_kernels.operations.exchange import Packed, ep_pack, ep_unpack


def assert_equal(found: Packed, expected: Packed) -> None:
    """All that is in use."""
    for name in ("row_tokens", "row_of", "counts"):
        one, other = getattr(found, name), getattr(expected, name)
        assert one.dtype == torch.int32, name
        assert torch.equal(one, other), name
    in_use = int(expected.counts.sum())
    assert found.rows.shape == expected.rows.shape
    assert found.rows.dtype == expected.rows.dtype
    same = found.rows[:in_use].view(torch.uint8) == expected.rows[:in_use].view(torch.uint8)
    assert same.all()
    assert (found.scales is None) == (expected.scales is None)
    if found.scales is not None and expected.scales is not None:
        assert found.scales.shape == expected.scales.shape
        assert torch.equal(found.scales[:in_use], expected.scales[:in_use])


@settings(max_examples=300)
@given(st.data())
def test_pack_and_unpack_equal_the_loops(data: st.DataObject) -> None:
    num_ranks = data.draw(st.integers(1, 6))
    top_k = data.draw(st.integers(1, 5))
    num_tokens = data.draw(st.integers(0, 9))
    size = num_tokens * top_k
    ranks = data.draw(st.lists(st.integers(-1, num_ranks - 1), min_size=size, max_size=size))
    pair_ranks = torch.tensor(ranks, dtype=torch.int32).view(num_tokens, top_k)
    quantize = data.draw(st.sampled_from([None, torch.int8, torch.float8_e4m3fn]))
    torch.manual_seed(data.draw(st.integers(0, 99)))
    hidden_states = torch.randn(num_tokens, 17)
    packed = ep_pack(hidden_states, pair_ranks, num_ranks, quantize=quantize)
    expected = formulas.ep_pack(hidden_states, pair_ranks, num_ranks, quantize=quantize)
    assert_equal(packed, expected)
    rows = torch.full((packed.row_tokens.shape[0], 11), torch.nan)
    in_use = int(packed.counts.sum())
    rows[:in_use] = torch.randn(in_use, 11)
    found = ep_unpack(rows, packed)
    torch.testing.assert_close(
        found.double(), formulas.ep_unpack(rows.double(), expected), rtol=1e-5, atol=1e-5
    )


def test_a_token_goes_once_to_a_rank_and_comes_back_summed() -> None:
    hidden_states = torch.tensor([[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]])
    pair_ranks = torch.tensor([[1, 1, 0], [-1, -1, -1], [1, -1, 1]], dtype=torch.int32)
    packed = ep_pack(hidden_states, pair_ranks, 2)
    assert packed.counts.tolist() == [1, 2]
    assert packed.row_tokens.tolist() == [0, 0, 2, -1, -1, -1]
    assert packed.row_of.tolist() == [[0, 1], [-1, -1], [-1, 2]]
    assert packed.rows[:3].tolist() == [[1.0, 2.0], [1.0, 2.0], [5.0, 6.0]]
    assert ep_unpack(packed.rows, packed).tolist() == [[2.0, 4.0], [0.0, 0.0], [5.0, 6.0]]


def test_quantised_rows_stay_near() -> None:
    hidden_states = torch.randn(20, 64, dtype=torch.bfloat16)
    pair_ranks = torch.randint(0, 4, (20, 2), dtype=torch.int32)
    packed = ep_pack(hidden_states, pair_ranks, 4, quantize=torch.float8_e4m3fn)
    in_use = int(packed.counts.sum())
    assert packed.scales is not None
    rows = packed.rows[:in_use].float() * packed.scales[:in_use, None]
    expected = hidden_states[packed.row_tokens[:in_use].long()].float()
    assert (rows - expected).norm() <= 0.03 * expected.norm()


def test_sums_are_rounded_once() -> None:
    """In bfloat16 alone 256 + 1 is 256."""
    pair_ranks = torch.tensor([[0, 1, 2]], dtype=torch.int32)
    packed = ep_pack(torch.zeros(1, 1), pair_ranks, 3)
    rows = torch.tensor([[256.0], [1.0], [1.0]], dtype=torch.bfloat16)
    assert ep_unpack(rows, packed).tolist() == [[258.0]]


def test_a_wrong_argument_is_named() -> None:
    x, ranks = torch.ones(3, 4), torch.zeros(3, 2, dtype=torch.int32)
    packed = ep_pack(x, ranks, 2)
    with pytest.raises(ValueError, match="hidden_states: shape"):
        ep_pack(x[0], ranks, 2)
    with pytest.raises(ValueError, match="hidden_states: stride"):
        ep_pack(x[:, ::2], ranks, 2)
    with pytest.raises(ValueError, match="pair_ranks: shape"):
        ep_pack(x, ranks[:2], 2)
    with pytest.raises(ValueError, match="pair_ranks: dtype"):
        ep_pack(x, ranks.long(), 2)
    with pytest.raises(ValueError, match="num_ranks = 0"):
        ep_pack(x, ranks, 0)
    with pytest.raises(ValueError, match="num_ranks = 1025"):
        ep_pack(x, ranks, 1025)
    with pytest.raises(ValueError, match=r"quantize = torch\.uint8"):
        ep_pack(x, ranks, 2, quantize=torch.uint8)
    with pytest.raises(ValueError, match="rows: shape"):
        ep_unpack(x, packed)
    with check.debug(), pytest.raises(ValueError, match="pair_ranks: holds 2"):
        ep_pack(x, ranks + 2, 2)
    assert ep_pack(x, ranks + 2, 2).counts.tolist() == [0, 0]
