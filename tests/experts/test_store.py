"""The expert weights of a rank."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from moeserve.experts.store import ExpertStore
from moeserve_placement import Placement

HIDDEN, INTERMEDIATE = 3, 2
PLACEMENT = Placement(num_experts=3, layers={2: ((1, None, 0), (2, 0)), 5: ((2,), (0, 1))})


def make_store(
    placement: Placement = PLACEMENT, rank: int = 0, dtype: torch.dtype = torch.float32
) -> ExpertStore:
    """An empty store."""
    return ExpertStore(
        placement, rank, hidden_size=HIDDEN, intermediate_size=INTERMEDIATE, dtype=dtype
    )


def weights(layer: int, expert: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Weights that tell which expert they are of: w13 [2I, H], w2 [H, I]."""
    value = float(100 * layer + expert)
    return (
        torch.full((2 * INTERMEDIATE, HIDDEN), value),
        torch.full((HIDDEN, INTERMEDIATE), value + 0.5),
    )


def fill(store: ExpertStore) -> None:
    """Loads every expert that belongs there."""
    for layer in store.layers:
        for slot, expert in enumerate(store.logical(layer)):
            if expert is not None:
                store.load(layer, slot, *weights(layer, expert))


@settings(deadline=None)
@given(data=st.data())
def test_every_rank_of_any_placement_holds_its_experts(
    placements: st.SearchStrategy[Placement], data: st.DataObject
) -> None:
    """Slots per rank and layer differ, some ranks have none; free slots are zero."""
    placement = data.draw(placements)
    rank = data.draw(st.integers(0, placement.num_ranks - 1))
    store = make_store(placement, rank, data.draw(st.sampled_from([torch.float32, torch.bfloat16])))
    fill(store)
    store.check()
    for layer, ranks in placement.layers.items():
        assert store.logical(layer) == ranks[rank]
        assert store.num_slots(layer) == len(ranks[rank])
        assert store.w13(layer).shape == (len(ranks[rank]), 2 * INTERMEDIATE, HIDDEN)
        assert store.w2(layer).shape == (len(ranks[rank]), HIDDEN, INTERMEDIATE)
        for slot, expert in enumerate(ranks[rank]):
            value = 0.0 if expert is None else float(100 * layer + expert)
            assert torch.all(store.w13(layer)[slot] == torch.tensor(value).to(store.w13(layer)))
        store.verify(layer)


def test_a_missing_expert_fails_the_check() -> None:
    """The text says which and where."""
    store = make_store()
    store.load(2, 0, *weights(2, 1))
    store.load(5, 0, *weights(5, 2))
    with pytest.raises(RuntimeError, match="layer 2, slot 2: expert 0 is not loaded"):
        store.check()


def test_a_flipped_bit_is_found() -> None:
    """In either of the two tensors; other layers stay good."""
    for tensor in ("w13", "w2"):
        store = make_store()
        fill(store)
        getattr(store, tensor)(2)[2].view(torch.int32)[0, 0] ^= 1
        with pytest.raises(RuntimeError, match="layer 2, slot 2: weights of expert 0"):
            store.verify(2)
        store.verify(5)


def test_a_slot_is_loaded_once_with_the_right_shape() -> None:
    """Loading twice, into a free slot, or another shape is refused with the place named."""
    store = make_store()
    w13, w2 = weights(2, 1)
    with pytest.raises(ValueError, match=r"expert 1: w2 has shape \[2, 3\], must be \[3, 2\]"):
        store.load(2, 0, w13, w2.t())
    store.load(2, 0, w13, w2)
    with pytest.raises(ValueError, match="layer 2, slot 0: expert 1 is already loaded"):
        store.load(2, 0, w13, w2)
    with pytest.raises(ValueError, match="layer 2, slot 1: is free"):
        store.load(2, 1, w13, w2)


def test_the_size_counts_every_slot() -> None:
    """Four slots of 18 float32 values: three in layer 2, one in layer 5."""
    assert make_store().num_bytes == 4 * 3 * HIDDEN * INTERMEDIATE * 4


def test_a_rank_outside_the_placement_is_refused() -> None:
    """The text says how many ranks there are."""
    with pytest.raises(ValueError, match="rank = 2: the placement is for 2 ranks"):
        make_store(rank=2)
