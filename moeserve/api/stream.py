"""A streamed answer: raw ASGI messages, one per wake-up, with all events that are ready."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from moeserve.api.engine_client import ClientGone
from moeserve.api.errors import ApiError
from moeserve.api.generation import Generation
from moeserve.api.render import DONE, EventWriter
from moeserve.messages import TokenOutput

logger = logging.getLogger(__name__)

_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
]


HANG_UP = "moeserve.hang_up"  # ASGI extension of our server: closes the connection at once


class DisconnectWatch:
    """Fails a request as soon as its client hangs up, in whatever phase it is.

    ``receive`` must belong to a request whose body is read.
    """

    def __init__(self, receive: Receive) -> None:
        self.is_gone = False
        self._generation: Generation | None = None
        self._task = asyncio.create_task(self._watch(receive))

    async def _watch(self, receive: Receive) -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        self.is_gone = True
        if self._generation is not None:
            self._abort(self._generation)

    def follow(self, generation: Generation) -> None:
        """From now on a disconnect aborts ``generation``."""
        self._generation = generation
        if self.is_gone:
            self._abort(generation)

    @staticmethod
    def _abort(generation: Generation) -> None:
        generation.mailbox.fail(ClientGone())
        generation.close()

    def check(self) -> None:
        """Raises ``ClientGone`` if the client is gone."""
        if self.is_gone:
            raise ClientGone()

    def stop(self) -> None:
        """Watches no longer."""
        self._task.cancel()


class EventStream(Response):
    """Sends a generation as server-sent events.

    Args:
        first: the outputs that are already here; errors before them had a status of their own.
        writer: makes the events.
        on_end: called when the stream is over, however it ended.
    """

    def __init__(
        self,
        generation: Generation,
        writer: EventWriter,
        first: list[tuple[int, TokenOutput]],
        on_end: Callable[[], None],
    ) -> None:
        super().__init__()
        self._generation = generation
        self._writer = writer
        self._first = first
        self._on_end = on_end

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Runs the stream to its end (an ASGI application)."""
        self._generation.mailbox.hang_up = scope.get("extensions", {}).get(HANG_UP)
        try:
            await send({"type": "http.response.start", "status": 200, "headers": _HEADERS})
            with contextlib.suppress(ClientGone):
                await self._send_all(send)
        finally:
            self._generation.close()
            self._on_end()

    async def _send_all(self, send: Send) -> None:
        generation, event, outputs = self._generation, self._writer.event, self._first
        while True:
            events = []
            try:
                for index, delta in generation.process(outputs):
                    events.append(event(index, delta))
            except ApiError as error:
                await self._end(send, events, b"data: " + error.body + b"\n\n")
                return
            if generation.is_over:
                await self._end(send, events, self._writer.usage_event())
                return
            if body := b"".join(events):
                await send({"type": "http.response.body", "body": body, "more_body": True})
            try:
                outputs = await generation.mailbox.take()
            except ApiError as error:
                await self._end(send, [], b"data: " + error.body + b"\n\n")
                return

    @staticmethod
    async def _end(send: Send, events: list[bytes], last: bytes) -> None:
        body = b"".join([*events, last, DONE])
        await send({"type": "http.response.body", "body": body, "more_body": False})
