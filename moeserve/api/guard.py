"""What every request passes before a route sees it: identity, limits, the key.

A pure ASGI middleware. Routes behind it get requests that are allowed, whose headers are few and
whose body is complete and small enough. Everything is refused unless the key fits, except for the
paths in ``PUBLIC``; the decision looks at ``scope["path"]`` alone, never at a header.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import logging
import re
import secrets
import time

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from moeserve.api.errors import ApiError
from moeserve.metrics import Metrics

logger = logging.getLogger(__name__)

PUBLIC = frozenset({"/health", "/ready", "/ping", "/metrics", "/version"})
_READING = frozenset({"GET", "HEAD", "OPTIONS"})
MAX_HEADERS = 100
MAX_HEADER_BYTES = 64 << 10
_BODY_DEADLINE_S = 60.0
_DISCARD_DEADLINE_S = 2.0
_REQUEST_ID = re.compile(rb"[\x21-\x7e]{1,128}")


class Guard:
    """The middleware.

    Args:
        api_key: None lets everybody in.
        admin_key: what ``POST /experts/*`` needs instead of the API key; None: that one.
        max_body_bytes: a larger body is answered with 413.
    """

    def __init__(
        self,
        app: ASGIApp,
        *,
        api_key: str | None,
        max_body_bytes: int,
        metrics: Metrics,
        admin_key: str | None = None,
    ) -> None:
        self._app = app
        self._key = None if api_key is None else hashlib.sha256(api_key.encode()).digest()
        self._admin_key = (
            self._key if admin_key is None else hashlib.sha256(admin_key.encode()).digest()
        )
        self._max_body_bytes = max_body_bytes
        self._metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """One request (an ASGI application)."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        start = time.monotonic()
        status = 500
        request_id = _request_id(scope)

        async def send_marked(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                message["headers"] = [*message["headers"], (b"x-request-id", request_id)]
            await send(message)

        try:
            await self._serve(scope, receive, send_marked)
        except ApiError as error:
            await send_error(error, scope, send_marked)
        finally:
            route = getattr(scope.get("route"), "path", "other")
            seconds = time.monotonic() - start
            self._metrics.observe_http(route, _method(scope), status, seconds)

    async def _serve(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers: list[tuple[bytes, bytes]] = scope["headers"]
        size = sum(len(name) + len(value) for name, value in headers)
        if len(headers) > MAX_HEADERS or size > MAX_HEADER_BYTES:
            text = f"at most {MAX_HEADERS} headers of {MAX_HEADER_BYTES} bytes are taken"
            raise ApiError(431, text)
        needed = self._needed_key(scope)
        if needed is not None and not _has_key(headers, needed):
            raise ApiError(401, "a valid key is needed: Authorization: Bearer KEY")
        body = await self._read_body(headers, receive)
        await self._app(scope, _replay(body, receive), send)

    def _needed_key(self, scope: Scope) -> bytes | None:
        """SHA-256 of the key that this request must bring, None for none."""
        if scope["path"] in PUBLIC:
            return None
        is_admin = scope["path"].startswith("/experts/") and scope["method"] not in _READING
        return self._admin_key if is_admin else self._key

    async def _read_body(self, headers: list[tuple[bytes, bytes]], receive: Receive) -> bytes:
        declared = next((value for name, value in headers if name == b"content-length"), b"0")
        is_too_large = declared.isdigit() and int(declared[:20]) > self._max_body_bytes
        try:
            async with asyncio.timeout(_BODY_DEADLINE_S):
                body = b"" if is_too_large else await self._read_all(receive)
        except TimeoutError as error:
            raise ApiError(408, "the body took too long to arrive") from error
        if is_too_large or body is None:
            await _discard(receive)
            raise ApiError(413, f"the body is larger than {self._max_body_bytes} bytes")
        return body

    async def _read_all(self, receive: Receive) -> bytes | None:
        """The whole body; None if it is too large."""
        parts: list[bytes] = []
        size = 0
        while True:
            message = await receive()
            if message["type"] == "http.disconnect":
                return b"".join(parts)  # whoever asks next is told so
            parts.append(message["body"])
            size += len(message["body"])
            if size > self._max_body_bytes:
                return None
            if not message["more_body"]:
                return b"".join(parts)


def _has_key(headers: list[tuple[bytes, bytes]], needed: bytes) -> bool:
    given = [value for name, value in headers if name == b"authorization"]
    if len(given) != 1:
        return False
    scheme, _, key = given[0].partition(b" ")
    digest = hashlib.sha256(key.strip()).digest()
    is_same = hmac.compare_digest(digest, needed)
    return is_same and scheme.lower() == b"bearer" and bool(key.strip())


async def _discard(receive: Receive) -> None:
    """Reads on for a moment: a client that is still sending does not see an early answer."""
    try:
        async with asyncio.timeout(_DISCARD_DEADLINE_S):
            while (message := await receive())["type"] == "http.request" and message["more_body"]:
                pass
    except TimeoutError:
        pass


def _replay(body: bytes, receive: Receive) -> Receive:
    """A ``receive`` that gives the body once, then what comes (a disconnect)."""
    pending: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

    async def replay() -> Message:
        return pending.pop() if pending else await receive()

    return replay


def _request_id(scope: Scope) -> bytes:
    """The client's x-request-id if it is short and printable, else one of ours; only echoed."""
    for name, value in scope["headers"]:
        if name == b"x-request-id" and _REQUEST_ID.fullmatch(value):
            return bytes(value)
    return secrets.token_hex(16).encode()


def _method(scope: Scope) -> str:
    method: str = scope["method"]
    return method if method in ("GET", "HEAD", "POST", "OPTIONS") else "other"


async def send_error(error: ApiError, scope: Scope, send: Send) -> None:
    """Answers with an error object."""
    body = error.body
    headers = [*error.headers, (b"content-length", str(len(body)).encode())]
    await send({"type": "http.response.start", "status": error.status, "headers": headers})
    shown = b"" if scope["method"] == "HEAD" else body
    await send({"type": "http.response.body", "body": shown, "more_body": False})
