"""Where the outputs of one HTTP request wait for its handler."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from moeserve.api.admission import Reservation
from moeserve.messages import TokenOutput
from moeserve.metrics import EngineMetrics


class Mailbox:
    """The outputs of one HTTP request's sequences, in order of arrival."""

    def __init__(self, reservation: Reservation) -> None:
        self.reservation = reservation
        self.request_ids: set[str] = set()  # its sequences in flight
        self.unread_bytes = 0
        self.hang_up: Callable[[], None] | None = None  # closes the client's connection
        self._outputs: list[tuple[int, TokenOutput]] = []
        self._failure: Exception | None = None
        self._reader: asyncio.Future[None] | None = None

    async def take(self) -> list[tuple[int, TokenOutput]]:
        """All outputs that have come, as (index of the sequence, output); waits for the first.

        Raises:
            Exception: what ``fail`` was called with, once everything before it is taken.
        """
        if not self._outputs and self._failure is None:
            self._reader = asyncio.get_running_loop().create_future()
            await self._reader
        if not self._outputs and self._failure is not None:
            raise self._failure
        outputs, self._outputs = self._outputs, []
        self.unread_bytes = 0
        return outputs

    def put(self, index: int, output: TokenOutput, num_bytes: int) -> None:
        """Adds an output that takes about ``num_bytes`` and wakes the reader."""
        self._outputs.append((index, output))
        self.unread_bytes += num_bytes
        self._wake()

    def fail(self, failure: Exception) -> None:
        """Ends the mailbox; only the first failure counts."""
        if self._failure is None:
            self._failure = failure
            self._wake()

    def _wake(self) -> None:
        if self._reader is not None and not self._reader.done():
            self._reader.set_result(None)


class InFlight:
    """A sequence that a rank works on, and its times (``time.monotonic``)."""

    __slots__ = (
        "arrived",
        "first_token",
        "index",
        "last_token",
        "mailbox",
        "metrics",
        "num_prompt_tokens",
        "num_tokens",
        "rank",
        "request_id",
        "started",
    )

    def __init__(
        self,
        request_id: str,
        mailbox: Mailbox,
        index: int,
        *,
        rank: int,
        metrics: EngineMetrics,
        num_prompt_tokens: int,
        arrived: float,
    ) -> None:
        self.request_id = request_id
        self.mailbox = mailbox
        self.index = index
        self.rank = rank
        self.metrics = metrics
        self.num_prompt_tokens = num_prompt_tokens
        self.arrived = arrived
        self.first_token = 0.0
        self.last_token = 0.0
        self.started = arrived  # with its first step
        self.num_tokens = 0

    def observe(self, output: TokenOutput, now: float) -> None:
        """Adds an output to the metrics of its rank."""
        num_tokens = len(output.token_ids)
        if num_tokens:
            metrics = self.metrics
            if self.num_tokens == 0:
                self.first_token = now
                self.started = min(self.arrived + output.queued_s, now)
                metrics.observe("time_to_first_token_seconds", now - self.arrived)
                metrics.observe("request_queue_time_seconds", output.queued_s)
                metrics.observe("request_prefill_time_seconds", now - self.started)
                metrics.add("prompt_tokens_cached", output.num_cached_tokens)
                self.mailbox.reservation.start(self.num_prompt_tokens)
            else:
                gap = (now - self.last_token) / num_tokens
                metrics.inter_token.observe(gap, num_tokens)
            self.last_token = now
            self.num_tokens += num_tokens
            metrics.counters["generation_tokens"] += num_tokens

    def finish(self, reason: str, now: float) -> None:
        """Adds the end of the sequence to the metrics of its rank."""
        metrics = self.metrics
        metrics.finish(reason)
        metrics.observe("e2e_request_latency_seconds", now - self.arrived)
        metrics.observe("request_generation_tokens", self.num_tokens)
        if self.num_tokens:
            decode_s = self.last_token - self.first_token
            metrics.observe("request_decode_time_seconds", decode_s)
            metrics.observe("request_inference_time_seconds", self.last_token - self.started)
            if self.num_tokens > 1:
                per_token = decode_s / (self.num_tokens - 1)
                metrics.observe("request_time_per_output_token_seconds", per_token)
