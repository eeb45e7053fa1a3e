"""What a forward pass gets: complete and frozen before anyone sees it."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from moeserve.parallel.dispatcher import StepSizes


@dataclass(frozen=True, kw_only=True, slots=True)
class Batch:
    """B requests with T tokens in all, request by request; an idle rank has T = B = 0.

    input_ids: int64 [T]; positions: int64 [T], place of each token in its sequence;
    is_decode: bool [T], whether the token was generated, not prompted;
    slot_mapping: int64 [T], where its K and V go (block * block_size + offset);
    block_table: int64 [B, max_blocks], padded with 0; query_lens, seq_lens: B ints, tokens of the
    request in this step and known to the cache after it; logits_indices: int64 [L], rows whose
    logits are wanted; sizes: the step's agreement.
    """

    input_ids: torch.Tensor
    positions: torch.Tensor
    is_decode: torch.Tensor
    slot_mapping: torch.Tensor
    block_table: torch.Tensor
    query_lens: tuple[int, ...]
    seq_lens: tuple[int, ...]
    logits_indices: torch.Tensor
    sizes: StepSizes
