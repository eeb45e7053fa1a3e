"""What a step does and what came of it: frozen, so that a step can be run again from its plan."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from moeserve.engine.request import Request
from moeserve.messages import SamplingParams, TokenLogprobs, TokenOutput

# One output and the identity of the HTTP process that waits for it.
Addressed = tuple[bytes, TokenOutput]


@dataclass(frozen=True, slots=True)
class SamplingInfo:
    """What the sampler must know about one request that wants logits in this step.

    Its rows of logits are first one for each of ``prompt_targets``, then, with ``is_sampled``, the
    one that the next token is chosen from. num_output_tokens: place of that token in the output;
    banned_token_ids: what may not be chosen yet (``min_tokens``); prompt_token_ids: distinct, and
    output_counts: how often each token was produced, both empty unless a penalty needs them;
    prompt_targets: the prompt tokens whose logprobs are wanted.
    """

    params: SamplingParams
    seed: int
    num_output_tokens: int
    is_sampled: bool
    banned_token_ids: tuple[int, ...] = ()
    prompt_token_ids: tuple[int, ...] = ()
    output_counts: Mapping[int, int] = field(default_factory=dict)
    prompt_targets: tuple[int, ...] = ()

    @property
    def num_rows(self) -> int:
        """Rows of logits."""
        return len(self.prompt_targets) + self.is_sampled


@dataclass(frozen=True, slots=True)
class Sampled:
    """What the sampler found for one ``SamplingInfo``.

    token_id: None where no token was wanted; prompt_logprobs: one for each of ``prompt_targets``.
    """

    token_id: int | None = None
    logprobs: TokenLogprobs | None = None
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()


@dataclass(frozen=True, slots=True)
class ScheduledRequest:
    """One request's share of a step.

    token_ids: the tokens to compute; start: position of the first in the sequence; block_ids: the
    request's KV blocks, enough for ``seq_len`` tokens; logits_offsets: those of ``token_ids`` (by
    index) whose logits are wanted, in the order of ``sampling``'s rows; sampling: None when no
    logits are wanted.
    """

    request: Request
    start: int
    token_ids: tuple[int, ...]
    block_ids: tuple[int, ...]
    logits_offsets: tuple[int, ...]
    sampling: SamplingInfo | None

    @property
    def num_tokens(self) -> int:
        """Tokens computed in this step."""
        return len(self.token_ids)

    @property
    def seq_len(self) -> int:
        """Tokens of the sequence that are computed after this step."""
        return self.start + len(self.token_ids)


@dataclass(frozen=True, slots=True)
class StepPlan:
    """The requests of one step, in the order of their tokens in the batch."""

    requests: tuple[ScheduledRequest, ...]
    num_tokens: int

    @property
    def sampling(self) -> tuple[SamplingInfo, ...]:
        """What the sampler needs: one entry per request that wants logits, in batch order."""
        return tuple(r.sampling for r in self.requests if r.sampling is not None)


def plan_request(request: Request, num_tokens: int) -> ScheduledRequest:
    """A snapshot of the request, to compute the next ``num_tokens`` of its known tokens."""
    start = request.num_computed_tokens
    end = start + num_tokens
    is_sampled = end == len(request.token_ids) and request.max_tokens > 0
    offsets: tuple[int, ...] = (num_tokens - 1,) if is_sampled else ()
    targets: tuple[int, ...] = ()
    if request.params.prompt_logprobs is not None:
        # Position p scores token p + 1. What was sent before a preemption is not sent again.
        first = max(start + 1, request.num_prompt_logprobs)
        targets = tuple(request.token_ids[first : min(end + 1, request.num_prompt_tokens)])
        offsets = (*range(first - 1 - start, first - 1 - start + len(targets)), *offsets)
    return ScheduledRequest(
        request,
        start,
        tuple(request.token_ids[start:end]),
        tuple(request.block_ids),
        offsets,
        _sampling_info(request, is_sampled, targets) if offsets else None,
    )


def _sampling_info(request: Request, is_sampled: bool, targets: tuple[int, ...]) -> SamplingInfo:
    num_output_tokens = request.num_output_tokens
    is_too_short = num_output_tokens < request.params.min_tokens
    return SamplingInfo(
        request.params,
        request.seed,
        num_output_tokens,
        is_sampled,
        request.stop_token_ids if is_too_short else (),
        request.penalized_prompt,
        dict(request.output_counts),
        targets,
    )
