"""A small HTTP/1.1 client for streamed completions, cheap enough not to disturb what it measures.

One ``Connection`` is one keep-alive TCP connection. While a response streams in, it only notes when
each piece of the body arrived; events are decoded after the clock has stopped.
"""

from __future__ import annotations

import asyncio
import dataclasses
import itertools
import ssl
import time
from typing import Any
from urllib.parse import urlsplit

import httptools
import msgspec


class ClientError(Exception):
    """The server refused, broke the connection or sent no valid stream; the text says which."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Address:
    """Where a server listens, taken from its base URL."""

    host: str
    port: int
    tls: bool
    prefix: str

    @classmethod
    def parse(cls, base_url: str) -> Address:
        """The address in ``base_url``; a trailing /v1 is dropped.

        Raises:
            ValueError: not an http or https URL.
        """
        parts = urlsplit(base_url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ValueError(f"base-url = {base_url!r}: must be like http://127.0.0.1:8000")
        tls = parts.scheme == "https"
        prefix = parts.path.rstrip("/").removesuffix("/v1")
        port = parts.port or (443 if tls else 80)
        return cls(host=parts.hostname, port=port, tls=tls, prefix=prefix)


@dataclasses.dataclass(kw_only=True, slots=True)
class Reply:
    """A response as it arrived: when the request was sent, and each piece of body with its time."""

    sent: float
    status: int = 0
    pieces: list[tuple[float, bytes]] = dataclasses.field(default_factory=list)

    @property
    def body(self) -> bytes:
        """The whole body."""
        return b"".join(data for _, data in self.pieces)


class Connection(asyncio.Protocol):
    """One connection, used for one request at a time. ``close`` it."""

    def __init__(self, address: Address, api_key: str | None = None) -> None:
        self._address = address
        self._api_key = api_key
        self._transport: asyncio.Transport | None = None
        self._parser = httptools.HttpResponseParser(self)
        self._reply = Reply(sent=0.0)
        self._done: asyncio.Future[None] | None = None
        self._now = 0.0
        self._keep_alive = True

    async def request(self, method: str, path: str, body: bytes = b"") -> Reply:
        """Sends a request and returns the response once it is complete.

        Raises:
            ClientError: the connection could not be made or broke.
        """
        if self._transport is None:
            await self._connect()
        assert self._transport is not None
        self._parser = httptools.HttpResponseParser(self)
        self._done = asyncio.get_running_loop().create_future()
        head = self._head(method, path, len(body))
        self._reply = Reply(sent=time.perf_counter())
        self._transport.write(head + body)
        await self._done
        if not self._keep_alive:
            self.close()
        return self._reply

    def close(self) -> None:
        """Closes the connection; the next request opens a new one."""
        if self._transport is not None:
            self._transport.close()
            self._transport = None

    async def _connect(self) -> None:
        context = ssl.create_default_context() if self._address.tls else None
        loop = asyncio.get_running_loop()
        try:
            await loop.create_connection(
                lambda: self, self._address.host, self._address.port, ssl=context
            )
        except OSError as error:
            raise ClientError(f"can not connect: {error}") from error

    def _head(self, method: str, path: str, length: int) -> bytes:
        lines = [
            f"{method} {self._address.prefix}{path} HTTP/1.1",
            f"Host: {self._address.host}:{self._address.port}",
            "Content-Type: application/json",
            f"Content-Length: {length}",
        ]
        if self._api_key:
            lines.append(f"Authorization: Bearer {self._api_key}")
        return ("\r\n".join(lines) + "\r\n\r\n").encode()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """asyncio calls this."""
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        """asyncio calls this; the parser calls the ``on_`` methods below."""
        self._now = time.perf_counter()
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as error:
            self._finish(ClientError(f"no valid HTTP: {error}"))

    def connection_lost(self, exc: Exception | None) -> None:
        """asyncio calls this."""
        self._transport = None
        self._finish(ClientError(f"connection closed in mid-response ({exc or 'by the server'})"))

    def on_body(self, data: bytes) -> None:
        """The parser calls this with a piece of the body, transfer coding removed."""
        self._reply.pieces.append((self._now, data))

    def on_message_complete(self) -> None:
        """The parser calls this at the end of the response."""
        self._reply.status = self._parser.get_status_code()
        self._keep_alive = self._parser.should_keep_alive()
        self._finish(None)

    def _finish(self, error: ClientError | None) -> None:
        if self._done is None or self._done.done():
            return
        if error is None:
            self._done.set_result(None)
        else:
            self._done.set_exception(error)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Timing:
    """What one finished request took, in seconds, and how many tokens it had."""

    ttft_s: float
    itl_s: tuple[float, ...]
    e2e_s: float
    prompt_tokens: int
    output_tokens: int
    num_chunks: int


def decode_stream(reply: Reply) -> Timing:
    """Times and token counts of a streamed completion or chat completion.

    A chunk is an event that carries text or, as many servers do for a token whose bytes are no
    whole character, an empty text before the finish reason. The token counts are the server's
    usage where it sends one; without, the chunks are counted. Gaps are those between successive
    chunks of the same choice, where a request asked for several.

    Raises:
        ClientError: an HTTP error, an error event, or a stream without a token.
    """
    if reply.status != 200:
        raise ClientError(f"HTTP {reply.status}: {reply.body[:300].decode(errors='replace')}")
    times: dict[int, list[float]] = {}  # by choice
    usage: dict[str, Any] = {}
    last = reply.sent
    for when, event in _events(reply):
        if "error" in event:
            raise ClientError(f"error event: {event['error']}")
        usage = event.get("usage") or usage
        if event.get("choices"):
            last = when
            choice = event["choices"][0]
            if _carries_token(choice):
                times.setdefault(choice.get("index", 0), []).append(when)
    if not times and last > reply.sent:
        times[0] = [last]
    if not times:
        raise ClientError("the stream ended without a token")
    num_chunks = sum(map(len, times.values()))
    return Timing(
        ttft_s=min(first for first, *_ in times.values()) - reply.sent,
        itl_s=tuple(b - a for chunks in times.values() for a, b in itertools.pairwise(chunks)),
        e2e_s=last - reply.sent,
        prompt_tokens=usage.get("prompt_tokens", 0),
        output_tokens=usage.get("completion_tokens", num_chunks),
        num_chunks=num_chunks,
    )


def _carries_token(choice: dict[str, Any]) -> bool:
    if "delta" in choice:  # a chat stream opens with an event that has a role and no text
        return "content" in choice["delta"] and (
            bool(choice["delta"]["content"]) or "role" not in choice["delta"]
        )
    return bool(choice.get("text")) or choice.get("finish_reason") is None


def _events(reply: Reply) -> list[tuple[float, dict[str, Any]]]:
    """The stream's JSON events, each with the arrival time of its last byte."""
    events: list[tuple[float, dict[str, Any]]] = []
    rest = b""
    for when, data in reply.pieces:
        *lines, rest = (rest + data).split(b"\n")
        for line in lines:
            payload = line.strip().removeprefix(b"data:").strip()
            if not line.startswith(b"data:") or payload == b"[DONE]":
                continue
            try:
                events.append((when, msgspec.json.decode(payload, type=dict[str, Any])))
            except msgspec.DecodeError as error:
                raise ClientError(f"event is not JSON: {payload[:200]!r}") from error
    return events
