"""Which rows a rank sends where, and how a row looks on the wire.

A global physical id is ``rank * slots_per_rank + slot``, with one ``slots_per_rank`` for all ranks
and layers (the most that any rank has in any layer): the owner of a pair is found without a table,
whatever the placement.

Shapes: T tokens of this rank, k experts per token, H hidden size, n ranks, R rows.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True, kw_only=True, slots=True)
class Route:
    """The rows that T tokens become: one per token and rank that holds one of its experts.

    Rows are in order of rank, then token. token_of_row: int64 [R]; is_pair: bool [R, k], the pairs
    that the row's rank computes; num_rows, num_pairs: rows and pairs by rank. Each of the T * k
    pairs belongs to exactly one row.
    """

    token_of_row: torch.Tensor
    is_pair: torch.Tensor
    num_rows: tuple[int, ...]
    num_pairs: tuple[int, ...]


def route(physical_ids: torch.Tensor, slots_per_rank: int, world_size: int) -> Route:
    """The route of tokens whose pairs sit at ``physical_ids`` (int64 [T, k])."""
    owner = physical_ids // slots_per_rank  # [T, k]
    num_tokens = physical_ids.shape[0]
    needed = torch.zeros(num_tokens, world_size, dtype=torch.bool).scatter_(1, owner, True)
    rank_of_row, token_of_row = needed.t().nonzero(as_tuple=True)
    return Route(
        token_of_row=token_of_row,
        is_pair=owner[token_of_row] == rank_of_row.unsqueeze(1),
        num_rows=tuple(needed.sum(0).tolist()),
        num_pairs=tuple(torch.bincount(owner.flatten(), minlength=world_size).tolist()),
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class RowFormat:
    """One token on the wire: k int32 slots or ids, k float32 weights, H hidden values.

    The numbers come first and a row is a multiple of 4 bytes, so that every part is aligned and can
    be read as its own type in place, for any H and dtype.
    """

    hidden_size: int
    top_k: int
    dtype: torch.dtype

    @property
    def row_bytes(self) -> int:
        """Bytes of a row."""
        return -(-(8 * self.top_k + self._hidden_bytes) // 4) * 4

    @property
    def _hidden_bytes(self) -> int:
        return self.hidden_size * self.dtype.itemsize

    def pack(
        self, hidden_states: torch.Tensor, ids: torch.Tensor, topk_weights: torch.Tensor
    ) -> torch.Tensor:
        """uint8 [R, row_bytes] of hidden_states [R, H], ids int64 [R, k] and weights [R, k]."""
        buffer = torch.zeros(hidden_states.shape[0], self.row_bytes, dtype=torch.uint8)
        hidden_part, ids_part, weights_part = self._parts(buffer)
        hidden_part.copy_(hidden_states)
        ids_part.copy_(ids)
        weights_part.copy_(topk_weights)
        return buffer

    def unpack(self, buffer: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """The inverse of ``pack``: hidden_states [R, H], ids int64 [R, k], weights [R, k].

        The results are copies: a matrix product may change bits with the alignment of its input,
        so rows that travelled must lie in memory as rows that did not.
        """
        hidden_part, ids_part, weights_part = self._parts(buffer)
        hidden_states = hidden_part.clone(memory_format=torch.contiguous_format)
        return hidden_states, ids_part.to(torch.int64), weights_part.clone()

    def ids(self, buffer: torch.Tensor) -> torch.Tensor:
        """The ids alone, int32 [R, k], in place."""
        return self._parts(buffer)[1]

    def _parts(self, buffer: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        ids_end, weights_end = 4 * self.top_k, 8 * self.top_k
        return (
            buffer[:, weights_end : weights_end + self._hidden_bytes].view(self.dtype),
            buffer[:, :ids_end].view(torch.int32),
            buffer[:, ids_end:weights_end].view(torch.float32),
        )
