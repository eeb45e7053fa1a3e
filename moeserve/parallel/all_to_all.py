"""The default transport: a token goes once to each rank that holds one of its experts.

Three collectives a layer: counts, rows, results.
"""

from __future__ import annotations

import torch

from moeserve.parallel.combine import RemoteHandle, combine
from moeserve.parallel.dispatcher import Dispatched, StepSizes
from moeserve.parallel.groups import ParallelGroups
from moeserve.parallel.routing import RowFormat, route
from moeserve_kernels.ops import Ops


class AllToAllDispatcher:
    """Uneven all-to-all, both ways. It works for one rank too, at the price of copies."""

    name = "all_to_all"

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
        world_size = self._groups.world_size
        plan = route(physical_ids, self._slots_per_rank, world_size)
        tokens = plan.token_of_row
        slots = physical_ids[tokens] % self._slots_per_rank
        row_format = RowFormat(
            hidden_size=hidden_states.shape[1],
            top_k=physical_ids.shape[1],
            dtype=hidden_states.dtype,
        )
        packed = row_format.pack(
            hidden_states[tokens], slots.where(plan.is_pair, -1), topk_weights[tokens]
        )
        one_each = [1] * world_size
        counts = torch.tensor(plan.num_rows, dtype=torch.int64)
        num_rows = tuple(self._groups.all_to_all(counts, one_each, one_each).tolist())
        received = self._groups.all_to_all(packed, plan.num_rows, num_rows)
        rows, row_slots, row_weights = row_format.unpack(received)
        handle = RemoteHandle(
            route=plan,
            topk_weights=topk_weights,
            slots=row_slots,
            num_rows=num_rows,
        )
        return Dispatched(
            hidden_states=rows, slots=row_slots, topk_weights=row_weights, handle=handle
        )

    def combine(self, expert_rows: torch.Tensor, handle: object) -> torch.Tensor:
        """See ``TokenDispatcher``; partial sums are added in rank order."""
        assert isinstance(handle, RemoteHandle)
        return combine(self._groups, expert_rows, handle, self._ops)
