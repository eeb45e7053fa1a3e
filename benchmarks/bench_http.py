"""Streamed tokens per second through one HTTP process on one core.

A stub rank makes tokens at once, a client reads ``--streams`` streams at a time; the HTTP process
alone has the first core, stub and client share the others. One JSON line per mode:

- ``flood``: the stub runs ahead as far as it can, so events share socket writes;
- ``steps``: the stub makes one token for every stream and then waits ``--step-ms``, as ranks do;
  what is measured is how busy the HTTP process is at that rate.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import psutil

from benchmarks import report
from benchmarks.sse_client import Address, Connection
from benchmarks.stub_rank import StubConfig
from moeserve.api.process import HttpProcessConfig
from moeserve.config import from_flat

_VERSIONS = ("fastapi", "uvicorn", "uvloop", "httptools", "msgspec", "pyzmq", "tokenizers")
_GOAL = 15_000  # tokens/s through one process on one core


@contextmanager
def http_process(stub: StubConfig, http_cores: Sequence[int]) -> Iterator[tuple[str, int]]:
    """A stub rank and an HTTP process in front of it; gives its base URL and process id."""
    with socket.create_server(("127.0.0.1", 0), backlog=2048) as listener:
        http = HttpProcessConfig(
            config=from_flat(log_level="warning", max_num_seqs=4096),
            rank_endpoints=[stub.endpoint],
            listen_fd=listener.fileno(),
        )
        children = [
            _start("benchmarks.stub_rank", stub),
            _start("moeserve.api.process", http, pass_fds=(listener.fileno(),)),
        ]
        try:
            os.sched_setaffinity(children[1].pid, http_cores)
            yield f"http://127.0.0.1:{listener.getsockname()[1]}", children[1].pid
        finally:
            for child in children:
                child.kill()
                child.wait()


def _start(module: str, config: Any, pass_fds: tuple[int, ...] = ()) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", module]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, pass_fds=pass_fds)
    assert process.stdin is not None
    process.stdin.write(msgspec.json.encode(config))
    process.stdin.close()
    return process


async def _wait_ready(address: Address) -> None:
    connection = Connection(address)
    while (await connection.request("GET", "/ready")).status != 200:
        await asyncio.sleep(0.05)
    connection.close()


async def _stream(address: Address, bodies: Iterator[bytes], path: str, deadline: float) -> int:
    """Reads one stream after the other until ``deadline``; returns the events received."""
    connection = Connection(address)
    num_events = 0
    while time.monotonic() < deadline:
        reply = await connection.request("POST", path, next(bodies))
        body = reply.body
        if reply.status != 200 or not body.endswith(b"data: [DONE]\n\n"):
            raise RuntimeError(f"HTTP {reply.status}: {body[-300:]!r}")
        num_events += body.count(b"data: {")
    connection.close()
    return num_events


def _bodies(path: str, num_tokens: int, stream: int) -> Iterator[bytes]:
    """Request bodies with a prompt that no other request has."""
    base: dict[str, Any] = {"max_tokens": num_tokens, "stream": True, "ignore_eos": True}
    for turn in range(1 << 30):
        text = f"stream {stream}, turn {turn}: tell me a story"
        chat = {"messages": [{"role": "user", "content": text}]}
        yield msgspec.json.encode(base | (chat if "chat" in path else {"prompt": text}))


async def _load(
    address: Address, path: str, arguments: argparse.Namespace, seconds: float
) -> tuple[int, float]:
    """Events and seconds of ``--streams`` readers."""
    start = time.monotonic()
    readers = [
        _stream(address, _bodies(path, arguments.tokens, i), path, start + seconds)
        for i in range(arguments.streams)
    ]
    counts = await asyncio.gather(*readers)
    return sum(counts), time.monotonic() - start


async def _measure(url: str, pid: int, arguments: argparse.Namespace) -> dict[str, Any]:
    address = Address.parse(url)
    await _wait_ready(address)
    await _load(address, arguments.path, arguments, 1.0)
    process = psutil.Process(pid)
    busy = report.busy_core_seconds()
    before = process.cpu_times()
    events, seconds = await _load(address, arguments.path, arguments, arguments.seconds)
    after = process.cpu_times()
    cpu_s = after.user + after.system - before.user - before.system
    # Every token of the stub has a text, and the last one comes with the finish reason.
    return {
        "tokens_per_s": round(events / seconds),
        "http_core_share": round(cpu_s / seconds, 3),
        "us_per_token": round(cpu_s / events * 1e6, 2),
        "tokens_per_s_per_busy_core": round(events / cpu_s),
        "rss_mib": process.memory_info().rss >> 20,
        "seconds": round(seconds, 2),
        "machine_cores_busy": round((report.busy_core_seconds() - busy) / seconds, 2),
    }


def run(mode: str, arguments: argparse.Namespace) -> dict[str, Any]:
    """The record of one mode."""
    cores = sorted(os.sched_getaffinity(0))
    http_cores, other_cores = cores[:1], cores[1:] or cores
    with tempfile.TemporaryDirectory() as folder:
        stub = StubConfig(
            endpoint=f"ipc://{folder}/rank0",
            delay_s=arguments.step_ms / 1e3 if mode == "steps" else 0.0,
        )
        os.sched_setaffinity(0, other_cores)
        try:
            with http_process(stub, http_cores) as (url, pid):
                result = asyncio.run(_measure(url, pid, arguments))
        finally:
            os.sched_setaffinity(0, cores)
    return {
        "benchmark": "http",
        "mode": mode,
        "path": arguments.path,
        "streams": arguments.streams,
        "tokens_per_stream": arguments.tokens,
        "step_ms": arguments.step_ms if mode == "steps" else None,
        **result,
        "goal_tokens_per_s": _GOAL,
        **report.provenance(*_VERSIONS),
    }


def main() -> None:
    """Measures the modes asked for."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--modes", default="flood,steps")
    parser.add_argument("--path", default="/v1/chat/completions")
    parser.add_argument("--streams", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--seconds", type=float, default=5.0)
    parser.add_argument("--step-ms", type=float, default=3.0)
    parser.add_argument("--json-out", type=Path)
    arguments = parser.parse_args()
    for mode in arguments.modes.split(","):
        report.print_json(run(mode, arguments), arguments.json_out)


if __name__ == "__main__":
    main()
