"""Rows for the exchange between ranks, on the CPU."""

from __future__ import annotations

import torch

from moeserve_kernels.host.quant import quant_rows
from moeserve_kernels.packed import Packed


def ep_pack(
    hidden_states: torch.Tensor,
    pair_ranks: torch.Tensor,
    num_ranks: int,
    *,
    quantize: torch.dtype | None = None,
) -> Packed:
    """See ``operations.exchange.ep_pack``."""
    num_tokens, top_k = pair_ranks.shape
    known = (pair_ranks >= 0) & (pair_ranks < num_ranks)
    needs = torch.zeros(num_tokens, num_ranks + 1, dtype=torch.bool)  # last column: nowhere
    needs.scatter_(1, torch.where(known, pair_ranks, num_ranks).long(), True)
    needs = needs[:, :num_ranks]
    ranks, tokens = needs.T.nonzero(as_tuple=True)  # rank-major, in a rank token order
    in_use, most = tokens.shape[0], num_tokens * min(top_k, num_ranks)
    row_of = torch.full((num_tokens, num_ranks), -1, dtype=torch.int32)
    row_of[tokens, ranks] = torch.arange(in_use, dtype=torch.int32)
    row_tokens = torch.full((most,), -1, dtype=torch.int32)
    row_tokens[:in_use] = tokens.to(torch.int32)
    packed = hidden_states[tokens]
    scales = None
    if quantize is not None:
        packed, row_scales = quant_rows(packed, dtype=quantize)
        scales = torch.empty(most, dtype=torch.float32)
        scales[:in_use] = row_scales
    rows = torch.empty(most, hidden_states.shape[1], dtype=packed.dtype)
    rows[:in_use] = packed
    return Packed(rows, scales, row_tokens, row_of, needs.sum(0, dtype=torch.int32))


def ep_unpack(rows: torch.Tensor, packed: Packed) -> torch.Tensor:
    """See ``operations.exchange.ep_unpack``."""
    total = torch.zeros(packed.row_of.shape[0], rows.shape[1], dtype=torch.float32)
    for of_tokens in packed.row_of.unbind(1):  # one rank after the other: a fixed order of sums
        sent = (of_tokens >= 0).nonzero().squeeze(1)
        total[sent] += rows[of_tokens[sent]].float()
    return total.to(rows.dtype)
