"""Rows for the exchange between ranks, as loops over ranks and tokens."""

from __future__ import annotations

import torch

from moeserve_kernels.formulas.quant import quant_rows
from moeserve_kernels.packed import Packed


def ep_pack(
    hidden_states: torch.Tensor,
    pair_ranks: torch.Tensor,
    num_ranks: int,
    *,
    quantize: torch.dtype | None = None,
) -> Packed:
    """See ``operations.exchange.ep_pack``; rows past those in use are zero."""
    num_tokens, top_k = pair_ranks.shape
    row_of = torch.full((num_tokens, num_ranks), -1, dtype=torch.int32)
    tokens: list[int] = []
    counts = []
    for rank in range(num_ranks):
        needs = [token for token in range(num_tokens) if rank in pair_ranks[token].tolist()]
        for token in needs:
            row_of[token, rank] = len(tokens)
            tokens.append(token)
        counts.append(len(needs))
    most = num_tokens * min(top_k, num_ranks)
    rows = hidden_states.new_zeros(most, hidden_states.shape[1])
    rows[: len(tokens)] = hidden_states[tokens]
    scales = None
    if quantize is not None:
        rows, scales = quant_rows(rows, dtype=quantize)
    row_tokens = torch.tensor(tokens + [-1] * (most - len(tokens)), dtype=torch.int32)
    device = hidden_states.device
    count = torch.tensor(counts, dtype=torch.int32)
    return Packed(rows, scales, row_tokens.to(device), row_of.to(device), count.to(device))


def ep_unpack(rows: torch.Tensor, packed: Packed) -> torch.Tensor:
    """See ``operations.exchange.ep_unpack``; summed in the dtype of ``rows``, at least float32."""
    wide = torch.promote_types(rows.dtype, torch.float32)
    result = torch.zeros(packed.row_of.shape[0], rows.shape[1], dtype=wide, device=rows.device)
    for token, of_ranks in enumerate(packed.row_of.tolist()):
        for row in of_ranks:
            if row >= 0:
                result[token] += rows[row]
    return result.to(rows.dtype)
