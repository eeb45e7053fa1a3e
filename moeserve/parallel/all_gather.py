"""The transport for few tokens: everyone gets all of them and picks its own.

Two collectives a layer, rows and results: the step's agreement already says how many tokens each
rank has, so no counts are exchanged and nothing is padded. The price is bytes: every token travels
to every rank.
"""

from __future__ import annotations

import torch

from moeserve.parallel.combine import RemoteHandle, combine
from moeserve.parallel.dispatcher import Dispatched, StepSizes
from moeserve.parallel.groups import ParallelGroups
from moeserve.parallel.routing import RowFormat, route
from moeserve_kernels.ops import Ops


class AllGatherDispatcher:
    """All-gather out, all-to-all back."""

    name = "all_gather"

    def __init__(self, groups: ParallelGroups, slots_per_rank: int, ops: Ops) -> None:
        """slots_per_rank: of the ``SlotMap`` that makes the physical ids."""
        self._groups = groups
        self._slots_per_rank = slots_per_rank
        self._ops = ops

    def dispatch(
        self,
        hidden_states: torch.Tensor,
        physical_ids: torch.Tensor,
        topk_weights: torch.Tensor,
        sizes: StepSizes,
    ) -> Dispatched:
        """See ``TokenDispatcher``. Rows come in order of the sending rank, then of its tokens."""
        row_format = RowFormat(
            hidden_size=hidden_states.shape[1],
            top_k=physical_ids.shape[1],
            dtype=hidden_states.dtype,
        )
        packed = row_format.pack(hidden_states, physical_ids, topk_weights)
        gathered = self._groups.all_gather(packed, sizes.num_tokens)  # [sizes.total, row_bytes]
        is_mine = (row_format.ids(gathered) // self._slots_per_rank == self._groups.rank).any(1)
        rows, ids, row_weights = row_format.unpack(gathered[is_mine])
        is_here = ids // self._slots_per_rank == self._groups.rank
        slots = (ids % self._slots_per_rank).where(is_here, -1)
        handle = RemoteHandle(
            route=route(physical_ids, self._slots_per_rank, self._groups.world_size),
            topk_weights=topk_weights,
            slots=slots,
            num_rows=tuple(
                int(part.sum()) for part in torch.split(is_mine, list(sizes.num_tokens))
            ),
        )
        return Dispatched(hidden_states=rows, slots=slots, topk_weights=row_weights, handle=handle)

    def combine(self, expert_rows: torch.Tensor, handle: object) -> torch.Tensor:
        """See ``TokenDispatcher``; partial sums are added in rank order."""
        assert isinstance(handle, RemoteHandle)
        return combine(self._groups, expert_rows, handle, self._ops)
