"""The asynchronous client of the ranks: sends requests, hands out what comes back.

One callback drains a rank's socket whenever its descriptor is readable and sorts the outputs into
mailboxes, one per HTTP request; a waiting handler is woken once, however much has come.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import secrets
import time
from collections.abc import Callable, Sequence
from typing import Literal

import msgspec

from moeserve import messages
from moeserve.api.admission import Admission, Reservation
from moeserve.api.errors import ApiError
from moeserve.api.mailbox import InFlight, Mailbox
from moeserve.api.queries import Queries
from moeserve.api.rank_choice import RankChoice
from moeserve.api.rank_links import RankLinks, RankUnreachable
from moeserve.config import ServeConfig
from moeserve.messages import RankInfo, RankStats, SamplingParams, TokenOutput
from moeserve.metrics import EngineMetrics, Metrics

logger = logging.getLogger(__name__)

MAX_UNREAD_BYTES = 1 << 20  # of outputs that a client does not take; then it is cut off
_FRAMES_PER_TURN = 128  # of one rank, before other work gets a turn
_HELLO_INTERVAL_S = 1.0
_SLOW_SHARE = 1 / 3  # of the time after which a silent rank is an error

State = Literal["starting", "ready", "slow", "stalled", "draining", "dead"]


class ClientGone(Exception):
    """Nobody waits for the answer any more."""


class PromptRequest(msgspec.Struct, frozen=True, kw_only=True):
    """One prompt and the parameters of each sequence wanted for it."""

    prompt_token_ids: list[int]
    samplings: list[SamplingParams]
    priority: int = 0
    cache_salt: str = ""


class EngineClient:
    """All ranks, as one thing to send prompts to. Lives in one event loop.

    Args:
        config: scheduler limits, number of ranks and HTTP processes.
        links: open sockets to the ranks; the client closes them.
        on_drain: called with the seconds to drain in, when the supervisor says so.
    """

    def __init__(
        self,
        config: ServeConfig,
        links: RankLinks,
        metrics: Metrics,
        *,
        on_drain: Callable[[float], None] = lambda _: None,
    ) -> None:
        num_ranks = len(links.sockets)
        seats = config.scheduler.max_num_seqs * num_ranks // config.server.api_server_count
        self.admission = Admission(config.scheduler, seats)
        self.infos: dict[int, RankInfo] = {}
        self.stats: dict[int, RankStats] = {}
        self._links = links
        self._metrics = metrics
        self._choice = RankChoice(num_ranks)
        self._on_drain = on_drain
        self._in_flight: dict[str, InFlight] = {}
        self._num_on_rank = [0] * num_ranks
        self._last_heard = [0.0] * num_ranks
        self._unreachable: set[int] = set()
        self._silence_limit_s = config.parallel.collective_timeout
        self._dead_reason: str | None = None
        self._is_draining = False
        self._became_idle = asyncio.Event()
        self._all_ready = asyncio.Event()
        self._queries = Queries(self._send)
        self._request_ids = itertools.count()
        self._id_prefix = secrets.token_hex(6)
        self._timer: asyncio.TimerHandle | None = None

    # ---- life ----

    def start(self) -> None:
        """Listens to the ranks and the supervisor from now on, and greets the ranks."""
        self._loop = asyncio.get_running_loop()
        for rank, descriptor in enumerate(self._links.descriptors):
            self._loop.add_reader(descriptor, self._drain_rank, rank)
        control = self._links.control_descriptor
        if control is not None:
            self._loop.add_reader(control, self._drain_control)
            self._drain_control()
        self._tick()

    def close(self) -> None:
        """Stops listening and closes the sockets."""
        if self._timer is not None:
            self._timer.cancel()
        for descriptor in [*self._links.descriptors, self._links.control_descriptor]:
            if descriptor is not None:
                self._loop.remove_reader(descriptor)
        self._links.close()

    async def wait_ready(self) -> None:
        """Returns when every rank has said that it serves."""
        await self._all_ready.wait()

    @property
    def state(self) -> State:
        """What the instance can do now.

        "slow": a rank with work has been silent for a third of the time after which it counts as
        stalled. Load balancers should turn away from it, but nobody should restart it yet.
        """
        if self._dead_reason is not None:
            return "dead"
        if self._is_draining:
            return "draining"
        if len(self.infos) < len(self._links.sockets):
            return "starting"
        silence_s = self._silence_s()
        if silence_s > self._silence_limit_s:
            return "stalled"
        return "slow" if silence_s > self._silence_limit_s * _SLOW_SHARE else "ready"

    @property
    def num_in_flight(self) -> int:
        """Sequences that ranks work on for this process."""
        return len(self._in_flight)

    @property
    def info(self) -> RankInfo:
        """What rank 0 found out; only once the state is not ``starting``."""
        return self.infos[0]

    def check_serving(self) -> None:
        """Raises ``ApiError`` 503 unless new requests are taken."""
        state = self.state
        if state == "starting":
            raise ApiError(503, "the model is still being loaded", retry_after=2)
        if state == "draining":
            raise ApiError(503, "the server is shutting down", retry_after=5)
        if state == "dead":
            raise self._death()

    def _death(self) -> ApiError:
        return ApiError(503, "the engine has died; see the server's log", retry_after=5)

    def _silence_s(self) -> float:
        """Longest time that a rank with work has said nothing."""
        now = time.monotonic()
        waits = zip(self._num_on_rank, self._last_heard, strict=True)
        return max((now - heard for count, heard in waits if count), default=0.0)

    def _tick(self) -> None:
        self._timer = self._loop.call_later(_HELLO_INTERVAL_S, self._tick)
        for rank in range(len(self._links.sockets)):
            if rank not in self.infos:
                self._send(rank, messages.Hello())
        self._metrics.num_bad_frames = self._links.num_bad_frames
        self._metrics.is_healthy = self.state not in ("dead", "stalled")

    # ---- requests ----

    def submit(self, prompts: Sequence[PromptRequest], reservation: Reservation) -> Mailbox:
        """Sends the sequences of one HTTP request; sequence ``i`` has index ``i`` over all prompts.

        Raises:
            ApiError: 503, a rank takes no more messages or the server no more requests.
        """
        self.check_serving()
        mailbox = Mailbox(reservation)
        index = itertools.count()
        try:
            for prompt in prompts:
                loads = self._loads()
                rank = self._choice.choose(prompt.prompt_token_ids, prompt.cache_salt, loads)
                _observe(prompt, self._metrics.engine(rank))
                for sampling in prompt.samplings:
                    self._submit_one(prompt, sampling, rank, mailbox, next(index))
        except RankUnreachable as error:
            self.release(mailbox)
            raise ApiError(503, "a rank takes no requests", retry_after=5) from error
        return mailbox

    def _submit_one(
        self,
        prompt: PromptRequest,
        sampling: SamplingParams,
        rank: int,
        mailbox: Mailbox,
        index: int,
    ) -> None:
        now = time.monotonic()
        request_id = f"{self._id_prefix}-{next(self._request_ids):x}"
        request = messages.NewRequest(
            request_id, prompt.prompt_token_ids, sampling, prompt.priority, prompt.cache_salt, now
        )
        if self._num_on_rank[rank] == 0:
            self._last_heard[rank] = now
        self._links.send(rank, request)
        self._num_on_rank[rank] += 1
        mailbox.request_ids.add(request_id)
        self._in_flight[request_id] = InFlight(
            request_id,
            mailbox,
            index,
            rank=rank,
            metrics=self._metrics.engine(rank),
            num_prompt_tokens=len(prompt.prompt_token_ids),
            arrived=now,
        )
        self._loop.call_soon(self._drain_rank, rank)  # sending may swallow zmq's wake-up

    def _loads(self) -> list[int]:
        """Sequences by rank: ours, or all that the rank has reported if those are more."""
        loads = list(self._num_on_rank)
        for rank, stats in self.stats.items():
            loads[rank] = max(loads[rank], stats.num_running + stats.num_waiting)
        return loads

    def cancel(self, mailbox: Mailbox, index: int) -> None:
        """Ends one sequence of a request early (a stop string was found)."""
        for request_id in mailbox.request_ids:
            sequence = self._in_flight[request_id]
            if sequence.index == index:
                self._send(sequence.rank, messages.Abort([request_id]))
                self._forget(sequence, "stop")
                return

    def release(self, mailbox: Mailbox) -> None:
        """Ends a request: aborts what is in flight, gives its places back. Idempotent."""
        by_rank: dict[int, list[str]] = {}
        for request_id in list(mailbox.request_ids):
            sequence = self._in_flight[request_id]
            by_rank.setdefault(sequence.rank, []).append(request_id)
            self._forget(sequence, "abort")
        for rank, request_ids in by_rank.items():
            self._send(rank, messages.Abort(request_ids))
        mailbox.reservation.release()

    def _forget(self, sequence: InFlight, reason: str) -> None:
        sequence.finish(reason, time.monotonic())
        del self._in_flight[sequence.request_id]
        sequence.mailbox.request_ids.discard(sequence.request_id)
        sequence.mailbox.reservation.finish()
        self._num_on_rank[sequence.rank] -= 1
        if not self._in_flight:
            self._became_idle.set()

    def _send(self, rank: int, message: messages.ToRank) -> None:
        """Sends what may be lost: a rank that takes no messages is the supervisor's business."""
        try:
            self._links.send(rank, message)
            self._unreachable.discard(rank)
        except RankUnreachable:
            if rank not in self._unreachable:  # said once, not with every hello
                logger.warning("rank %d takes no messages", rank)
            self._unreachable.add(rank)
        self._loop.call_soon(self._drain_rank, rank)

    # ---- what comes back ----

    def _drain_rank(self, rank: int) -> None:
        received = self._links.receive(rank, _FRAMES_PER_TURN)
        if not received:
            return
        now = time.monotonic()
        self._last_heard[rank] = now
        for message, num_bytes in received:
            match message:
                case messages.StepOutputs():
                    self._deliver(message.outputs, num_bytes, now)
                    self.stats[rank] = message.stats
                case messages.RankInfo():
                    self._welcome(message)
                case messages.Answer():
                    self._queries.answer(message)
        if rank in self.stats:
            self._metrics.set_snapshot(self.stats[rank])
            self.admission.num_reported_waiting = sum(s.num_waiting for s in self.stats.values())
        if len(received) == _FRAMES_PER_TURN:
            self._loop.call_soon(self._drain_rank, rank)

    def _deliver(self, outputs: Sequence[TokenOutput], num_bytes: int, now: float) -> None:
        share = num_bytes // len(outputs) if outputs else 0
        in_flight = self._in_flight
        for output in outputs:
            sequence = in_flight.get(output.request_id)
            if sequence is None:
                continue  # aborted meanwhile
            sequence.observe(output, now)
            mailbox = sequence.mailbox
            mailbox.put(sequence.index, output, share)
            if output.finish_reason is not None:
                self._forget(sequence, output.finish_reason)
            if mailbox.unread_bytes > MAX_UNREAD_BYTES:
                logger.warning("a client does not read its stream; cutting it off")
                mailbox.fail(ClientGone())
                self.release(mailbox)
                if mailbox.hang_up is not None:
                    mailbox.hang_up()

    def _welcome(self, info: RankInfo) -> None:
        if info.protocol != messages.PROTOCOL:
            self.die(f"rank {info.rank} speaks protocol {info.protocol}")
            return
        self.infos[info.rank] = info
        if len(self.infos) == len(self._num_on_rank):
            self._all_ready.set()
        self._metrics.set_cache_info(
            block_size=info.block_size,
            num_gpu_blocks=sum(known.num_blocks for known in self.infos.values()),
        )

    def _drain_control(self) -> None:
        for message in self._links.receive_control():
            match message:
                case messages.Dead():
                    self.die(message.reason)
                case messages.Drain():
                    self._on_drain(message.timeout)

    def die(self, reason: str) -> None:
        """The engine is gone: fails everything in flight and all that will come."""
        if self._dead_reason is None:
            logger.error("the engine is dead: %s", reason)
            self._dead_reason = reason
        self._metrics.is_healthy = False
        for sequence in list(self._in_flight.values()):
            sequence.mailbox.fail(self._death())
            self._forget(sequence, "error")
        self._queries.fail(self._death())

    # ---- draining ----

    async def drain(self, timeout_s: float) -> None:
        """Takes nothing new; returns when all is over, or ends what is left after ``timeout_s``."""
        self._is_draining = True
        if self._in_flight:
            self._became_idle.clear()
            try:
                await asyncio.wait_for(self._became_idle.wait(), timeout_s)
            except TimeoutError:
                logger.warning("aborting %d sequences", len(self._in_flight))
        for sequence in list(self._in_flight.values()):
            self._send(sequence.rank, messages.Abort([sequence.request_id]))
            last = TokenOutput(sequence.request_id, [], finish_reason="abort")
            sequence.mailbox.put(sequence.index, last, 0)
            self._forget(sequence, "abort")

    async def query(
        self, what: Literal["placement", "load", "history"], ranks: Sequence[int]
    ) -> list[bytes]:
        """The ranks' JSON answers, in the order of ``ranks``.

        Raises:
            ApiError: 503, a rank does not answer.
        """
        self.check_serving()
        return await self._queries.ask(ranks, lambda query_id: messages.Query(query_id, what))

    async def command(self, what: str, body: bytes) -> bytes:
        """Rank 0's JSON answer to a command; see ``messages.Command``.

        Raises:
            ApiError: 400, rank 0 will not do that, the text says why; 503, it does not answer.
        """
        self.check_serving()
        [answer] = await self._queries.ask(
            [0], lambda query_id: messages.Command(query_id, what, body)
        )
        return answer


def _observe(prompt: PromptRequest, metrics: EngineMetrics) -> None:
    """Adds a new prompt to the metrics of its rank."""
    metrics.add("prompt_tokens", len(prompt.prompt_token_ids))
    metrics.observe("request_prompt_tokens", len(prompt.prompt_token_ids))
    metrics.observe("request_params_n", len(prompt.samplings))
    metrics.observe("request_params_max_tokens", prompt.samplings[0].max_tokens or 0)
