"""Routes and the format of a row on the wire."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from moeserve.parallel.routing import RowFormat, route


@settings(deadline=None)
@given(
    num_rows=st.integers(0, 5),
    hidden_size=st.integers(1, 9),
    top_k=st.integers(1, 5),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
)
def test_a_row_arrives_as_it_was_packed(
    num_rows: int, hidden_size: int, top_k: int, dtype: torch.dtype
) -> None:
    """Any hidden size and dtype, odd ones too; results own their memory and are aligned."""
    row_format = RowFormat(hidden_size=hidden_size, top_k=top_k, dtype=dtype)
    hidden_states = torch.randn(num_rows, hidden_size).to(dtype)
    ids = torch.randint(-1, 2**31 - 1, (num_rows, top_k))
    weights = torch.rand(num_rows, top_k)
    packed = row_format.pack(hidden_states, ids, weights)
    assert packed.shape == (num_rows, row_format.row_bytes)
    assert torch.equal(row_format.ids(packed).long(), ids)
    unpacked = row_format.unpack(packed)
    for got, sent in zip(unpacked, (hidden_states, ids, weights), strict=True):
        assert got.dtype == sent.dtype
        assert torch.equal(got, sent)
        assert got.is_contiguous()
        assert got.data_ptr() % 64 == 0 or num_rows == 0


@settings(deadline=None)
@given(data=st.data())
def test_a_route_has_each_pair_in_one_row_and_each_token_once_per_rank(data: st.DataObject) -> None:
    """Rows are sorted by rank, then token, and the counts add up."""
    world_size = data.draw(st.integers(1, 5))
    slots_per_rank = data.draw(st.integers(1, 6))
    top_k = data.draw(st.integers(1, 4))
    id_rows = st.lists(
        st.integers(0, world_size * slots_per_rank - 1), min_size=top_k, max_size=top_k
    )
    ids = torch.tensor(data.draw(st.lists(id_rows, max_size=8)), dtype=torch.int64).view(-1, top_k)
    plan = route(ids, slots_per_rank, world_size)
    wanted = []  # the plain way
    for rank in range(world_size):
        for token, row in enumerate(ids.tolist()):
            pairs = [physical_id // slots_per_rank == rank for physical_id in row]
            if any(pairs):
                wanted.append((rank, token, pairs))
    assert plan.token_of_row.tolist() == [token for _, token, _ in wanted]
    assert plan.is_pair.tolist() == [pairs for _, _, pairs in wanted]
    for rank in range(world_size):
        mine = [pairs for owner, _, pairs in wanted if owner == rank]
        assert plan.num_rows[rank] == len(mine)
        assert plan.num_pairs[rank] == sum(map(sum, mine))
    assert sum(plan.num_pairs) == ids.numel()
