"""What changes logits before a token is chosen: bias, penalties, allowed and banned tokens."""

from __future__ import annotations

import torch

from moeserve.engine.plan import SamplingInfo


def needs_edits(info: SamplingInfo) -> bool:
    """Whether ``edit_row`` would do anything."""
    params = info.params
    return bool(
        params.logit_bias
        or params.allowed_token_ids is not None
        or info.banned_token_ids
        or info.prompt_token_ids
        or info.output_counts
    )


def edit_row(logits: torch.Tensor, info: SamplingInfo) -> None:
    """Changes one row, float32 [V] and finite, in place; afterwards -inf means banned.

    The order is vLLM's: bias, repetition penalty, frequency and presence penalty. Masks come last;
    nothing can undo them. The result has at least one token that is not banned: if everything
    allowed is still banned by ``min_tokens``, that ban is void.
    """
    limit = torch.finfo(torch.float32).max
    if info.params.logit_bias:
        bias = info.params.logit_bias
        logits[list(bias)] += _like(logits, list(bias.values()))
    _apply_penalties(logits, info)
    logits.clamp_(-limit, limit)
    allowed = info.params.allowed_token_ids
    if allowed is not None:
        kept = logits[allowed]
        logits.fill_(-torch.inf)
        logits[allowed] = kept
    banned = set(info.banned_token_ids)
    left = set(allowed).difference(banned) if allowed is not None else logits.numel() > len(banned)
    if banned and left:
        logits[list(info.banned_token_ids)] = -torch.inf


def _apply_penalties(logits: torch.Tensor, info: SamplingInfo) -> None:
    """Repetition counts prompt and output, presence and frequency the output only."""
    params = info.params
    output = list(info.output_counts)
    if params.repetition_penalty != 1.0:
        seen = list({*info.prompt_token_ids, *output})
        values = logits[seen]
        logits[seen] = torch.where(
            values > 0, values / params.repetition_penalty, values * params.repetition_penalty
        )
    if output and (params.frequency_penalty or params.presence_penalty):
        counts = _like(logits, list(info.output_counts.values()))
        logits[output] -= params.frequency_penalty * counts + params.presence_penalty


def _like(logits: torch.Tensor, values: list[float] | list[int]) -> torch.Tensor:
    return torch.tensor(values, dtype=logits.dtype, device=logits.device)
