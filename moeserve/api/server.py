"""uvicorn as we run it: limits on half-sent headers, and an orderly way to stop."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import socket
from collections.abc import Iterator

import uvicorn
from starlette.types import ASGIApp
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from moeserve.api.engine_client import EngineClient
from moeserve.api.guard import MAX_HEADER_BYTES
from moeserve.api.stream import HANG_UP

logger = logging.getLogger(__name__)

_HEADER_DEADLINE_S = 10.0
_KEEP_ALIVE_S = 75
_FLUSH_S = 5  # for answers that are complete but not sent when we leave
_SEND_BUFFER_BYTES = 128 << 10  # of the kernel; what a client does not read piles up in it first
_UNACKNOWLEDGED_MS = 60_000  # a client that takes nothing for so long is gone


class Protocol(HttpToolsProtocol):
    """One connection. Adds what uvicorn has no limits for: the time and size of headers."""

    _deadline: asyncio.TimerHandle | None = None
    _num_header_bytes = 0

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """A client connects."""
        super().connection_made(transport)
        connection = transport.get_extra_info("socket")
        if connection.family in (socket.AF_INET, socket.AF_INET6):
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _SEND_BUFFER_BYTES)
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, _UNACKNOWLEDGED_MS)
        self._await_headers()

    def connection_lost(self, exc: Exception | None) -> None:
        """The connection is over."""
        self._headers_are_here()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Bytes arrive."""
        if self._deadline is not None or self._is_between_requests():
            self._num_header_bytes += len(data)
            if self._deadline is None:
                self._await_headers()
        super().data_received(data)
        if self._deadline is not None and self._num_header_bytes > MAX_HEADER_BYTES:
            self._refuse(b"431 Request Header Fields Too Large")

    def on_message_begin(self) -> None:
        """A request line arrives."""
        super().on_message_begin()
        self.scope["extensions"] = {HANG_UP: self.transport.abort}  # type: ignore[dict-item]

    def on_headers_complete(self) -> None:
        """The headers are complete; the application starts."""
        self._headers_are_here()
        super().on_headers_complete()

    def _is_between_requests(self) -> bool:
        return self.cycle is not None and self.cycle.response_complete

    def _await_headers(self) -> None:
        self._deadline = self.loop.call_later(
            _HEADER_DEADLINE_S, self._refuse, b"408 Request Timeout"
        )

    def _headers_are_here(self) -> None:
        self._num_header_bytes = 0
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None

    def _refuse(self, status: bytes) -> None:
        self._headers_are_here()
        if not self.transport.is_closing():
            head = b"HTTP/1.1 %s\r\ncontent-length: 0\r\nconnection: close\r\n\r\n" % status
            self.transport.write(head)
            self.transport.close()


class Server(uvicorn.Server):
    """Leaves in steps: nothing new, what runs finishes, the rest is aborted, connections close.

    The listening socket stays open while draining, so that new requests get a 503 and not a
    refused connection.
    """

    def __init__(self, app: ASGIApp, client: EngineClient, shutdown_timeout_s: float) -> None:
        config = uvicorn.Config(
            app,
            loop="uvloop",
            http=Protocol,
            ws="none",
            lifespan="off",
            log_config=None,
            log_level="error",
            access_log=False,
            server_header=False,
            timeout_keep_alive=_KEEP_ALIVE_S,
            timeout_graceful_shutdown=_FLUSH_S,
        )
        super().__init__(config)
        self._client = client
        self._shutdown_timeout_s = shutdown_timeout_s
        self._draining: asyncio.Task[None] | None = None
        self._was_signalled = False

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """SIGTERM and SIGINT drain; the second one stops at once.

        One that comes while draining for another reason changes nothing: some launchers send it to
        every process, also to this one, that rank 0 has told to drain already.
        """
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._on_signal)
        yield

    def _on_signal(self) -> None:
        if self._was_signalled or self._draining is None:
            self.drain(0.0 if self._was_signalled else self._shutdown_timeout_s)
        self._was_signalled = True

    def drain(self, timeout_s: float) -> None:
        """Starts leaving; calling again with a shorter time hurries."""
        if self._draining is not None:
            self._draining.cancel()
        self._draining = asyncio.create_task(self._drain(timeout_s))

    async def _drain(self, timeout_s: float) -> None:
        logger.info("draining: %d sequences, %g s", self._client.num_in_flight, timeout_s)
        await self._client.drain(timeout_s)
        self.should_exit = True
