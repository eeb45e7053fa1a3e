"""From logical experts to physical slots."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from moeserve.experts.mapping import SlotMap
from moeserve_placement import Placement


@settings(deadline=None)
@given(data=st.data())
def test_a_pair_goes_to_a_slot_that_holds_its_expert(
    placements: st.SearchStrategy[Placement], data: st.DataObject
) -> None:
    """On any placement and rank, and to the own rank whenever it has a copy."""
    placement = data.draw(placements)
    rank = data.draw(st.integers(0, placement.num_ranks - 1))
    layer = data.draw(st.sampled_from(sorted(placement.layers)))
    top_k = data.draw(st.integers(1, 4))
    expert_rows = st.lists(
        st.integers(0, placement.num_experts - 1), min_size=top_k, max_size=top_k
    )
    rows = data.draw(st.lists(expert_rows, max_size=6))
    topk_ids = torch.tensor(rows, dtype=torch.int64).view(-1, top_k)
    slot_map = SlotMap(placement, rank)
    physical_ids = slot_map.select(layer, topk_ids)
    assert physical_ids.shape == topk_ids.shape
    assert physical_ids.dtype == torch.int64
    for expert, physical_id, owner in zip(
        topk_ids.flatten().tolist(),
        physical_ids.flatten().tolist(),
        slot_map.owner(physical_ids).flatten().tolist(),
        strict=True,
    ):
        slot = physical_id - slot_map.rank_offsets[owner]
        assert placement.layers[layer][owner][slot] == expert
        assert owner == rank or expert not in placement.layers[layer][rank]
    assert torch.equal(physical_ids, slot_map.select(layer, topk_ids))


def test_copies_on_other_ranks_share_the_tokens_evenly() -> None:
    """300 tokens for two experts with three copies each: 100 pairs for every copy."""
    remote = (0, 1)
    placement = Placement(num_experts=3, layers={0: ((2,), remote, remote, remote)})
    slot_map = SlotMap(placement, rank=0)
    topk_ids = torch.tensor([[0, 1]]).expand(300, 2)
    counts = slot_map.select(0, topk_ids).flatten().bincount(minlength=8)
    assert counts.tolist() == [0, 0, 100, 100, 100, 100, 100, 100]


def test_one_token_spreads_its_experts_over_the_copies() -> None:
    """Experts start at different copies, so a decode step of one token is spread as well."""
    remote = (0, 1)
    placement = Placement(num_experts=3, layers={0: ((2,), remote, remote)})
    slot_map = SlotMap(placement, rank=0)
    owners = slot_map.owner(slot_map.select(0, torch.tensor([[0, 1]])))
    assert sorted(owners.flatten().tolist()) == [1, 2]


def test_ids_leave_room_for_the_widest_rank_of_any_layer() -> None:
    """One stride for all ranks and layers, so the owner is found without a table."""
    layers = {0: ((0,), (1,)), 5: ((0, 1, None), (0,))}
    slot_map = SlotMap(Placement(num_experts=2, layers=layers), rank=1)
    assert slot_map.slots_per_rank == 3
    assert slot_map.rank_offsets == (0, 3)


def test_a_rank_outside_the_placement_is_refused() -> None:
    """The text says how many ranks there are."""
    with pytest.raises(ValueError, match="rank = 2: the placement is for 2 ranks"):
        SlotMap(Placement.linear(4, 2, [0]), rank=2)
