"""Which copy of its expert a token goes to, when the batch itself decides: the min-max split.

All ranks add up what their tokens chose, one small all-gather a layer, and each solves the same
split (``moeserve_placement.ShareSolver``); then every rank sends of each expert as many tokens to
each copy as the split says, to its own copy first. It pays from a batch size on that the placement
manager works out and announces, so all ranks take the same way in the same step.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch

from moeserve.experts.mapping import SlotMap
from moeserve.experts.store import ExpertStore
from moeserve_placement import ShareSolver
from moeserve_placement.placement import Slots

# (rows, how many each rank brings) -> all ranks' rows: ``ParallelGroups.all_gather``.
Gather = Callable[[torch.Tensor, Sequence[int]], torch.Tensor]


class CopyChooser:
    """The choice of a copy for the pairs of this rank.

    Args:
        store: where experts are.
        gather: joins rows of all ranks.
        world_size: number of ranks.
    """

    def __init__(self, store: ExpertStore, gather: Gather, world_size: int) -> None:
        self.split_from: int | None = None
        """Tokens of a step, over all ranks, from which the batch is split; None: never."""
        self.num_splits = 0
        self._store = store
        self._gather = gather
        self._world_size = world_size
        self._solvers: dict[int, tuple[tuple[Slots, ...], ShareSolver]] = {}

    def select(self, layer: int, topk_ids: torch.Tensor, num_tokens: int) -> torch.Tensor:
        """Physical ids, int64 [T, k], of the copies that the pairs in ``topk_ids`` [T, k] go to.

        num_tokens: of the step over all ranks. All ranks call this together.
        """
        slot_map = self._store.slot_map
        splits = self.split_from is not None and num_tokens >= self.split_from
        if not splits or not slot_map.has_copies(layer):
            return slot_map.select(layer, topk_ids)
        self.num_splits += 1
        own = torch.bincount(topk_ids.flatten(), minlength=slot_map.num_experts)
        rows = self._gather(own.to(torch.int32).unsqueeze(0), [1] * self._world_size)
        quotas = self._quotas(layer, slot_map, rows.numpy().astype(np.int64))
        return _dealt(topk_ids, slot_map.all_copies(layer), torch.from_numpy(quotas))

    def _quotas(self, layer: int, slot_map: SlotMap, counts: np.ndarray) -> np.ndarray:
        """Tokens of this rank for each copy: int64 [E, C] as ``SlotMap.all_copies``.

        counts: of all ranks, [num_ranks, E].
        """
        copies = slot_map.all_copies(layer).numpy()
        shares = self._solver(layer, slot_map).solve(counts.sum(0)[None]).shares[0]
        rank, slot = np.divmod(np.maximum(copies, 0), slot_map.slots_per_rank)
        by_copy = np.where(copies >= 0, shares[rank, slot], 0.0)
        whole = whole_numbers(by_copy, counts.sum(0))
        mine: np.ndarray = deal(whole, counts, np.where(copies >= 0, rank, -1))[slot_map.rank]
        return mine

    def _solver(self, layer: int, slot_map: SlotMap) -> ShareSolver:
        """The layer's solver; made anew when its slots have changed."""
        ranks = slot_map.layers[layer]
        known = self._solvers.get(layer)
        if known is None or known[0] is not ranks:
            width = slot_map.slots_per_rank
            table = np.array(
                [[*(-1 if e is None else e for e in s), *[-1] * (width - len(s))] for s in ranks],
                dtype=np.int64,
            )
            known = ranks, ShareSolver(table[None], slot_map.num_experts)
            self._solvers[layer] = known
        return known[1]


def whole_numbers(shares: np.ndarray, totals: np.ndarray) -> np.ndarray:
    """Shares [E, C] of ``totals`` [E] as whole numbers, int64 [E, C], that add up to the totals.

    Largest remainders: no entry is off by one or more.
    """
    exact = shares * totals[:, None]
    whole = np.floor(exact).astype(np.int64)
    missing = totals - whole.sum(1)
    order = np.argsort(-(exact - whole), axis=1, kind="stable")
    place = np.argsort(order, axis=1, kind="stable")
    result: np.ndarray = whole + (place < missing[:, None])
    return result


def deal(quotas: np.ndarray, counts: np.ndarray, ranks: np.ndarray) -> np.ndarray:
    """How many tokens of each rank go to each copy: int64 [num_ranks, E, C].

    Args:
        quotas: tokens that each copy gets, [E, C]; a row adds up to the expert's tokens.
        counts: tokens by rank and expert, [num_ranks, E].
        ranks: the rank of each copy, [E, C], -1 where there is none.

    A rank's own copy takes its tokens first; the rest is dealt in the order of ranks and copies.
    """
    num_ranks = counts.shape[0]
    at_home = ranks[None] == np.arange(num_ranks)[:, None, None]
    home = np.minimum(np.where(at_home, quotas[None], 0), counts[:, :, None])
    wanted = counts - home.sum(2)  # [num_ranks, E]
    room = quotas - home.sum(0)  # [E, C]
    ends = np.cumsum(wanted, axis=0)  # tokens lie on a line by rank, room by copy: they overlap
    starts = ends - wanted
    room_ends = np.cumsum(room, axis=1)
    room_starts = room_ends - room
    low = np.maximum(starts[:, :, None], room_starts[None])
    high = np.minimum(ends[:, :, None], room_ends[None])
    result: np.ndarray = home + np.maximum(high - low, 0)
    return result


def _dealt(topk_ids: torch.Tensor, copies: torch.Tensor, quotas: torch.Tensor) -> torch.Tensor:
    """Physical ids by pair: the first pairs of an expert go to its first copy, and so on."""
    flat = topk_ids.flatten()
    order = torch.argsort(flat, stable=True)
    by_expert = torch.repeat_interleave(copies.flatten(), quotas.flatten())
    return torch.empty_like(flat).scatter_(0, order, by_expert).view_as(topk_ids)
