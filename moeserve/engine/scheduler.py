"""Who computes how many tokens in a step, and what becomes of the tokens that were produced.

There is no prefill phase and no decode phase: a request has tokens known and tokens computed, and
each step spends a token budget on letting the second catch up with the first. Chunked prefill,
prefix hits and preemption by recompute follow from that rule.

``schedule`` makes a plan and moves no request forward; ``update`` does, once the step has been
computed. In between a request may be aborted, and the step may be run again from its plan.

Always one request can run to its end: requests have a total order (priority, then arrival), the
last of the running ones is preempted first, so the first never is, and nothing is admitted that
would not fit the pool alone.
"""

from __future__ import annotations

import logging
import time
from bisect import insort
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from moeserve.config import SchedulerConfig
from moeserve.engine.block_pool import BlockPool
from moeserve.engine.intake import Intake
from moeserve.engine.plan import Addressed, Sampled, ScheduledRequest, StepPlan, plan_request
from moeserve.engine.request import Request, RequestStatus
from moeserve.engine.waiting import WaitingQueue
from moeserve.messages import NewRequest, TokenLogprobs, TokenOutput

logger = logging.getLogger(__name__)

_NOTHING = Sampled()


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerStats:
    """Gauges, and counters since start; the names are those of ``messages.RankStats``."""

    num_running: int
    num_waiting: int
    num_waiting_tokens: int
    kv_usage: float
    num_preemptions: int
    prefix_cache_queries: int
    prefix_cache_hits: int
    iteration_tokens: int


@dataclass(slots=True)
class _Draft:
    """A plan in the making: tokens per request, and what is left of the budget."""

    budget: int
    num_tokens: dict[Request, int] = field(default_factory=dict)

    def put(self, request: Request, num_tokens: int) -> None:
        self.num_tokens[request] = num_tokens
        self.budget -= num_tokens

    def drop(self, request: Request) -> None:
        self.budget += self.num_tokens.pop(request, 0)


