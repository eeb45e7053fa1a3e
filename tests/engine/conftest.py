"""A stub model that lives on what the scheduler gives it: block tables, positions, token ids.

Its next token is a hash of what it reads back from a simulated KV cache, whose entries depend on
all tokens before them. A block that was shared wrongly, overwritten too early or computed at the
wrong place changes the text.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import pytest
import torch

from moeserve.config import SchedulerConfig
from moeserve.engine.block_pool import BlockPool
from moeserve.engine.plan import Sampled, ScheduledRequest, StepPlan
from moeserve.engine.scheduler import Scheduler
from moeserve.messages import NewRequest, SamplingParams, TokenLogprobs, TokenOutput

VOCAB_SIZE = 11
EOS = 3
SOURCE = b"http"


@pytest.fixture(scope="session", autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


def keys_and_values(token_ids: Sequence[int]) -> list[int]:
    """What a model leaves in the cache: at each position something that depends on all before."""
    stored: list[int] = []
    for token_id in token_ids:
        stored.append(hash((stored[-1] if stored else 0, token_id)))
    return stored


def next_token(stored: Sequence[int], banned: Sequence[int]) -> int:
    choices = [t for t in range(VOCAB_SIZE) if t not in banned] or list(range(VOCAB_SIZE))
    return choices[hash(tuple(stored)) % len(choices)]


def score(stored: Sequence[int], target: int) -> TokenLogprobs:
    return TokenLogprobs(target, -(hash((*stored, target)) % 1000) / 100.0, 1, [], [])


@dataclass
class Result:
    """What one request received."""

    token_ids: list[int] = field(default_factory=list)
    finish_reason: str | None = None
    stop_token_id: int | None = None
    error: str | None = None
    prompt_logprobs: list[TokenLogprobs | None] = field(default_factory=list)
    num_cached_tokens: int = 0
    queued_s: float = field(default=0.0, compare=False)

    def take(self, output: TokenOutput) -> None:
        assert self.finish_reason is None, "an output after the last one"
        self.token_ids += output.token_ids
        self.finish_reason = output.finish_reason
        self.stop_token_id = output.stop_token_id
        self.error = output.error
        self.prompt_logprobs += output.prompt_logprobs or []
        self.num_cached_tokens = output.num_cached_tokens
        self.queued_s = output.queued_s


class StubEngine:
    """A scheduler with the stub model behind it."""

    def __init__(
        self,
        *,
        num_blocks: int = 64,
        block_size: int = 4,
        max_model_len: int = 100,
        enable_prefix_caching: bool = True,
        **config: object,
    ) -> None:
        self.pool = BlockPool(num_blocks, block_size, enable_prefix_caching=enable_prefix_caching)
        self.config = SchedulerConfig(**config)  # type: ignore[arg-type]
        self.max_model_len = max_model_len
        self.scheduler = Scheduler(
            self.config,
            block_pool=self.pool,
            max_model_len=max_model_len,
            eos_token_ids=(EOS,),
            vocab_size=VOCAB_SIZE,
        )
        self.kv = [[-1] * block_size for _ in range(num_blocks)]
        self.results: dict[str, Result] = {}

    def add(
        self,
        request_id: str,
        prompt: Sequence[int],
        *,
        priority: int = 0,
        cache_salt: str = "",
        **params: object,
    ) -> None:
        sampling = SamplingParams(**params)  # type: ignore[arg-type]
        self.results[request_id] = Result()
        self.scheduler.add(
            NewRequest(request_id, list(prompt), sampling, priority, cache_salt), SOURCE
        )
        for _, output in self.scheduler.take_refused():
            self.results[output.request_id].take(output)

    def step(self, *, between: Callable[[], None] = lambda: None) -> StepPlan:
        """One step; ``between`` is called when it is planned and not yet applied."""
        plan = self.scheduler.schedule()
        self.scheduler.check()
        assert plan.num_tokens == sum(r.num_tokens for r in plan.requests)
        assert plan.num_tokens <= self.config.max_num_batched_tokens
        assert self.scheduler.num_running <= self.config.max_num_seqs
        sampled = self.forward(plan)
        between()
        for source, output in self.scheduler.update(plan, sampled):
            assert source == SOURCE
            self.results[output.request_id].take(output)
        self.scheduler.check()
        return plan

    def forward(self, plan: StepPlan) -> list[Sampled]:
        for scheduled in plan.requests:
            slots = [(b, i) for b in scheduled.block_ids for i in range(self.pool.block_size)]
            for position, token_id in enumerate(scheduled.token_ids, scheduled.start):
                block, index = slots[position - 1] if position else (0, 0)
                before = self.kv[block][index] if position else 0
                block, index = slots[position]
                self.kv[block][index] = hash((before, token_id))
        return [self._sample(r) for r in plan.requests if r.sampling is not None]

    def _sample(self, scheduled: ScheduledRequest) -> Sampled:
        info = scheduled.sampling
        assert info is not None
        rows = [
            self._stored(scheduled, scheduled.start + offset + 1)
            for offset in scheduled.logits_offsets
        ]
        assert len(rows) == info.num_rows
        token_id = next_token(rows[-1], info.banned_token_ids) if info.is_sampled else None
        targets = zip(rows, info.prompt_targets, strict=False)
        return Sampled(token_id, None, tuple(score(row, target) for row, target in targets))

    def _stored(self, scheduled: ScheduledRequest, num_tokens: int) -> list[int]:
        values = [value for block_id in scheduled.block_ids for value in self.kv[block_id]]
        return values[:num_tokens]

    def run(self, max_steps: int = 1000) -> int:
        """Steps until nothing is left; returns how many."""
        steps = 0
        while self.scheduler.has_unfinished:
            assert steps < max_steps, f"not done after {steps} steps"
            assert self.step().num_tokens, "a step without progress"
            steps += 1
        assert self.pool.num_free == self.pool.num_blocks
        return steps

    def expected(self, prompt: Sequence[int], **params: object) -> Result:
        """What the model gives when it is asked directly, without any scheduler."""
        sampling = SamplingParams(**params)  # type: ignore[arg-type]
        room = min(self.max_model_len, self.pool.num_tokens) - len(prompt)
        if room < (sampling.max_tokens != 0):
            return Result(finish_reason="error")
        stops = {*sampling.stop_token_ids, *(() if sampling.ignore_eos else (EOS,))}
        max_tokens = room if sampling.max_tokens is None else min(room, sampling.max_tokens)
        stored, result = keys_and_values(prompt), Result(finish_reason="length")
        if sampling.prompt_logprobs is not None:
            result.prompt_logprobs = [
                None if i == 0 else score(stored[:i], target) for i, target in enumerate(prompt)
            ]
        while len(result.token_ids) < max_tokens:
            is_too_short = len(result.token_ids) < sampling.min_tokens
            token = next_token(stored, sorted(stops) if is_too_short else ())
            stored.append(hash((stored[-1], token)))
            result.token_ids.append(token)
            if token in stops and not is_too_short:
                result.finish_reason, result.stop_token_id = "stop", token
                break
        return result


@pytest.fixture(scope="session")
def make_engine() -> type[StubEngine]:
    return StubEngine
