"""bench_serve and its client against a fake server."""

from __future__ import annotations

import argparse
import asyncio
import json
import socket
import statistics
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from benchmarks import bench_serve
from benchmarks.server_process import ServerFailedError
from benchmarks.sse_client import Address, ClientError, Reply, decode_stream


def _reply(*events: str, status: int = 200) -> Reply:
    pieces = [(10.0 + i, f"data: {event}\n\n".encode()) for i, event in enumerate(events)]
    return Reply(sent=9.5, status=status, pieces=pieces)


def test_stream_times_are_those_of_its_tokens() -> None:
    token = '{"choices":[{"text":"a","finish_reason":null}]}'
    usage = '{"choices":[],"usage":{"prompt_tokens":7,"completion_tokens":4}}'
    timing = decode_stream(_reply(token, token, token, usage, "[DONE]"))
    assert (timing.ttft_s, timing.itl_s, timing.e2e_s) == (0.5, (1.0, 1.0), 2.5)
    assert (timing.prompt_tokens, timing.output_tokens, timing.num_chunks) == (7, 4, 3)


def test_role_event_of_a_chat_is_no_token() -> None:
    role = '{"choices":[{"delta":{"role":"assistant","content":""}}]}'
    token = '{"choices":[{"delta":{"content":"a"}}]}'
    last = '{"choices":[{"delta":{},"finish_reason":"length"}]}'
    timing = decode_stream(_reply(role, token, token, last, "[DONE]"))
    assert (timing.ttft_s, timing.num_chunks, timing.output_tokens) == (1.5, 2, 2)


@pytest.mark.parametrize(
    ("reply", "text"),
    [
        (_reply("{}", status=503), "HTTP 503"),
        (_reply('{"error":{"message":"gone"}}'), "gone"),
        (_reply("{no json"), "not JSON"),
        (_reply("[DONE]"), "without a token"),
    ],
)
def test_bad_streams_are_errors(reply: Reply, text: str) -> None:
    with pytest.raises(ClientError, match=text):
        decode_stream(reply)


@pytest.mark.parametrize(
    ("url", "expected"),
    [
        ("http://h:1234", ("h", 1234, False, "")),
        ("http://h/v1/", ("h", 80, False, "")),
        ("https://h/x/v1", ("h", 443, True, "/x")),
    ],
)
def test_base_url_is_taken_apart(url: str, expected: tuple[str, int, bool, str]) -> None:
    address = Address.parse(url)
    assert (address.host, address.port, address.tls, address.prefix) == expected


def test_base_url_without_scheme_is_refused() -> None:
    with pytest.raises(ValueError, match="base-url = 'localhost:8000'"):
        Address.parse("localhost:8000")


def _bench(fake_server: Any, *arguments: str) -> list[dict[str, Any]]:
    async def run() -> list[dict[str, Any]]:
        async with await fake_server.start() as server:
            port = server.sockets[0].getsockname()[1]
            return await bench_serve.bench(_arguments(port, *arguments))

    return asyncio.run(run())


def _arguments(port: int, *arguments: str) -> argparse.Namespace:
    return bench_serve.parser().parse_args(
        ["--base-url", f"http://127.0.0.1:{port}/v1", "--concurrency", "3", *arguments]
    )


@pytest.mark.parametrize("endpoint", ["completions", "chat"])
@pytest.mark.parametrize("split", [False, True])
def test_serve_reports_every_field(fake: ModuleType, endpoint: str, split: bool) -> None:
    server = fake.FakeServer(delay_s=0.002, split=split)
    records = _bench(
        server,
        *("--endpoint", endpoint, "--input-len", "20", "--output-len", "5"),
        *("--prefill-len", "50", "--repetitions", "2", "--warmup", "1"),
    )
    decode, prefill = records
    assert (decode["num_ok"], decode["num_errors"]) == (12, 0)  # 2 waves x 3 workers, twice
    assert (decode["prompt_tokens_mean"], decode["output_tokens_mean"]) == (20, 5)
    assert decode["output_tokens_per_s"] == pytest.approx(
        statistics.median(decode["output_tokens_per_s_all"]), abs=0.01
    )
    assert decode["ttft_ms"]["p50"] < decode["e2e_ms"]["p50"]
    assert decode["itl_ms"]["p50"] > 1
    assert (decode["tokens_per_chunk"], decode["model"]) == (1.0, "fake")
    assert prefill["prefill_tokens_per_s"] == pytest.approx(
        50 * prefill["requests_per_s"], rel=1e-2
    )
    assert {"commit", "hardware", "versions", "time"} <= decode.keys()
    json.dumps(records)


def test_requests_have_fixed_lengths_and_differ(fake: ModuleType) -> None:
    server = fake.FakeServer()
    _bench(server, "--prefill-len", "0", "--vocab-size", "500", "--extra-body", '{"seed": 1}')
    bodies = server.bodies
    assert len({tuple(body["prompt"]) for body in bodies}) == len(bodies)
    for body in bodies:
        assert len(body["prompt"]) == 128
        assert all(250 <= token < 500 for token in body["prompt"])
        assert (body["max_tokens"], body["min_tokens"], body["ignore_eos"]) == (64, 64, True)
        assert (body["temperature"], body["seed"]) == (0.0, 1)


@pytest.mark.parametrize("mistake", [{"fail": True}, {"break_after": 2}])
def test_errors_are_counted_and_shown(fake: ModuleType, mistake: dict[str, Any]) -> None:
    server = fake.FakeServer(**mistake)
    (record,) = _bench(server, "--prefill-len", "0", "--repetitions", "1", "--warmup", "0")
    assert (record["num_ok"], record["num_errors"]) == (0, 6)
    assert "refused" in record["first_error"] or "closed" in record["first_error"]
    assert (record["output_tokens_per_s"], record["ttft_ms"]) == (0.0, None)
    bench_serve.print_summary([record])


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def test_started_server_is_measured_and_stopped(tmp_path: Path) -> None:
    port = _free_port()
    script = Path(__file__).parent / "fake_server.py"
    arguments = _arguments(
        port,
        *("--start", f"{sys.executable} {script} {port}", "--server-log", str(tmp_path / "log")),
        *("--prefill-len", "0", "--repetitions", "1", "--json-out", str(tmp_path / "out.json")),
    )
    (record,) = asyncio.run(bench_serve.bench(arguments))
    assert record["startup_s"] > 0
    assert record["num_errors"] == 0
    assert record["server_cores"] is not None
    assert json.loads((tmp_path / "out.json").read_text()) == record
    with socket.socket() as probe:
        assert probe.connect_ex(("127.0.0.1", port)) != 0


def test_server_that_ends_early_shows_its_log(tmp_path: Path) -> None:
    command = f"{sys.executable} -c \"raise SystemExit('bad flag')\""
    arguments = _arguments(_free_port(), "--start", command, "--server-log", str(tmp_path / "log"))
    with pytest.raises(ServerFailedError, match="bad flag"):
        asyncio.run(bench_serve.bench(arguments))
