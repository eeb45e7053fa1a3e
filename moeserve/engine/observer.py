"""What a rank shows of itself: step outputs and stats to the HTTP processes, answers to queries."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence

import msgspec

from moeserve import messages
from moeserve.engine.channel import Channel
from moeserve.engine.plan import Addressed

logger = logging.getLogger(__name__)

# A listener that gets no outputs still learns the rank's state this often.
STATS_INTERVAL_S = 0.2


class Observer:
    """Knows the listeners (HTTP processes that said hello) and speaks to them.

    Args:
        channel: where to send.
        info: the answer to ``Hello``.
        stats: gives the rank's state at a step.
        views: what ``Query`` may ask for: name -> something that msgspec writes as JSON.
        commands: what ``Command`` may want: name -> what is done with its JSON, and the answer; a
            ValueError becomes an answer for the user.
    """

    def __init__(
        self,
        *,
        channel: Channel,
        info: messages.RankInfo,
        stats: Callable[[int], messages.RankStats],
        views: Mapping[str, Callable[[], object]],
        commands: Mapping[str, Callable[[bytes], object]],
    ) -> None:
        self._channel = channel
        self._info = info
        self._stats = stats
        self._views = views
        self._commands = commands
        self._listeners: dict[bytes, None] = {}
        self._last_stats = 0.0

    def publish(self, step: int, outputs: Sequence[Addressed], *, to_all: bool = False) -> None:
        """Sends each output to its listener, with stats; others get stats now and then."""
        now = time.monotonic()
        to_all = to_all or now - self._last_stats > STATS_INTERVAL_S
        if not outputs and not to_all:
            return
        by_source: dict[bytes, list[messages.TokenOutput]] = {}
        for source, output in outputs:
            by_source.setdefault(source, []).append(output)
        if to_all:
            self._last_stats = now
            for source in self._listeners:
                by_source.setdefault(source, [])
        stats = self._stats(step)
        for source, batch in by_source.items():
            self._channel.send(source, messages.StepOutputs(batch, stats))

    def answer(
        self, source: bytes, question: messages.Hello | messages.Query | messages.Command
    ) -> None:
        """Answers a listener. A hello of another protocol version is answered, not listed."""
        match question:
            case messages.Query(query_id, what):
                self._reply(source, query_id, lambda: self._views[what]())
            case messages.Command(query_id, what, body):
                self._reply(source, query_id, lambda: self._commands[what](body))
            case messages.Hello():
                self._greet(source, question)

    def _reply(self, source: bytes, query_id: int, make: Callable[[], object]) -> None:
        body, problem = b"null", None
        try:
            body = msgspec.json.encode(make())
        except KeyError:
            problem = "this rank does not answer that"
        except (
            ValueError,
            msgspec.MsgspecError,
        ) as error:  # of a command: what it was told is wrong
            problem = str(error)
        self._channel.send(source, messages.Answer(query_id, self._info.rank, body, problem))

    def _greet(self, source: bytes, question: messages.Hello) -> None:
        self._channel.send(source, self._info)
        if question.protocol == self._info.protocol:
            self._listeners[source] = None
        else:
            logger.warning("a listener speaks protocol %d, not ours", question.protocol)
