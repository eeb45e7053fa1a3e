"""What ``ep_pack`` returns: rows to send between ranks, and where each came from."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Packed:
    """Rows to send, those to rank 0 first, then to rank 1 ...; for one rank in token order.

    ``R_max = T * min(k, num_ranks)`` is what they can be at most; the first ``counts.sum()`` rows
    are in use, the others (and their scales) hold anything.

    rows: [R_max, H]. scales: float32 [R_max], ``rows * scales`` is what was packed; None when not
        quantised.
    row_tokens: int32 [R_max], the token of each row, -1 past the last.
    row_of: int32 [T, num_ranks], the row in which a token goes to a rank, -1: it does not.
    counts: int32 [num_ranks], rows for each rank.
    """

    rows: torch.Tensor
    scales: torch.Tensor | None
    row_tokens: torch.Tensor
    row_of: torch.Tensor
    counts: torch.Tensor
