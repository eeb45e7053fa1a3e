"""Log-probabilities as the API shows them: raw, finite, with ranks."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from moeserve.engine.ranking import best_token_ids, rank_keys
from moeserve.messages import TokenLogprobs

# JSON has no infinity. The value is vLLM's.
LOWEST_LOGPROB = -9999.0


def token_logprobs(
    logits: torch.Tensor, token_ids: Sequence[int], num_top: Sequence[int]
) -> list[TokenLogprobs]:
    """One result per row: logprob and rank of its token, and its best alternatives.

    Args:
        logits: float32 [L, V] as the model gave them.
        token_ids: L tokens.
        num_top: L numbers of alternatives; more than V gives V.
    """
    logprobs = logits.log_softmax(dim=-1).nan_to_num(nan=LOWEST_LOGPROB)
    logprobs.clamp_(LOWEST_LOGPROB, 0.0)
    keys = rank_keys(logits)
    tokens = torch.tensor(token_ids, device=logits.device)[:, None]
    of_tokens = logprobs.gather(1, tokens)[:, 0].tolist()
    ranks = (keys > keys.gather(1, tokens)).sum(dim=-1).tolist()
    top = best_token_ids(keys, min(max(num_top), logits.shape[1]))
    top_ids, top_logprobs = top.tolist(), logprobs.gather(1, top).tolist()
    return [
        TokenLogprobs(
            token_id, of_tokens[i], ranks[i] + 1, top_ids[i][:count], top_logprobs[i][:count]
        )
        for i, (token_id, count) in enumerate(zip(token_ids, num_top, strict=True))
    ]
