"""From logical experts to physical slots, with a choice where an expert has several copies."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass

import torch

from moeserve_placement import Placement
from moeserve_placement.placement import Slots


@dataclass(frozen=True, kw_only=True, slots=True)
class _LayerTable:
    """Candidates of each expert: physical ids int64 [E, C] (padded), and how many, int64 [E].

    copies: all of them, int64 [E, C], -1 where there are fewer; a candidate is a copy that this
    rank uses by itself.
    """

    candidates: torch.Tensor
    num_candidates: torch.Tensor
    copies: torch.Tensor


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
        self.num_experts = placement.num_experts
        self.slots_per_rank = placement.max_slots
        self.rank_offsets = tuple(r * self.slots_per_rank for r in range(placement.num_ranks))
        self.layers: Mapping[int, tuple[Slots, ...]] = dict(placement.layers)
        """Model layer index -> per rank -> per slot -> expert or None."""
        self._tables = {layer: self._table(layer) for layer in self.layers}

    def changed(self, layer: int, ranks: tuple[Slots, ...]) -> SlotMap:
        """The same map with other experts in one layer's slots; slot counts stay.

        Raises:
            ValueError: a rank has another number of slots than before, or an expert has no copy.
        """
        before = [len(slots) for slots in self.layers[layer]]
        if [len(slots) for slots in ranks] != before:
            raise ValueError(f"layer {layer}: has {before} slots by rank, that can not change")
        result = copy.copy(self)
        result.layers = {**self.layers, layer: ranks}
        result._tables = {**self._tables, layer: result._table(layer)}
        return result

    @property
    def placement(self) -> Placement:
        """What is where, as the placement library has it."""
        return Placement(num_experts=self.num_experts, layers=self.layers)

    def copies(self, layer: int) -> list[list[tuple[int, int]]]:
        """By expert: the (rank, slot) of each of its copies, in rank order."""
        found: list[list[tuple[int, int]]] = [[] for _ in range(self.num_experts)]
        for rank, slots in enumerate(self.layers[layer]):
            for slot, expert in enumerate(slots):
                if expert is not None:
                    found[expert].append((rank, slot))
        return found

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

    def has_copies(self, layer: int) -> bool:
        """Whether an expert of the layer has more than one copy."""
        return self._tables[layer].copies.shape[1] > 1

    def all_copies(self, layer: int) -> torch.Tensor:
        """Physical ids of every copy of every expert, int64 [E, C], -1 where there are fewer."""
        return self._tables[layer].copies

    def owner(self, physical_ids: torch.Tensor) -> torch.Tensor:
        """The rank of each physical id, same shape."""
        return physical_ids // self.slots_per_rank

    def _table(self, layer: int) -> _LayerTable:
        candidates, copies = [], []
        for expert, places in enumerate(self.copies(layer)):
            if not places:
                raise ValueError(f"layer {layer}: no rank holds expert {expert}")
            at_home = [place for place in places if place[0] == self.rank]
            candidates.append([self.rank_offsets[r] + slot for r, slot in at_home or places])
            copies.append([self.rank_offsets[r] + slot for r, slot in places])
        most, most_copies = max(map(len, candidates)), max(map(len, copies))
        padded = [ids + ids[:1] * (most - len(ids)) for ids in candidates]
        return _LayerTable(
            candidates=torch.tensor(padded, dtype=torch.int64),
            num_candidates=torch.tensor([len(ids) for ids in candidates], dtype=torch.int64),
            copies=torch.tensor(
                [ids + [-1] * (most_copies - len(ids)) for ids in copies], dtype=torch.int64
            ),
        )
