"""From logical experts to physical slots, with a choice where an expert has several copies."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from moeserve_placement import Placement


@dataclass(frozen=True, kw_only=True, slots=True)
class _LayerTable:
    """Candidates of each expert: physical ids int64 [E, C] (padded), and how many, int64 [E]."""

    candidates: torch.Tensor
    num_candidates: torch.Tensor


class SlotMap:
    """One placement as seen from one rank; it never changes, a new placement is a new map.

    A global physical id is ``rank_offsets[rank] + slot``. Offsets are multiples of
    ``slots_per_rank``, the most slots that any rank has in any layer, so they are the same in all
    layers; ids of slots that a rank does not have are never used.
    """

    def __init__(self, placement: Placement, rank: int) -> None:
        if not 0 <= rank < placement.num_ranks:
            raise ValueError(f"rank = {rank}: the placement is for {placement.num_ranks} ranks")
        self.rank = rank
        self.slots_per_rank = placement.max_slots
        self.rank_offsets = tuple(r * self.slots_per_rank for r in range(placement.num_ranks))
        self._tables = {layer: self._table(placement, layer) for layer in placement.layers}

    def select(self, layer: int, topk_ids: torch.Tensor) -> torch.Tensor:
        """Physical ids, int64 [T, k], of the copies that the pairs in ``topk_ids`` [T, k] go to.

        A copy on the own rank is always taken; otherwise the copies take turns over the tokens, and
        experts start with different copies, so that a short batch spreads as well. The same input
        gives the same answer.
        """
        table = self._tables[layer]
        if table.candidates.shape[1] == 1:
            return table.candidates[topk_ids, 0]
        tokens = torch.arange(topk_ids.shape[0]).unsqueeze(1)
        choice = (tokens + topk_ids) % table.num_candidates[topk_ids]
        return table.candidates[topk_ids, choice]

    def owner(self, physical_ids: torch.Tensor) -> torch.Tensor:
        """The rank of each physical id, same shape."""
        return physical_ids // self.slots_per_rank

    def _table(self, placement: Placement, layer: int) -> _LayerTable:
        candidates = []
        for places in placement.copies(layer):
            at_home = [place for place in places if place[0] == self.rank]
            candidates.append([self.rank_offsets[r] + slot for r, slot in at_home or places])
        most = max(map(len, candidates))
        padded = [ids + ids[:1] * (most - len(ids)) for ids in candidates]
        return _LayerTable(
            candidates=torch.tensor(padded, dtype=torch.int64),
            num_candidates=torch.tensor([len(ids) for ids in candidates], dtype=torch.int64),
        )
