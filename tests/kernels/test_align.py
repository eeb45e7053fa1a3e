"""Pairs sorted by slot: the CPU implementation against loops over lists."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from moeserve_kernels import check
from moeserve_kernels.alignment import Alignment
from moeserve_kernels.formulas import align as formulas
from moeserve_kernels.operations.align import align

_TENSORS = ("sorted_pairs", "block_slots", "counts", "num_padded_rows")


def assert_equal(found: Alignment, expected: Alignment) -> None:
    for name in _TENSORS:
        one, other = getattr(found, name), getattr(expected, name)
        assert (one is None) == (other is None), name
        if one is not None:
            assert one.dtype == torch.int32, name
            assert torch.equal(one, other), f"{name}: {one.tolist()} {other.tolist()}"
    for name in ("num_pairs", "top_k", "block_m", "is_identity", "num_rows"):
        assert getattr(found, name) == getattr(expected, name), name


@settings(max_examples=500)
@given(st.data())
def test_align_equals_a_loop_over_pairs(data: st.DataObject) -> None:
    num_slots = data.draw(st.integers(1, 9))
    top_k = data.draw(st.integers(1, 4))
    num_tokens = data.draw(st.integers(0, 12))
    block_m = data.draw(st.sampled_from([1, 2, 3, 4, 16, 64]))
    is_mapped = data.draw(st.booleans())
    num_experts = data.draw(st.integers(1, 12)) if is_mapped else num_slots
    ids = data.draw(
        st.lists(
            st.integers(-2, num_experts - 1),
            min_size=num_tokens * top_k,
            max_size=num_tokens * top_k,
        )
    )
    dtype = data.draw(st.sampled_from([torch.int32, torch.int64]))
    topk_ids = torch.tensor(ids, dtype=dtype).view(num_tokens, top_k)
    if data.draw(st.booleans()):
        topk_ids = topk_ids.T.contiguous().T
    expert_map = None
    if is_mapped:
        slots = st.lists(st.integers(-1, num_slots), min_size=num_experts, max_size=num_experts)
        expert_map = torch.tensor(data.draw(slots), dtype=torch.int32)
    expected = formulas.align(topk_ids, num_slots, block_m, expert_map=expert_map)
    assert_equal(align(topk_ids, num_slots, block_m, expert_map=expert_map), expected)


@pytest.mark.parametrize("slot", [0, 7])
def test_all_pairs_in_one_slot_fill_whole_blocks(slot: int) -> None:
    alignment = align(torch.full((8, 4), slot, dtype=torch.int32), 8, 16)
    assert alignment.sorted_pairs is not None
    assert alignment.counts is not None
    assert alignment.sorted_pairs[:32].tolist() == list(range(32))
    assert alignment.block_slots[:2].tolist() == [slot, slot]
    assert int(alignment.counts[slot]) == 32


def test_pairs_of_other_ranks_are_in_no_row() -> None:
    alignment = align(torch.full((8, 4), -1, dtype=torch.int32), 8, 16)
    assert alignment.sorted_pairs is not None
    assert alignment.num_padded_rows is not None
    assert int(alignment.num_padded_rows) == 0
    assert set(alignment.sorted_pairs.tolist()) == {32}
    assert set(alignment.block_slots.tolist()) == {-1}


def test_few_pairs_are_not_sorted() -> None:
    topk_ids = torch.tensor([[3, -1]], dtype=torch.int32)
    alignment = align(topk_ids, 8, 16)
    assert alignment.is_identity
    assert alignment.num_rows == 2
    assert alignment.block_slots.tolist() == [3, -1]
    assert not align(topk_ids, 7, 16).is_identity


def test_rows_never_exceed_their_bound() -> None:
    """One pair a slot pads most."""
    alignment = align(torch.arange(8, dtype=torch.int32)[:, None], 8, 16)
    assert alignment.num_padded_rows is not None
    assert int(alignment.num_padded_rows) == alignment.num_rows == 128


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"topk_ids": torch.zeros(2, 2)}, "topk_ids: dtype is float32"),
        ({"topk_ids": torch.zeros(2, dtype=torch.int32)}, "topk_ids: shape"),
        ({"num_slots": 0}, "num_slots = 0"),
        ({"num_slots": 1025}, "num_slots = 1025"),
        ({"block_m": 0}, "block_m = 0"),
        ({"block_m": 2**28}, "rows"),
        ({"expert_map": torch.zeros(4, dtype=torch.int64)}, "expert_map: dtype"),
        ({"expert_map": torch.zeros(4, 2, dtype=torch.int32)}, "expert_map: shape"),
        ({"expert_map": torch.zeros(8, dtype=torch.int32)[::2]}, "expert_map: stride"),
    ],
)
def test_a_wrong_argument_is_named(change: dict[str, object], named: str) -> None:
    arguments: dict[str, object] = {
        "topk_ids": torch.zeros(2, 2, dtype=torch.int32),
        "num_slots": 4,
        "block_m": 16,
    }
    with pytest.raises(ValueError, match=named):
        align(**(arguments | change))  # type: ignore[arg-type]


def test_debug_names_an_id_out_of_range() -> None:
    topk_ids = torch.full((4, 2), 9, dtype=torch.int32)
    with check.debug(), pytest.raises(ValueError, match=r"topk_ids: holds 9, must be"):
        align(topk_ids, 8, 16)
    with check.debug(), pytest.raises(ValueError, match="expert_map: holds 8"):
        align(topk_ids, 8, 16, expert_map=torch.full((10,), 8, dtype=torch.int32))
    dropped = align(topk_ids, 8, 16)
    assert dropped.num_padded_rows is not None
    assert int(dropped.num_padded_rows) == 0