class Scheduler:
    """Orders the requests of one rank and keeps their state; it owns the block pool's contents.

    Args:
        config: its section of the settings.
        block_pool: the KV blocks, all free.
        max_model_len: longest prompt plus output, in tokens.
        eos_token_ids: what ends a request that does not ask to ignore it.
        vocab_size: width of the logits; token ids are below it.
        seed: makes the seeds of requests that bring none.

    Raises:
        ValueError: without chunked prefill the token budget must hold the longest prompt.
    """

    def __init__(
        self,
        config: SchedulerConfig,
        *,
        block_pool: BlockPool,
        max_model_len: int,
        eos_token_ids: tuple[int, ...],
        vocab_size: int,
        seed: int = 0,
    ) -> None:
        if not config.enable_chunked_prefill and config.max_num_batched_tokens < max_model_len:
            raise ValueError(
                f"max_num_batched_tokens = {config.max_num_batched_tokens}: must be at least "
                f"max_model_len = {max_model_len} when enable_chunked_prefill is off"
            )
        self._config = config
        self._pool = block_pool
        self._intake = Intake(
            max_model_len=max_model_len,
            num_blocks=block_pool.num_blocks,
            block_size=block_pool.block_size,
            vocab_size=vocab_size,
            eos_token_ids=eos_token_ids,
            seed=seed,
            has_priorities=config.scheduling_policy == "priority",
        )
        self._refused: list[Addressed] = []
        self._requests: dict[str, Request] = {}
        self._waiting = WaitingQueue()
        self._running: list[Request] = []  # by order; the last is preempted first
        self._num_arrivals = 0
        self._num_preemptions = 0
        self._prefix_cache_queries = 0
        self._prefix_cache_hits = 0
        self._iteration_tokens = 0

    @property
    def has_unfinished(self) -> bool:
        """Whether a request waits or runs."""
        return bool(self._requests)

    @property
    def num_waiting(self) -> int:
        """Requests that hold no blocks: new or preempted."""
        return len(self._waiting)

    @property
    def num_running(self) -> int:
        """Requests that hold blocks."""
        return len(self._running)

    def stats(self) -> SchedulerStats:
        """The present gauges and counters."""
        return SchedulerStats(
            num_running=len(self._running),
            num_waiting=len(self._waiting),
            num_waiting_tokens=self._waiting.num_tokens,
            kv_usage=self._pool.usage,
            num_preemptions=self._num_preemptions,
            prefix_cache_queries=self._prefix_cache_queries,
            prefix_cache_hits=self._prefix_cache_hits,
            iteration_tokens=self._iteration_tokens,
        )

    # --- requests come and go ---

    def add(self, message: NewRequest, source: bytes) -> None:
        """Queues a request; its outputs will go to ``source``.

        One that can never run is refused: its only output, with ``finish_reason`` "error" and a
        text that has the numbers, is there for ``take_refused``.
        """
        if message.request_id in self._requests:
            error: str | None = f"request id {message.request_id[:80]!r} is in flight already"
        else:
            error = self._intake.refusal(message)
        if error is not None:
            logger.info("refused request %.80s: %s", message.request_id, error)
            output = TokenOutput(message.request_id, [], finish_reason="error", error=error)
            self._refused.append((source, output))
            return
        request = self._intake.accept(message, source, self._num_arrivals)
        self._num_arrivals += 1
        self._requests[request.request_id] = request
        self._waiting.push(request)

    def take_refused(self) -> list[Addressed]:
        """The outputs of requests that were refused since the last call."""
        refused, self._refused = self._refused, []
        return refused

    def abort(self, request_ids: Iterable[str]) -> int:
        """Forgets requests and frees their blocks; unknown and finished ids are ignored.

        Safe between ``schedule`` and ``update``: what the step computes for them is dropped. There
        is no output. Returns how many were found.
        """
        found = [self._requests[i] for i in set(request_ids) if i in self._requests]
        for request in found:
            self._finish(request)
        return len(found)

    def _finish(self, request: Request) -> None:
        if request.status is RequestStatus.RUNNING:
            self._running.remove(request)
            self._pool.release(request.forget_blocks())
        else:
            self._waiting.remove(request)
        request.status = RequestStatus.FINISHED
        del self._requests[request.request_id]

    # --- before the step ---

    def schedule(self) -> StepPlan:
        """The next step: running requests first, those with one token to compute before longer
        ones, then waiting requests in order as far as budget, places and blocks go.

        Blocks are allocated and requests admitted or preempted; none moves forward.
        """
        draft = _Draft(self._config.max_num_batched_tokens)
        num_preemptions = self._num_preemptions
        self._schedule_running(draft)
        if self._num_preemptions == num_preemptions:
            self._admit_waiting(draft)
        planned = tuple(plan_request(r, n) for r, n in draft.num_tokens.items())
        return StepPlan(planned, self._config.max_num_batched_tokens - draft.budget)

    def _schedule_running(self, draft: _Draft) -> None:
        short = [r for r in self._running if r.num_uncomputed_tokens == 1]
        longer = [r for r in self._running if r.num_uncomputed_tokens > 1]
        for request in short + longer:
            if request.status is not RequestStatus.RUNNING:
                continue  # preempted by one before it in this loop
            num_tokens = self._within_budget(request.num_uncomputed_tokens, draft)
            num_tokens = self._make_room(request, num_tokens, draft) if num_tokens else 0
            if num_tokens:
                draft.put(request, num_tokens)

    def _within_budget(self, num_tokens: int, draft: _Draft) -> int:
        if num_tokens > draft.budget and not self._config.enable_chunked_prefill:
            return 0
        return min(num_tokens, draft.budget)

    def _make_room(self, request: Request, num_tokens: int, draft: _Draft) -> int:
        """Gives the request blocks for its next tokens, at the cost of later requests if need be.

        Returns how many tokens have room: fewer where the free blocks hold a smaller chunk, 0 when
        the request itself was the last and had to give way.
        """
        pool = self._pool
        while True:
            end = request.num_computed_tokens + num_tokens
            missing = pool.blocks_for(end) - len(request.block_ids)
            if missing <= pool.num_free:
                if missing > 0:
                    request.block_ids += pool.allocate(missing)
                return num_tokens
            fitting = (len(request.block_ids) + pool.num_free) * pool.block_size
            if self._config.enable_chunked_prefill and fitting > request.num_computed_tokens:
                num_tokens = fitting - request.num_computed_tokens
                continue
            victim = self._running[-1]
            self._preempt(victim)
            draft.drop(victim)
            if victim is request:
                return 0

    def _preempt(self, request: Request) -> None:
        self._running.remove(request)
        self._pool.release(request.forget_blocks())
        request.status = RequestStatus.WAITING
        request.num_preemptions += 1
        self._num_preemptions += 1
        self._waiting.push(request)

    def _admit_waiting(self, draft: _Draft) -> None:
        """Lets waiting requests in, strictly in order: whoever overtakes could starve the head.

        One enters only when all its known tokens have room. Half-admitted requests would hold
        blocks that nobody can finish with. (With budget left, the running ones have got theirs.)
        """
        pool = self._pool
        while len(self._waiting) and draft.budget and self.num_running < self._config.max_num_seqs:
            request = self._waiting.head
            cached = pool.prefix_cache.lookup(request) if pool.prefix_cache is not None else []
            num_uncached_tokens = len(request.token_ids) - len(cached) * pool.block_size
            num_tokens = self._within_budget(num_uncached_tokens, draft)
            missing = pool.blocks_for(num_uncached_tokens) + pool.num_idle(cached)
            if not num_tokens or missing > pool.num_free:
                break
            self._start(request, cached)
            allocated = self._make_room(request, num_tokens, draft)
            assert allocated == num_tokens, "room was counted above"
            draft.put(request, num_tokens)

    def _start(self, request: Request, cached: list[int]) -> None:
        self._waiting.remove(request)
        self._pool.touch(cached)
        request.status = RequestStatus.RUNNING
        request.block_ids += cached
        request.num_computed_tokens = len(cached) * self._pool.block_size
        insort(self._running, request, key=lambda r: r.order)
        if request.num_preemptions:
            return
        request.queued_s = time.monotonic() - request.created_s
        if self._pool.prefix_cache is not None:
            request.num_cached_tokens = request.num_computed_tokens
            self._prefix_cache_queries += request.num_prompt_tokens
            self._prefix_cache_hits += request.num_cached_tokens

    # --- after the step ---

    def update(self, plan: StepPlan, sampled: Sequence[Sampled]) -> list[Addressed]:
        """Moves the requests of the plan forward and ends those that are done.

        Args:
            plan: of the step that was computed.
            sampled: one for each entry of ``plan.sampling``, in that order.

        Returns:
            The outputs and where they go; requests that got nothing, and aborted ones, have none.
        """
        outputs: list[Addressed] = []
        results = iter(sampled)
        for scheduled in plan.requests:
            result = _NOTHING if scheduled.sampling is None else next(results)
            request = scheduled.request
            if request.status is not RequestStatus.RUNNING:
                continue  # aborted while the step was computed
            output = self._advance(request, scheduled, result)
            if output is not None:
                outputs.append((request.source, output))
        self._iteration_tokens += plan.num_tokens
        return outputs

    def _advance(
        self, request: Request, scheduled: ScheduledRequest, result: Sampled
    ) -> TokenOutput | None:
        assert scheduled.start == request.num_computed_tokens, "a plan is applied once"
        request.num_computed_tokens = scheduled.seq_len
        if self._pool.prefix_cache is not None:
            self._pool.prefix_cache.store(request)
        prompt_logprobs = _next_prompt_logprobs(request, result)
        if result.token_id is not None:
            request.append(result.token_id)
        reason = request.finish_reason()
        if reason is not None:
            self._finish(request)
        elif result.token_id is None and not prompt_logprobs:
            return None
        return TokenOutput(
            request.request_id,
            [] if result.token_id is None else [result.token_id],
            finish_reason=reason,
            stop_token_id=result.token_id if reason == "stop" else None,
            logprobs=None if result.logprobs is None else [result.logprobs],
            prompt_logprobs=prompt_logprobs,
            num_cached_tokens=request.num_cached_tokens,
            queued_s=request.queued_s,
        )

    def check(self) -> None:
        """States the accounting identities of requests, queue and block pool.

        Raises:
            RuntimeError: one does not hold; the text has the numbers.
        """
        for request in self._requests.values():
            request.check(self._pool.block_size)
        self._pool.check(request.block_ids for request in self._running)
        held = {*self._waiting, *self._running}
        num_tokens = sum(len(request.token_ids) for request in self._waiting)
        if (
            held != set(self._requests.values())
            or len(held) != len(self._waiting) + len(self._running)
            or num_tokens != self._waiting.num_tokens
        ):
            raise RuntimeError(
                f"scheduler: {len(self._requests)} requests, {len(self._waiting)} waiting with "
                f"{num_tokens} tokens ({self._waiting.num_tokens} counted), "
                f"{len(self._running)} running"
            )


def _next_prompt_logprobs(request: Request, result: Sampled) -> list[TokenLogprobs | None] | None:
    """The piece of the prompt's logprobs that comes next; nothing precedes the first token."""
    if request.params.prompt_logprobs is None:
        return None
    is_first = request.num_prompt_logprobs == 0
    piece = [*([None] if is_first else []), *result.prompt_logprobs]
    request.num_prompt_logprobs += len(piece)
    return piece or None
