"""The kernels that pack and unpack rows for other ranks, in the interpreter, against loops."""

from __future__ import annotations

import pytest
import torch

from moeserve_kernels import backend
from moeserve_kernels.formulas import exchange as formulas
from moeserve_kernels.operations.exchange import Packed, ep_pack, ep_unpack

from .. import guards


def pack(
    hidden_states: torch.Tensor,
    pair_ranks: torch.Tensor,
    num_ranks: int,
    quantize: torch.dtype | None = None,
) -> Packed:
    """Twice, between canaries; the bits must be equal."""
    hidden_states, pair_ranks = guards.inside_nan(hidden_states), guards.inside_nan(pair_ranks)
    results = []
    for _ in range(2):
        with backend.forced("triton-interpret"), guards.poisoned_empty():
            results.append(ep_pack(hidden_states, pair_ranks, num_ranks, quantize=quantize))
    one, other = results
    for name in ("rows", "row_tokens", "row_of", "counts"):
        guards.assert_same_bits(getattr(one, name), getattr(other, name))
    return one


def check(found: Packed, expected: Packed) -> None:
    for name in ("row_tokens", "row_of", "counts"):
        guards.assert_same_bits(getattr(found, name), getattr(expected, name))
    in_use = int(expected.counts.sum())
    assert found.rows.shape == expected.rows.shape
    guards.assert_same_bits(found.rows[:in_use], expected.rows[:in_use])
    assert found.rows[in_use:].float().isnan().all() or found.rows.dtype == torch.int8
    if expected.scales is not None:
        assert found.scales is not None
        guards.assert_same_bits(found.scales[:in_use], expected.scales[:in_use])


def draw(
    num_tokens: int, top_k: int, num_ranks: int, dtype: torch.dtype = torch.float32
) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(num_tokens)
    x = torch.randn(num_tokens, 300, generator=generator).to(dtype)
    shape = (num_tokens, top_k)
    return x, torch.randint(-1, num_ranks, shape, generator=generator, dtype=torch.int32)


@pytest.mark.parametrize(
    ("num_tokens", "top_k", "num_ranks"),
    [(1, 1, 1), (5, 3, 4), (64, 2, 2), (65, 2, 2), (9, 8, 50)],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_pack_and_unpack_equal_the_loops(
    num_tokens: int, top_k: int, num_ranks: int, dtype: torch.dtype
) -> None:
    x, pair_ranks = draw(num_tokens, top_k, num_ranks, dtype)
    packed = pack(x, pair_ranks, num_ranks)
    check(packed, formulas.ep_pack(x, pair_ranks, num_ranks))
    rows = guards.inside_nan(packed.rows)  # NaN past the rows in use: they may not be read
    with backend.forced("triton-interpret"), guards.poisoned_empty():
        found, again = ep_unpack(rows, packed), ep_unpack(rows, packed)
    assert found.dtype == dtype
    guards.assert_same_bits(found, again)
    guards.assert_close(found, formulas.ep_unpack(rows.double(), packed))


@pytest.mark.parametrize("quantize", [torch.float8_e4m3fn, torch.int8])
@pytest.mark.parametrize("num_tokens", [9, 70])
def test_rows_are_quantised_as_quant_rows_does(quantize: torch.dtype, num_tokens: int) -> None:
    x, pair_ranks = draw(num_tokens, 3, 4, torch.bfloat16)
    x[0], x[1, 7] = 0, torch.nan
    pair_ranks[:2] = 1
    packed = pack(x, pair_ranks, 4, quantize)
    expected = formulas.ep_pack(x, pair_ranks, 4, quantize=quantize)
    in_use = int(expected.counts.sum())
    assert packed.scales is not None
    assert int(packed.scales[:in_use].isnan().sum()) == 1
    packed.scales.nan_to_num_(7.0)
    assert expected.scales is not None
    expected.scales.nan_to_num_(7.0)
    check(packed, expected)


@pytest.mark.parametrize("rank", [-1, 0, 2, 3, 99])
@pytest.mark.parametrize("num_tokens", [5, 130])
def test_all_to_one_rank_or_nowhere(rank: int, num_tokens: int) -> None:
    x, _ = draw(num_tokens, 2, 3)
    pair_ranks = torch.full((num_tokens, 2), rank, dtype=torch.int32)
    check(pack(x, pair_ranks, 3), formulas.ep_pack(x, pair_ranks, 3))


def test_without_tokens() -> None:
    packed = pack(torch.empty(0, 8), torch.empty(0, 2, dtype=torch.int32), 3)
    assert packed.counts.tolist() == [0, 0, 0]
    with backend.forced("triton-interpret"):
        assert ep_unpack(torch.empty(0, 8), packed).shape == (0, 8)


def test_inputs_may_have_strides() -> None:
    x, pair_ranks = draw(40, 6, 4)
    x, pair_ranks = x[::2, 7:50], pair_ranks.T.contiguous().T[::2, ::2]
    packed = pack(x, pair_ranks, 4)
    check(packed, formulas.ep_pack(x, pair_ranks, 4))
    wide = torch.full((packed.rows.shape[0], 90), torch.nan)
    wide[:, 20:63] = packed.rows
    with backend.forced("triton-interpret"), guards.poisoned_empty():
        found = ep_unpack(wide[:, 20:63], packed)
    guards.assert_close(found, formulas.ep_unpack(packed.rows.double(), packed))
