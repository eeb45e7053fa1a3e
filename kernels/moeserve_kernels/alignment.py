"""How (token, expert) pairs are ordered for the grouped products: what ``align`` returns."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Alignment:
    """Pairs sorted by slot, each slot's run padded to whole blocks of ``block_m`` rows.

    Pair ``p`` is choice ``p % top_k`` of token ``p // top_k``. Blocks of one slot follow each
    other; within a slot pairs stand in the order of ``p``, so results can be reproduced. Sizes are
    upper bounds known on the host, so nothing waits for the device; what lies past
    ``num_padded_rows`` is not computed.

    sorted_pairs: int32 [num_rows], the pair of each row; ``num_pairs`` where a row is padding.
    block_slots: int32 [num_rows / block_m], the slot of each block; -1 past the last.
    counts: int32 [num_slots], pairs of each slot.
    num_padded_rows: int32 [1], rows in use: the sum of the padded runs.
    num_pairs: T * k. top_k: k. block_m: rows of a block.
    is_identity: for few pairs, nothing is sorted: row ``p`` is pair ``p``, its slot
        ``block_slots[p]`` (-1: another rank's), blocks have one row in use, and ``sorted_pairs``,
        ``counts`` and ``num_padded_rows`` are None.
    """

    sorted_pairs: torch.Tensor | None
    block_slots: torch.Tensor
    counts: torch.Tensor | None
    num_padded_rows: torch.Tensor | None
    num_pairs: int
    top_k: int
    block_m: int
    is_identity: bool = False

    @property
    def num_rows(self) -> int:
        """Rows of the sorted hidden states between the two products, padding included."""
        if self.sorted_pairs is None:
            return self.num_pairs
        return self.sorted_pairs.shape[0]


def takes_identity(num_pairs: int, num_slots: int) -> bool:
    """Whether so few pairs are not sorted: most slots have none, so blocks would not fill."""
    return 4 * num_pairs <= num_slots


def max_rows(num_pairs: int, num_slots: int, block_m: int) -> int:
    """Rows that the sorted pairs can need, in whole blocks: each slot in use pads one block."""
    rows = num_pairs + min(num_pairs, num_slots) * (block_m - 1)
    return -(-rows // block_m) * block_m
