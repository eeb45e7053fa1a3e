"""How tokens reach the ranks that hold their experts, and how the results come home.

``dispatch`` returns the rows this rank has to compute and a handle; ``combine`` takes the computed
rows and that handle. The pair can not be mismatched: the handle carries the bookkeeping. One file
per transport: ``local`` (one rank), ``all_to_all``, ``all_gather``.

Shapes: T tokens of this rank, R rows received, H hidden size, k experts per token.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch


@dataclass(frozen=True, kw_only=True, slots=True)
class StepSizes:
    """What every rank brings to a step; equal on all ranks, so all draw the same conclusions."""

    num_tokens: tuple[int, ...]  # by rank
    has_work: bool  # some rank has an unfinished request
    stop: bool  # some rank asks all to leave after this agreement
    moves_ready: int = 0  # groups of the order in progress that every rank has
    move_failed: bool = False  # some rank can not go on with the order in progress
    news_bytes: int = 0  # size of what rank 0 has to say to all

    @property
    def total(self) -> int:
        """Tokens of the step over all ranks."""
        return sum(self.num_tokens)


@dataclass(frozen=True, kw_only=True, slots=True)
class Dispatched:
    """Rows for this rank's experts.

    hidden_states: [R, H]; slots: int64 [R, k], this rank's local slots, -1 where the pair belongs
    elsewhere; topk_weights: float32 [R, k]; handle: the transport's bookkeeping for ``combine``.
    """

    hidden_states: torch.Tensor
    slots: torch.Tensor
    topk_weights: torch.Tensor
    handle: object


class TokenDispatcher(Protocol):
    """One transport. All ranks must call ``dispatch`` and ``combine`` the same number of times."""

    name: str

    def dispatch(
        self,
        hidden_states: torch.Tensor,
        physical_ids: torch.Tensor,
        topk_weights: torch.Tensor,
        sizes: StepSizes,
    ) -> Dispatched:
        """Sends each token once to each rank that holds one of its experts.

        Args:
            hidden_states: [T, H].
            physical_ids: int64 [T, k], global physical slot of each pair (see ``SlotMap``).
            topk_weights: float32 [T, k].
            sizes: the step's agreement; ``sizes.num_tokens[own rank] == T``.
        """
        ...

    def combine(self, expert_rows: torch.Tensor, handle: object) -> torch.Tensor:
        """Brings results home and adds them up in an order that timing can not change.

        Args:
            expert_rows: ``[R, H]``, each row the weighted sum over its local pairs; or, in
                batch-invariant mode, ``[R, k, H]``, unweighted, one entry per local pair (what
                belongs elsewhere is ignored), so that the sum over k is taken at home in the order
                of ``topk_ids`` and its bits do not depend on the layout.
            handle: of the ``dispatch`` that these rows came from.

        Returns:
            [T, H] in the dtype of the hidden states; the sum runs in float32.
        """
        ...
