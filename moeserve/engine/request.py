"""One sequence on its way through the engine: tokens known, tokens computed, blocks held."""

from __future__ import annotations

import enum
import time
from collections import Counter
from dataclasses import dataclass, field

from moeserve.messages import FinishReason, SamplingParams


class RequestStatus(enum.Enum):
    """Where a request stands. A preempted one is waiting again; an aborted one is finished."""

    WAITING = "waiting"  # holds no blocks
    RUNNING = "running"
    FINISHED = "finished"


@dataclass(eq=False, slots=True, kw_only=True)
class Request:
    """The long-lived, mutable state of one sequence.

    token_ids: the prompt, then the output so far; num_computed_tokens: how many of them, from the
    front, have their keys and values in ``block_ids``; each step lets the second catch up with the
    first. order: who goes first (lowest), and who is preempted first (highest); max_tokens: bound
    of the output after clamping; stop_token_ids: ids that end the request, end-of-sequence
    included; seed: of its random numbers; created_s: on the monotonic clock; queued_s: from then
    to the first admission. block_keys and prefix_ids belong to the prefix cache.
    """

    request_id: str
    source: bytes
    params: SamplingParams
    order: tuple[int, int]
    token_ids: list[int]
    num_prompt_tokens: int
    max_tokens: int
    stop_token_ids: tuple[int, ...]
    seed: int
    cache_salt: str = ""
    status: RequestStatus = RequestStatus.WAITING
    num_computed_tokens: int = 0
    created_s: float = field(default_factory=time.monotonic)
    queued_s: float = 0.0
    block_ids: list[int] = field(default_factory=list)
    num_cached_tokens: int = 0  # prompt tokens that the prefix cache spared, at first admission
    num_preemptions: int = 0
    num_prompt_logprobs: int = 0  # entries sent so far
    block_keys: list[bytes] = field(default_factory=list)
    prefix_ids: list[int] = field(default_factory=list)
    penalized_prompt: tuple[int, ...] = field(init=False, default=())
    output_counts: Counter[int] = field(init=False, default_factory=Counter)

    def __post_init__(self) -> None:
        if self.params.repetition_penalty != 1.0:
            self.penalized_prompt = tuple(sorted(set(self.token_ids)))

    @property
    def num_output_tokens(self) -> int:
        """Tokens produced so far."""
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def num_uncomputed_tokens(self) -> int:
        """Known tokens whose keys and values are missing; at least 1 until the request ends."""
        return len(self.token_ids) - self.num_computed_tokens

    @property
    def has_penalties(self) -> bool:
        """Whether the sampler needs to know which tokens were produced."""
        params = self.params
        return (
            params.repetition_penalty != 1.0
            or params.presence_penalty != 0.0
            or params.frequency_penalty != 0.0
        )

    @property
    def max_cached_tokens(self) -> int:
        """How many tokens may be taken from the prefix cache when the request is admitted.

        At least the last one must be computed, for its logits. Prompt logprobs that were not sent
        yet need the logits of their positions; entry i comes from position i - 1.
        """
        if (
            self.params.prompt_logprobs is None
            or self.num_prompt_logprobs == self.num_prompt_tokens
        ):
            return len(self.token_ids) - 1
        return max(0, self.num_prompt_logprobs - 1)

    def append(self, token_id: int) -> None:
        """Adds one produced token."""
        self.token_ids.append(token_id)
        if self.has_penalties:
            self.output_counts[token_id] += 1

    def finish_reason(self) -> FinishReason | None:
        """Why the request ends with the tokens it has now; None: it goes on."""
        if self.num_computed_tokens < self.num_prompt_tokens:
            return None
        num_output_tokens = self.num_output_tokens
        if num_output_tokens > self.params.min_tokens and self.token_ids[-1] in self.stop_token_ids:
            return "stop"
        return "length" if num_output_tokens >= self.max_tokens else None

    def forget_blocks(self) -> list[int]:
        """Takes the blocks away, for release; everything has to be computed again."""
        block_ids, self.block_ids = self.block_ids, []
        self.num_computed_tokens = 0
        self.prefix_ids.clear()
        return block_ids

    def check(self, block_size: int) -> None:
        """States the accounting identities.

        Raises:
            RuntimeError: one does not hold; the text has the numbers.
        """
        num_blocks = len(self.block_ids)
        output = self.token_ids[self.num_prompt_tokens :]
        facts = {
            "computed < known": self.num_computed_tokens < len(self.token_ids),
            "computed tokens lie in blocks": self.num_computed_tokens <= num_blocks * block_size,
            "no spare block": num_blocks <= -(-len(self.token_ids) // block_size),
            "output within its bound": len(output) <= self.max_tokens,
            "only a running request holds blocks": self.status is RequestStatus.RUNNING
            or num_blocks == self.num_computed_tokens == 0,
            "counts are the output's": not self.has_penalties
            or self.output_counts == Counter(output),
        }
        broken = [fact for fact, holds in facts.items() if not holds]
        if broken:
            raise RuntimeError(
                f"request {self.request_id}: not so: {', '.join(broken)} ({self.status.value}, "
                f"{len(self.token_ids)} known, {self.num_computed_tokens} computed, "
                f"{num_blocks} blocks of {block_size})"
            )
