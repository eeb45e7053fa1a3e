"""The real HTTP process in front of stub ranks, as fixtures."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest
import zmq

from benchmarks.stub_rank import StubConfig
from moeserve import config, messages
from moeserve.api.process import HttpProcessConfig
from moeserve.api.tokenizer import Tokenizer

EMBEDDED = config.embedded_model_path()


@dataclasses.dataclass
class Instance:
    """A running HTTP process, its ranks, and the supervisor's end of the control socket."""

    url: str
    address: tuple[str, int]
    http: subprocess.Popen[bytes]
    ranks: list[subprocess.Popen[bytes]]
    control: zmq.Socket[bytes]
    log_path: Path

    def client(self, **options: Any) -> httpx.Client:
        return httpx.Client(base_url=self.url, timeout=30, **options)

    def tell(self, message: messages.ToHttp) -> None:
        self.control.send(messages.encode(message))

    def log(self) -> list[list[str]]:
        """What rank 0 was told: ["new", id, prompt length] and ["abort", id]."""
        return [line.split() for line in self.log_path.read_text().splitlines()]

    def num(self, kind: str) -> int:
        return sum(words[0] == kind for words in self.log())

    def post(self, path: str, **body: Any) -> httpx.Response:
        return httpx.post(self.url + path, json=body, timeout=30)

    def complete(self, **body: Any) -> httpx.Response:
        return self.post("/v1/completions", **{"prompt": [100, 101], "max_tokens": 4, **body})

    def events(self, path: str, **body: Any) -> list[Any]:
        """The parsed events of a stream; the last must be [DONE]."""
        response = self.post(path, stream=True, **body)
        assert response.status_code == 200, response.text
        return parse_events(response.text)


def parse_events(text: str) -> list[Any]:
    assert text.endswith("data: [DONE]\n\n"), text[-200:]
    lines = text.removesuffix("data: [DONE]\n\n").split("\n\n")
    assert lines.pop() == ""
    return [msgspec.json.decode(line.removeprefix("data: ")) for line in lines]


def eventually(condition: Callable[[], Any], timeout_s: float = 30.0) -> None:
    """Waits until ``condition()`` holds."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "it never happened"
        time.sleep(0.02)


def _spawn(module: str, config: Any, pass_fds: tuple[int, ...] = ()) -> subprocess.Popen[bytes]:
    process = subprocess.Popen(
        [sys.executable, "-m", module], stdin=subprocess.PIPE, pass_fds=pass_fds
    )
    assert process.stdin is not None
    process.stdin.write(msgspec.json.encode(config))
    process.stdin.close()
    return process


@contextlib.contextmanager
def run_instance(
    folder: Path,
    *,
    ranks: int = 1,
    stub: dict[str, Any] | None = None,
    wait: bool = True,
    **settings: Any,
) -> Iterator[Instance]:
    """An instance with stub options and settings by name."""
    settings.setdefault("log_level", "warning")
    log_path = folder / "log"
    log_path.touch()
    endpoints = [f"ipc://{folder}/rank{rank}" for rank in range(ranks)]
    context = zmq.Context()
    control = context.socket(zmq.PUSH)
    control.bind(f"ipc://{folder}/control")
    children = []
    with socket.create_server(("127.0.0.1", 0), backlog=512) as listener:
        for rank, endpoint in enumerate(endpoints):
            log = str(log_path) if rank == 0 else None
            options = {"log_path": log, **(stub or {})}
            stub_config = StubConfig(endpoint=endpoint, rank=rank, **options)
            children.append(_spawn("benchmarks.stub_rank", stub_config))
        http = _spawn(
            "moeserve.api.process",
            HttpProcessConfig(
                config=config.from_flat(ep=ranks, **settings),
                rank_endpoints=endpoints,
                control_endpoint=f"ipc://{folder}/control",
                listen_fd=listener.fileno(),
                parent_pid=os.getpid(),
            ),
            (listener.fileno(),),
        )
        address = listener.getsockname()
        url = f"http://{address[0]}:{address[1]}"
        instance = Instance(url, address, http, children, control, log_path)
    try:
        if wait:
            with instance.client() as client:
                eventually(lambda: client.get("/ready").status_code == 200, 60)
        yield instance
    finally:
        for process in [http, *children]:
            if process.poll() is None:
                process.send_signal(signal.SIGCONT)
                process.kill()
            process.wait()
        context.destroy(linger=0)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Instance]:
    """One rank that emits at once; prompts that start with token 5 say what to emit."""
    stub = {"script_token": 5, "eos_token_id": 2}
    with run_instance(tmp_path_factory.mktemp("api"), stub=stub) as instance:
        yield instance


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., Instance]]:
    """Starts an instance of its own; see ``run_instance``."""
    with contextlib.ExitStack() as stack:
        yield lambda **options: stack.enter_context(run_instance(tmp_path, **options))


@pytest.fixture(scope="session")
def tokenizer() -> Tokenizer:
    return Tokenizer.load(EMBEDDED)
