"""What may enter the scheduler, and the ``Request`` it becomes: limits, clamping, seeds."""

from __future__ import annotations

from dataclasses import dataclass
from hashlib import blake2b

from moeserve.engine.request import Request
from moeserve.messages import NewRequest, ParamError, validate_vocab


@dataclass(frozen=True, slots=True, kw_only=True)
class Intake:
    """The limits of one rank.

    max_model_len: longest prompt plus output; num_blocks, block_size: of the KV cache; vocab_size:
    width of the logits; eos_token_ids: what ends a request that does not ask to ignore it; seed:
    makes the seeds of requests that bring none; has_priorities: whether a request's priority
    counts.
    """

    max_model_len: int
    num_blocks: int
    block_size: int
    vocab_size: int
    eos_token_ids: tuple[int, ...]
    seed: int
    has_priorities: bool

    def refusal(self, message: NewRequest) -> str | None:
        """Why the request can never run here, with numbers; None: it can."""
        num_prompt_tokens = len(message.prompt_token_ids)
        if not num_prompt_tokens:
            return "prompt: must have at least one token"
        for token_id in (min(message.prompt_token_ids), max(message.prompt_token_ids)):
            if not 0 <= token_id < self.vocab_size:
                return f"prompt token id {token_id}: must be in [0, {self.vocab_size})"
        least = num_prompt_tokens + (message.sampling.max_tokens != 0)
        needs = f"prompt of {num_prompt_tokens} tokens: with its output it needs at least {least}"
        if least > self.max_model_len:
            return f"{needs}, max_model_len is {self.max_model_len}"
        if least > self.num_blocks * self.block_size:
            return (
                f"{needs}, the KV cache holds {self.num_blocks * self.block_size} "
                f"({self.num_blocks} blocks of {self.block_size})"
            )
        try:
            validate_vocab(message.sampling, self.vocab_size)
        except ParamError as error:
            return str(error)
        return None

    def accept(self, message: NewRequest, source: bytes, arrival: int) -> Request:
        """The request in its first state, its output bounded by context and KV cache.

        arrival: a growing number. The message's clock is not used: those of two hosts differ.
        """
        params = message.sampling
        num_prompt_tokens = len(message.prompt_token_ids)
        room = min(self.max_model_len, self.num_blocks * self.block_size) - num_prompt_tokens
        # An id beyond the logits can not be chosen, so it need not be looked for.
        eos = {token_id for token_id in self.eos_token_ids if token_id < self.vocab_size}
        return Request(
            request_id=message.request_id,
            source=source,
            params=params,
            order=(message.priority if self.has_priorities else 0, arrival),
            token_ids=list(message.prompt_token_ids),
            num_prompt_tokens=num_prompt_tokens,
            max_tokens=room if params.max_tokens is None else min(params.max_tokens, room),
            stop_token_ids=tuple(
                sorted({*params.stop_token_ids, *(() if params.ignore_eos else eos)})
            ),
            seed=self._seed_for(message.request_id) if params.seed is None else params.seed,
            cache_salt=message.cache_salt,
        )

    def _seed_for(self, request_id: str) -> int:
        text = f"{self.seed} {request_id}".encode("utf-8", "surrogatepass")
        return int.from_bytes(blake2b(text, digest_size=8).digest(), "little")
