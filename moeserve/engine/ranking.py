"""A total order of the tokens of a row: higher logit first, lower id among equals.

``topk`` and ``sort`` promise nothing about equals, and logits that come from 16-bit weights have
many. Here logit and id are packed into one integer, so there are no equals: every algorithm, on
every device, gives the same order.
"""

from __future__ import annotations

import torch

_LOW_32_BITS = 0xFFFFFFFF


def rank_keys(logits: torch.Tensor) -> torch.Tensor:
    """int64 [L, V]: the higher a token stands, the larger its key; all differ within a row.

    logits: float32 [L, V]; NaN counts as the lowest.
    """
    values = (logits + 0.0).nan_to_num_(nan=-torch.inf, posinf=torch.inf, neginf=-torch.inf)
    bits = values.view(torch.int32)  # adding 0.0 gave zero one sign
    # Positive floats are ordered as their bits are, negative ones the other way round.
    keys = (bits ^ (bits >> 31 & 0x7FFFFFFF)).long()
    keys <<= 32
    keys += _LOW_32_BITS - torch.arange(logits.shape[-1], device=logits.device)
    return keys


def best_token_ids(keys: torch.Tensor, count: int) -> torch.Tensor:
    """int64 [L, count]: the ids of the ``count`` highest tokens of each row, best first.

    keys: of ``rank_keys``; count: at most V.
    """
    return _LOW_32_BITS - (keys.topk(count, dim=-1).values & _LOW_32_BITS)
