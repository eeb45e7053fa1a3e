"""Errors that a client sees: one exception, one JSON shape (OpenAI's error object).

Texts name the field, the value and what would be right. They never hold paths, tracebacks or more
than ``MAX_ECHO`` characters of what the client sent.
"""

from __future__ import annotations

from collections.abc import Sequence
from http import HTTPStatus
from typing import Any

import msgspec

MAX_ECHO = 200
MAX_DETAILS = 10

_TYPES = {
    400: "BadRequestError",
    401: "AuthenticationError",
    404: "NotFoundError",
    429: "RateLimitError",
    500: "InternalServerError",
}


class ApiError(Exception):
    """Ends a request with ``status`` and the error object; ``retry_after`` in whole seconds."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | int | None = None,
        retry_after: int | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.param = param
        self.code = status if code is None else code
        self.retry_after = retry_after

    @property
    def body(self) -> bytes:
        """``{"error": {message, type, param, code}}`` as JSON."""
        kind = _TYPES.get(self.status) or HTTPStatus(self.status).phrase
        error = {
            "message": printable(self.message),
            "type": kind,
            "param": self.param,
            "code": self.code,
        }
        return msgspec.json.encode({"error": error})

    @property
    def headers(self) -> list[tuple[bytes, bytes]]:
        """Response headers that belong to the error."""
        headers = [(b"content-type", b"application/json")]
        if self.retry_after is not None:
            headers.append((b"retry-after", str(self.retry_after).encode()))
        if self.status in (408, 413, 431):  # the rest of the request was not read
            headers.append((b"connection", b"close"))
        if self.status == 401:
            headers.append((b"www-authenticate", b"Bearer"))
        return headers


def bad_request(message: str, *, param: str | None = None, code: str | None = None) -> ApiError:
    """A 400: the request can not be served as it stands."""
    return ApiError(400, message, param=param, code=code)


def cut(value: object) -> str:
    """``value`` as text of at most ``MAX_ECHO`` characters, to be quoted in an error."""
    text = value if isinstance(value, str) else repr(value)
    return text if len(text) <= MAX_ECHO else text[: MAX_ECHO - 3] + "..."


def printable(text: str) -> str:
    """``text`` without lone surrogates, which no UTF-8 encoder takes."""
    return text.encode("utf-8", "replace").decode()


def from_validation(errors: Sequence[Any]) -> ApiError:
    """A 400 out of pydantic's errors: at most ``MAX_DETAILS`` of them, each naming its field."""
    lines = []
    for error in errors[:MAX_DETAILS]:
        field = ".".join(cut(str(part)) for part in error["loc"]) or "body"
        given = "" if error["type"] == "missing" else f" (got {cut(error.get('input'))})"
        lines.append(f"{field}: {error['msg']}{given}")
    if len(errors) > MAX_DETAILS:
        lines.append(f"and {len(errors) - MAX_DETAILS} more")
    location = errors[0]["loc"] if errors else ()
    return bad_request("; ".join(lines), param=cut(str(location[0])) if location else None)
