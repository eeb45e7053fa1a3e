"""Rows for the exchange between ranks: each token goes once to every rank that needs it."""

from __future__ import annotations

import torch

from moeserve_kernels import backend, check
from moeserve_kernels.packed import Packed

__all__ = ["Packed", "ep_pack", "ep_unpack"]

MAX_RANKS = 1024
_FLOATS = (torch.float32, torch.float16, torch.bfloat16, torch.float64)


def ep_pack(
    hidden_states: torch.Tensor,
    pair_ranks: torch.Tensor,
    num_ranks: int,
    *,
    quantize: torch.dtype | None = None,
) -> Packed:
    """Return the rows to send, ordered by rank.

    hidden_states: [T, H], float32, float16 or bfloat16; rows with any stride.
    pair_ranks: int32 [T, k], the rank of each choice of a token; -1: nowhere.
    quantize: float8_e4m3fn or int8: each row with a scale, as ``quant_rows`` does it.

    Nothing waits for the device, and equal inputs give equal bits.

    Raises ValueError for a wrong shape or dtype. A rank out of range is reported within
    ``check.debug()`` only; otherwise it is nowhere.
    """
    check.shape("hidden_states", hidden_states, ("T", "H"))
    check.dtype("hidden_states", hidden_states, *_FLOATS)
    check.rows_contiguous("hidden_states", hidden_states)
    check.dtype("pair_ranks", pair_ranks, torch.int32)
    check.shape("pair_ranks", pair_ranks, (hidden_states.shape[0], "k"))
    check.same_device(hidden_states=hidden_states, pair_ranks=pair_ranks)
    check.at_least("num_ranks", num_ranks, 1)
    if num_ranks > MAX_RANKS:
        raise ValueError(f"num_ranks = {num_ranks}: must be at most {MAX_RANKS}")
    check.one_of("quantize", quantize, (None, torch.float8_e4m3fn, torch.int8))
    check.values("pair_ranks", pair_ranks, -(2**31), num_ranks)
    family = backend.implementation("exchange", hidden_states)
    packed: Packed = family.ep_pack(hidden_states, pair_ranks, num_ranks, quantize=quantize)
    return packed


def ep_unpack(rows: torch.Tensor, packed: Packed) -> torch.Tensor:
    """Return, for each token, the sum of the rows that came back for it: [T, H], dtype of rows.

    rows: [R_max, H], float32, float16 or bfloat16, in the order of ``packed.rows``; those past the
        rows in use are not read.
    Summed in float32, rank 0 first. A token that was sent nowhere gets zeros.

    Raises ValueError for a wrong shape or dtype.
    """
    check.dtype("rows", rows, *_FLOATS)
    check.shape("rows", rows, (packed.row_tokens.shape[0], "H"))
    check.rows_contiguous("rows", rows)
    check.same_device(rows=rows, row_of=packed.row_of)
    family = backend.implementation("exchange", rows)
    result: torch.Tensor = family.ep_unpack(rows, packed)
    return result
