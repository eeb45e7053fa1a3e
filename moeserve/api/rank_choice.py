"""Which rank gets a request: the one that has its prefix cached, unless it is much busier.

A guess, never a promise: nothing breaks when a rank has evicted what is remembered here.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

_BLOCK_TOKENS = 32
_MAX_BLOCKS = 256  # of a prompt; further ones hardly change the choice
_MAX_REMEMBERED = 1 << 16


class RankChoice:
    """Remembers which rank saw which prompt prefix."""

    def __init__(self, num_ranks: int) -> None:
        self._num_ranks = num_ranks
        self._owners: OrderedDict[int, int] = OrderedDict()  # chained prefix hash -> rank
        self._next = 0

    def choose(self, token_ids: Sequence[int], salt: str, loads: Sequence[float]) -> int:
        """The rank for a prompt.

        Args:
            salt: prompts with different salts share nothing.
            loads: sequences in flight by rank.
        """
        if self._num_ranks == 1:
            return 0
        prefixes = _prefix_hashes(token_ids, salt)
        least = min(loads)
        owner, num_shared = self._find(prefixes)
        # A shared block is worth about one sequence of waiting, half the load at most.
        slack = min(num_shared, 4 + least / 2)
        if owner is None or loads[owner] > least + slack:
            owner = self._least_loaded(loads, least)
        for prefix in prefixes:
            self._owners[prefix] = owner
            self._owners.move_to_end(prefix)
        while len(self._owners) > _MAX_REMEMBERED:
            self._owners.popitem(last=False)
        return owner

    def _find(self, prefixes: Sequence[int]) -> tuple[int | None, int]:
        """The owner of the longest known prefix, and its length in blocks."""
        for num_blocks in range(len(prefixes), 0, -1):
            owner = self._owners.get(prefixes[num_blocks - 1])
            if owner is not None:
                return owner, num_blocks
        return None, 0

    def _least_loaded(self, loads: Sequence[float], least: float) -> int:
        """The next rank in turn among those with the least load."""
        order = [(self._next + i) % self._num_ranks for i in range(self._num_ranks)]
        rank = next(rank for rank in order if loads[rank] == least)
        self._next = rank + 1
        return rank


def _prefix_hashes(token_ids: Sequence[int], salt: str) -> list[int]:
    hashes, value = [], hash(salt)
    for start in range(0, min(len(token_ids), _MAX_BLOCKS * _BLOCK_TOKENS), _BLOCK_TOKENS):
        block = token_ids[start : start + _BLOCK_TOKENS]
        if len(block) < _BLOCK_TOKENS:
            break
        value = hash((value, *block))
        hashes.append(value)
    return hashes
