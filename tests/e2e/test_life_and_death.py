"""How a server starts badly, stops well, and dies: no hang, no orphan, a reason, an exit code."""

from __future__ import annotations

import json
import shutil
import signal
import socket
import threading
import time
from pathlib import Path

import httpx
from helpers_server import Server, serving, wait_until

from moeserve import config


class Stream(threading.Thread):
    """A streaming request in the background; ``events`` fills with its events."""

    def __init__(self, url: str, max_tokens: int = 900) -> None:
        super().__init__(daemon=True)
        self.events: list[str] = []
        self.error: Exception | None = None
        self._url = url
        self._body = {
            "prompt": "Once upon a time", "max_tokens": max_tokens, "stream": True,
            "ignore_eos": True,
        }  # fmt: skip
        self.start()

    def run(self) -> None:
        try:
            with httpx.stream(
                "POST", f"{self._url}/v1/completions", json=self._body, timeout=60
            ) as r:
                self.events.extend(line.removeprefix("data: ") for line in r.iter_lines() if line)
        except httpx.HTTPError as error:
            self.error = error


def started(server: Server) -> list[Stream]:
    """Four streams that have begun."""
    streams = [Stream(server.url) for _ in range(4)]
    time.sleep(0.5)
    return streams


def assert_failed_with_an_event(stream: Stream) -> None:
    stream.join(10)
    assert not stream.is_alive() and stream.error is None
    assert stream.events[-1] == "[DONE]"
    assert "error" in json.loads(stream.events[-2])


def test_a_dead_rank_ends_the_instance_cleanly() -> None:
    with serving("--ep", "2") as server:
        streams = started(server)
        server.member("rank 1").kill()
        for stream in streams:
            assert_failed_with_an_event(stream)
        assert server.wait() == 1
        assert "rank 1: died (killed by SIGKILL)" in "".join(server.log)


def test_a_dead_http_process_ends_the_instance() -> None:
    with serving("--threads-per-rank", "1") as server:
        server.member("http 0").kill()
        assert server.wait() == 1


def test_a_killed_supervisor_leaves_no_orphan() -> None:
    with serving("--ep", "2") as server:
        family = server.family()
        server.process.kill()
        wait_until(lambda: not any(p.is_running() and p.status() != "zombie" for p in family), 10)


def test_sigterm_lets_requests_finish() -> None:
    with serving("--ep", "2") as server:
        stream = Stream(server.url, max_tokens=300)
        time.sleep(0.3)
        server.process.send_signal(signal.SIGTERM)
        time.sleep(0.2)
        try:
            answer = httpx.post(f"{server.url}/v1/completions", json={"prompt": "x"}, timeout=5)
            assert answer.status_code == 503
        except (httpx.ConnectError, httpx.RemoteProtocolError, httpx.ReadError):
            pass  # the socket is closed already: refused as well, and not left waiting
        stream.join(30)
        assert stream.events[-1] == "[DONE]"
        assert '"finish_reason":"length"' in stream.events[-2].replace(": ", ":")
        assert server.wait() == 0


def test_a_second_sigterm_hurries() -> None:
    with serving("--threads-per-rank", "1", "--shutdown-timeout", "60") as server:
        Stream(server.url)
        time.sleep(0.3)
        server.process.send_signal(signal.SIGTERM)
        time.sleep(0.3)
        server.process.send_signal(signal.SIGTERM)
        assert server.wait(10) == 0


def test_a_signal_while_starting_stops_at_once() -> None:
    with serving("--ep", "2", wait=False) as server:
        time.sleep(1)
        family = server.family()
        server.process.send_signal(signal.SIGINT)
        assert server.wait(10) == 1
        assert "stopped by a signal while starting" in "".join(server.log)
        wait_until(lambda: not any(process.is_running() for process in family), 10)


def refused(*arguments: str) -> str:
    """What a server that can not start says."""
    with serving(*arguments, wait=False) as server:
        assert server.wait(60) in (1, 2)
    return "".join(server.log)


def test_a_port_in_use_is_found_before_anything_is_loaded() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        text = refused("--port", str(taken.getsockname()[1]))
    assert "Address already in use" in text and "Traceback" not in text


def test_more_ranks_than_experts_names_the_largest_number() -> None:
    text = refused("--ep", "17")
    assert "16" in text and "Traceback" not in text


def test_a_context_of_nothing_is_refused() -> None:
    assert "max_model_len" in refused("--max-model-len", "0")


def test_a_truncated_checkpoint_is_named(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    shutil.copytree(config.embedded_model_path(), folder)
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1000])
    text = refused(str(folder), "--ep", "2")
    assert "model.safetensors" in text and "Traceback" not in text
