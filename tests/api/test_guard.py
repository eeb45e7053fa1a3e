"""Keys, limits on headers and bodies, slow and odd clients."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import pytest

from moeserve.api import guard
from moeserve.metrics import Metrics

from .conftest import Instance, run_instance
from .test_validation import check_error

KEY = "sk-\u00e9\u6f22 secret"
OPEN = ["/health", "/ready", "/ping", "/metrics", "/version"]
CLOSED = [
    ("GET", "/v1/models"),
    ("GET", "/v1/models/embedded"),
    ("POST", "/v1/completions"),
    ("POST", "/v1/chat/completions"),
    ("POST", "/tokenize"),
    ("POST", "/detokenize"),
    ("GET", "/experts/placement"),
    ("GET", "/experts/load"),
    ("GET", "/openapi.json"),
    ("GET", "/nothing"),
    ("GET", "/"),
    ("GET", "/health/../v1/models"),
    ("GET", "//health"),
    ("GET", "/health/"),
    ("GET", "/HEALTH"),
    ("GET", "/metrics%2f..%2fv1/models"),
    ("POST", "/v1/embeddings"),
    ("OPTIONS", "/v1/models"),
]


@pytest.fixture(scope="module")
def locked(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Instance]:
    folder = tmp_path_factory.mktemp("locked")
    with run_instance(folder, api_key=KEY, max_body_bytes=100_000) as instance:
        yield instance


def raw(instance: Instance, data: bytes, *, until_close: bool = True) -> bytes:
    """Sends bytes, returns what comes back until the server closes or falls silent."""
    with socket.create_connection(instance.address, timeout=15) as connection:
        with contextlib.suppress(ConnectionError):  # it may hang up before all is sent
            connection.sendall(data)
        answer = b""
        while piece := _receive(connection):
            answer += piece
            if not until_close and b"\r\n\r\n" in answer:
                break
        return answer


def _receive(connection: socket.socket) -> bytes:
    try:
        return connection.recv(65536)
    except ConnectionError:
        return b""


def _get(path: str, *headers: bytes, method: str = "GET") -> bytes:
    lines = [f"{method} {path} HTTP/1.1".encode(), *headers, b"Connection: close", b"", b""]
    return b"\r\n".join(lines)


def _status(answer: bytes) -> int:
    return int(answer.split(b" ", 2)[1])


BEARER = b"Authorization: Bearer "


@pytest.mark.parametrize("host", [b"x", b"x/?", b"x/#", b"x/health?", b"/health", b"", b"@/health"])
@pytest.mark.parametrize(("method", "path"), CLOSED)
def test_everything_is_closed_without_the_key(
    locked: Instance, method: str, path: str, host: bytes
) -> None:
    request = _get(path, b"Host: " + host, b"Content-Length: 0", method=method)
    assert _status(raw(locked, request)) == 401


@pytest.mark.parametrize("path", OPEN)
def test_the_state_is_open(locked: Instance, path: str) -> None:
    assert _status(raw(locked, _get(path, b"Host: x"))) == 200


@pytest.mark.parametrize(
    "header",
    [
        b"Authorization: Bearer wrong",
        b"Authorization: Bearer",
        b"Authorization: Bearer ",
        b"Authorization:",
        b"Authorization: Basic " + KEY.encode(),
        b"Authorization: " + KEY.encode(),
        b"X-API-Key: " + KEY.encode(),
        BEARER + KEY.encode()[:-1],
        BEARER + KEY.encode() + b"x",
        BEARER + b"\xe9\xff\xfe",
        BEARER + KEY.encode("utf-16-le").replace(b"\x00", b"\xff"),
        BEARER + b"k" * 60_000,
        BEARER + b"wrong\r\n" + BEARER + KEY.encode(),
        b"\r\n".join([BEARER + b"k%d" % i for i in range(90)]),
    ],
    ids=lambda header: repr(header[:40]),
)
def test_wrong_keys(locked: Instance, header: bytes) -> None:
    answer = raw(locked, _get("/v1/models", b"Host: x", header))
    assert _status(answer) == 401
    assert b"AuthenticationError" in answer
    assert b"www-authenticate: Bearer" in answer


@pytest.mark.parametrize("scheme", [b"Bearer", b"bearer", b"BEARER"])
def test_the_right_key(locked: Instance, scheme: bytes) -> None:
    header = b"Authorization: " + scheme + b" " + KEY.encode()
    assert _status(raw(locked, _get("/v1/models", b"Host: x", header))) == 200
    assert _status(raw(locked, _get("/nothing", b"Host: x", header))) == 404


def test_a_key_comes_before_the_body(locked: Instance) -> None:
    request = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 50000\r\n\r\n"
    assert _status(raw(locked, request, until_close=False)) == 401


@pytest.mark.parametrize("chunked", [False, True])
def test_body_limit(locked: Instance, chunked: bool) -> None:
    headers = {"authorization": "Bearer " + KEY, "content-type": "application/json"}
    encoded = {name: value.encode() for name, value in headers.items()}
    for size, status in ((99_999, 400), (100_001, 413), (20_000_000, 413)):
        data = b"x" * size
        content = iter([data[: size // 2], data[size // 2 :]]) if chunked else data
        response = httpx.post(locked.url + "/v1/completions", content=content, headers=encoded)
        check_error(response, status)


def test_header_limits(locked: Instance) -> None:
    many = [b"X-%d: y" % i for i in range(guard.MAX_HEADERS + 1)]
    assert _status(raw(locked, _get("/health", b"Host: x", *many))) == 431
    few = [b"X-%d: y" % i for i in range(guard.MAX_HEADERS - 5)]
    assert _status(raw(locked, _get("/health", b"Host: x", *few))) == 200
    for size in (70_000, 200_000, 5_000_000):
        big = raw(locked, _get("/health", b"Host: x", b"X: " + b"y" * size))
        assert big == b"" or _status(big) == 431  # closed while the client was still sending
    flood = raw(locked, _get("/health", b"Host: x", *many * 200))
    assert flood == b"" or _status(flood) == 431
    assert httpx.get(locked.url + "/health").status_code == 200


@pytest.mark.parametrize(
    "request_bytes",
    [
        b"GARBAGE\r\n\r\n",
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",  # TLS to the plain port
        b"POST /ping HTTP/1.1\r\nContent-Length: 4\r\nTransfer-Encoding: chunked\r\n\r\n",
        b"GET /health HTTP/9.9\r\nHost: x\r\n\r\n",
        b"G\xe9T /health HTTP/1.1\r\nHost: x\r\n\r\n",
        b"POST /ping HTTP/1.1\r\nHost: x\r\nContent-Length: -1\r\n\r\n",
        b"POST /ping HTTP/1.1\r\nHost: x\r\nContent-Length: 99999999999999999999999\r\n\r\n",
    ],
    ids=lambda data: repr(data[:20]),
)
def test_what_is_no_http_is_refused(locked: Instance, request_bytes: bytes) -> None:
    answer = raw(locked, request_bytes)
    assert answer == b"" or _status(answer) in (400, 413)
    assert httpx.get(locked.url + "/health").status_code == 200


def test_connections_without_requests(locked: Instance) -> None:
    for _ in range(300):
        socket.create_connection(locked.address).close()
    assert httpx.get(locked.url + "/health").status_code == 200


def test_half_a_header_is_not_waited_for(locked: Instance) -> None:
    start = time.monotonic()
    answer = raw(locked, b"GET /health HTTP/1.1\r\nHost:")
    assert _status(answer) == 408
    assert 5 < time.monotonic() - start < 14


def test_a_slow_body_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """The deadline itself, on a guard of our own: the server's is a minute."""
    monkeypatch.setattr(guard, "_BODY_DEADLINE_S", 0.1)
    sent: list[dict[str, object]] = []

    async def receive() -> dict[str, object]:
        await asyncio.sleep(0.04)
        return {"type": "http.request", "body": b"x", "more_body": True}

    async def send(message: dict[str, object]) -> None:
        sent.append(message)

    middleware = guard.Guard(
        None,  # type: ignore[arg-type]
        api_key=None,
        max_body_bytes=1000,
        metrics=Metrics(prefix="m", model_name="m"),
    )
    scope = {"type": "http", "method": "POST", "path": "/x", "headers": []}
    asyncio.run(middleware(scope, receive, send))  # type: ignore[arg-type]
    assert sent[0]["status"] == 408


def test_cors(start: Callable[..., Instance], tmp_path: Path) -> None:
    instance = start(allowed_origins="http://a.example, http://b.example", api_key="k")
    ask = {"origin": "http://b.example", "access-control-request-method": "POST"}
    preflight = httpx.options(instance.url + "/v1/chat/completions", headers=ask)
    assert preflight.status_code == 200
    assert preflight.headers["access-control-allow-origin"] == "http://b.example"
    refused = httpx.get(instance.url + "/v1/models", headers={"origin": "http://b.example"})
    assert refused.status_code == 401  # and the browser may read why
    assert refused.headers["access-control-allow-origin"] == "http://b.example"
    other = httpx.get(instance.url + "/health", headers={"origin": "http://evil.example"})
    assert "access-control-allow-origin" not in other.headers


def test_no_cors_by_default(server: Instance) -> None:
    answer = httpx.get(server.url + "/health", headers={"origin": "http://a.example"})
    assert "access-control-allow-origin" not in answer.headers
