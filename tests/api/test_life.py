"""Starting, overload, clients that leave, an engine that dies, an orderly end."""

from __future__ import annotations

import concurrent.futures
import os
import signal
import socket
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import msgspec
import psutil
import pytest

from moeserve import messages

from .conftest import Instance, eventually, parse_events
from .test_validation import check_error

Start = Callable[..., Instance]
CHAT = {"messages": [{"role": "user", "content": "Hi"}]}


def _open_stream(instance: Instance, **body: Any) -> socket.socket:
    """A connection that has asked for an answer and reads nothing yet."""
    data = msgspec.json.encode({"prompt": [100, 101], "max_tokens": 900, **body})
    head = (
        "POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
        f"Content-Length: {len(data)}\r\n\r\n"
    )
    connection = socket.create_connection(instance.address)
    connection.sendall(head.encode() + data)
    return connection


def _in_background(work: Callable[[], Any]) -> concurrent.futures.Future[Any]:
    future: concurrent.futures.Future[Any] = concurrent.futures.Future()

    def run() -> None:
        try:
            future.set_result(work())
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    return future


# ---- starting ----


def test_before_the_ranks_are_ready(start: Start, tmp_path: Path) -> None:
    gate = tmp_path / "ready"
    instance = start(stub={"ready_path": str(gate)}, wait=False)
    with instance.client() as client:
        eventually(lambda: client.get("/health").status_code == 200)
        assert client.get("/ready").status_code == 503
        assert client.get("/ready").json() == {"status": "starting"}
        for request in (
            lambda: client.get("/v1/models"),
            lambda: client.get("/experts/load"),
            lambda: client.post("/v1/completions", json={"prompt": "a"}),
            lambda: client.post("/tokenize", json={"prompt": "a"}),
        ):
            answer = request()
            check_error(answer, 503)
            assert int(answer.headers["retry-after"]) >= 1
        gate.touch()
        eventually(lambda: client.get("/ready").status_code == 200)
        assert client.post("/v1/completions", json={"prompt": "a"}).status_code == 200


def test_another_protocol_version_is_refused(start: Start) -> None:
    instance = start(stub={"protocol": 99}, wait=False)
    eventually(lambda: _health(instance) == 503)


def _health(instance: Instance, path: str = "/health") -> int:
    try:
        return httpx.get(instance.url + path).status_code
    except httpx.TransportError:
        return 0


def test_a_bad_configuration_ends_the_process(start: Start) -> None:
    instance = start(model="/nowhere", wait=False)
    assert instance.http.wait(20) == 1


def test_no_torch_in_the_http_process(server: Instance) -> None:
    maps = {m.path for m in psutil.Process(server.http.pid).memory_maps()}
    assert not any("torch" in path or "transformers" in path for path in maps)
    assert any("tokenizers" in path for path in maps)


def test_state_routes(server: Instance) -> None:
    with server.client() as client:
        for path in ("/health", "/ready", "/ping", "/metrics"):
            assert client.head(path).status_code == 200
            assert client.head(path).content == b""
        assert client.get("/version").json()["version"]
        assert client.get("/openapi.json").json()["paths"]["/v1/completions"]


def test_several_ranks(start: Start) -> None:
    instance = start(ranks=3)
    with instance.client() as client:
        for i in range(30):
            body = {"prompt": [i + 20] * 40, "max_tokens": 2}
            assert client.post("/v1/completions", json=body).status_code == 200
        load = client.get("/experts/load").json()
        assert load["layers"] == {"0": [1 + 2 + 3, 6, 9, 12], "1": [12, 9, 6, 3]}
        assert [entry["rank"] for entry in load["ranks"]] == [0, 1, 2]
        assert sum(entry["tokens"] for entry in load["ranks"]) == 60
        assert all(entry["tokens"] for entry in load["ranks"])
        assert 0 < load["balancedness"] <= 1
        placement = client.get("/experts/placement").json()
        assert placement["layers"]["0"] == [[0, 1], [2, 3]]


def test_without_a_tokenizer(start: Start) -> None:
    instance = start(skip_tokenizer_init=True)
    body = instance.complete(logprobs=1).json()
    [choice] = body["choices"]
    assert choice["text"] == ""
    assert len(choice["token_ids"]) == 4
    assert choice["logprobs"]["tokens"][0] == f"token_id:{choice['token_ids'][0]}"
    events = instance.events("/v1/completions", prompt=[100, 101], max_tokens=4)
    assert [e["choices"][0]["token_ids"][0] for e in events] == choice["token_ids"]
    check_error(instance.complete(prompt="text"), 400, "prompt")
    check_error(instance.post("/v1/chat/completions", **CHAT), 400)
    check_error(instance.post("/detokenize", tokens=[1]), 400)


# ---- clients that leave ----


@pytest.mark.parametrize("stream", [True, False])
def test_leaving_while_waiting_for_the_first_token(start: Start, stream: bool) -> None:
    instance = start(stub={"max_num_seqs": 0})  # it never starts anything
    connection = _open_stream(instance, stream=stream, n=3)
    eventually(lambda: instance.num("new") == 3)
    connection.close()
    eventually(lambda: instance.num("abort") == 3)


@pytest.mark.parametrize("stream", [True, False])
def test_leaving_in_the_middle(start: Start, stream: bool) -> None:
    instance = start(stub={"delay_s": 0.02})
    connection = _open_stream(instance, stream=stream)
    if stream:
        assert connection.recv(100)
    time.sleep(0.2)
    connection.close()
    eventually(lambda: instance.num("abort") == 1)
    assert instance.complete().status_code == 200


def test_leaving_while_the_prompt_is_tokenised(start: Start) -> None:
    instance = start(max_num_queued_reqs=0, max_num_seqs=1, stub={"max_model_len": 1 << 20})
    for _ in range(3):
        connection = _open_stream(instance, prompt="word " * 150_000)
        time.sleep(0.02)
        connection.close()
    # Whether it was sent before we left is a race; that it ends and leaves no place taken is not.
    eventually(lambda: instance.complete().status_code == 200)
    eventually(lambda: instance.num("abort") == instance.num("new") - 1)


def test_a_storm_of_disconnects(start: Start) -> None:
    instance = start(stub={"delay_s": 0.01}, max_num_queued_reqs=500)
    connections = [_open_stream(instance, stream=i % 2 == 0) for i in range(150)]
    eventually(lambda: instance.num("new") == 150)
    for connection in connections:
        connection.close()
    eventually(lambda: instance.num("abort") == 150)
    files = psutil.Process(instance.http.pid).num_fds()
    assert files < 60
    assert instance.complete().status_code == 200


def test_a_client_that_does_not_read_is_cut_off(start: Start) -> None:
    instance = start(
        stub={"max_model_len": 200_000, "tokens_per_output": 20, "delay_s": 0.001},
    )
    stuck = _open_stream(instance, stream=True, logprobs=5, max_tokens=190_000)
    process = psutil.Process(instance.http.pid)
    before = process.memory_info().rss
    eventually(lambda: instance.num("abort") == 1, 60)
    assert process.memory_info().rss - before < 100 << 20
    assert instance.complete().status_code == 200
    stuck.settimeout(10)
    with pytest.raises(ConnectionError):
        while stuck.recv(1 << 20):
            pass
        raise ConnectionResetError("closed in order, but early")


# ---- overload ----


def test_a_burst_beyond_the_limit(start: Start) -> None:
    instance = start(max_num_seqs=4, max_num_queued_reqs=4, stub={"delay_s": 0.05})
    with instance.client(limits=httpx.Limits(max_connections=40)) as client:
        with concurrent.futures.ThreadPoolExecutor(24) as threads:
            body = {"prompt": [100], "max_tokens": 20}
            answers = list(
                threads.map(lambda _: client.post("/v1/completions", json=body), range(24))
            )
        served = [a for a in answers if a.status_code == 200]
        refused = [a for a in answers if a.status_code == 503]
        assert len(served) == 8 and len(refused) == 16
        for answer in refused:
            error = check_error(answer, 503)
            assert "queue is full" in error["message"]
            assert answer.headers["retry-after"] == "1"
            assert answer.elapsed.total_seconds() < 0.9  # before those inside are done
        assert client.post("/v1/completions", json=body).status_code == 200
        text = client.get("/metrics").text
        assert 'moeserve:admission_rejections_total{reason="queue_full"} 16.0' in text


def test_samples_count_as_requests(start: Start) -> None:
    instance = start(max_num_seqs=2, max_num_queued_reqs=2)
    assert instance.complete(n=4).status_code == 200
    check_error(instance.complete(n=5), 503)


def test_the_limit_on_waiting_tokens(start: Start) -> None:
    instance = start(max_num_queued_tokens=100, stub={"max_num_seqs": 0})
    lone = _open_stream(instance, prompt=[7] * 300)  # more than the limit, but nobody waits yet
    eventually(lambda: instance.num("new") == 1)
    check_error(instance.complete(prompt=[7]), 503)
    check_error(instance.complete(prompt="x"), 503)
    lone.close()
    eventually(lambda: instance.num("abort") == 1)
    again = _open_stream(instance, prompt=[7] * 99)
    eventually(lambda: instance.num("new") == 2)
    one = _open_stream(instance, prompt=[7])
    eventually(lambda: instance.num("new") == 3)
    check_error(instance.complete(prompt=[7]), 503)
    again.close()
    one.close()


# ---- errors of the engine ----


def test_a_refusal_before_the_first_token_is_a_400(start: Start) -> None:
    instance = start(stub={"error_after": 0})
    for stream in (False, True):
        error = check_error(instance.complete(stream=stream), 400)
        assert "12 KV blocks" in error["message"]


def test_an_error_after_the_first_token(start: Start) -> None:
    instance = start(stub={"error_after": 2, "delay_s": 0.01})
    check_error(instance.complete(), 500)
    events = instance.events("/v1/completions", prompt=[100], max_tokens=9)
    assert events[-1]["error"]["code"] == 500
    assert all("choices" in event for event in events[:-1])


def test_frames_that_are_no_messages_are_counted(start: Start) -> None:
    instance = start(stub={"garbage": True})
    assert instance.complete(max_tokens=3).status_code == 200
    line = "moeserve:bad_frames_total "
    eventually(
        lambda: any(
            text.startswith(line) and float(text.split()[1]) >= 3
            for text in httpx.get(instance.url + "/metrics").text.splitlines()
        )
    )


def test_the_engine_dies(start: Start) -> None:
    instance = start(stub={"delay_s": 0.02})
    stream = _in_background(
        lambda: instance.post("/v1/completions", prompt=[9], max_tokens=900, stream=True)
    )
    whole = _in_background(lambda: instance.complete(max_tokens=900))
    eventually(lambda: instance.num("new") == 2)
    time.sleep(0.1)
    instance.ranks[0].kill()
    told = time.monotonic()
    instance.tell(messages.Dead("rank 0: killed by SIGKILL /secret/path"))
    events = parse_events(stream.result(10).text)
    check_error(whole.result(10), 503)
    assert time.monotonic() - told < 1.0
    assert events[-1]["error"]["code"] == 503
    assert "secret" not in stream.result().text + whole.result().text
    with instance.client() as client:
        assert client.get("/health").status_code == 503
        assert client.get("/ready").status_code == 503
        check_error(client.post("/v1/completions", json={"prompt": "a"}), 503)
        check_error(client.get("/experts/load"), 503)
        assert "moeserve:engine_healthy" in client.get("/metrics").text


def test_a_silent_rank_is_noticed(start: Start) -> None:
    instance = start(collective_timeout=3.0, stub={"delay_s": 0.01})
    waiting = _in_background(lambda: instance.complete(max_tokens=200))
    eventually(lambda: instance.num("new") == 1)
    instance.ranks[0].send_signal(signal.SIGSTOP)
    eventually(lambda: _health(instance, "/ready") == 503)
    assert httpx.get(instance.url + "/ready").json() == {"status": "slow"}
    assert _health(instance) == 200  # not ready comes first: no more traffic, no restart yet
    eventually(lambda: _health(instance) == 503)
    assert httpx.get(instance.url + "/ready").json() == {"status": "stalled"}
    instance.ranks[0].send_signal(signal.SIGCONT)
    eventually(lambda: _health(instance, "/ready") == 200)
    assert waiting.result(30).status_code == 200


# ---- the end ----


@pytest.mark.parametrize("how", ["SIGTERM", "SIGINT", "Drain"])
def test_draining_lets_requests_finish(start: Start, how: str) -> None:
    instance = start(stub={"delay_s": 0.02})
    running = [
        _in_background(lambda: instance.complete(max_tokens=60)),
        _in_background(
            lambda: instance.post("/v1/completions", prompt=[9], max_tokens=60, stream=True)
        ),
    ]
    eventually(lambda: instance.num("new") == 2)
    if how == "Drain":
        instance.tell(messages.Drain(20.0))
    else:
        os.kill(instance.http.pid, signal.Signals[how])
    eventually(lambda: _health(instance, "/ready") == 503)
    assert _health(instance) == 200
    refused = instance.complete()
    check_error(refused, 503)
    assert "retry-after" in refused.headers
    assert running[0].result(20).json()["usage"]["completion_tokens"] == 60
    assert parse_events(running[1].result(20).text)[-1]["choices"][0]["finish_reason"] == "length"
    assert instance.http.wait(20) == 0


@pytest.mark.parametrize("twice", [False, True])
def test_what_does_not_finish_in_time_is_aborted(start: Start, twice: bool) -> None:
    timeout = 30.0 if twice else 0.3
    instance = start(stub={"delay_s": 0.05}, shutdown_timeout=timeout)
    whole = _in_background(lambda: instance.complete(max_tokens=900))
    stream = _in_background(
        lambda: instance.post("/v1/chat/completions", max_tokens=900, stream=True, **CHAT)
    )
    eventually(lambda: instance.num("new") == 2)
    time.sleep(0.2)
    os.kill(instance.http.pid, signal.SIGTERM)
    if twice:
        time.sleep(0.2)
        os.kill(instance.http.pid, signal.SIGTERM)
    assert whole.result(10).json()["choices"][0]["finish_reason"] == "abort"
    last = parse_events(stream.result(10).text)[-1]
    assert last["choices"][0]["finish_reason"] == "abort"
    eventually(lambda: instance.num("abort") == 2)
    assert instance.http.wait(20) == 0


def test_an_idle_process_leaves_at_once(start: Start) -> None:
    instance = start()
    with instance.client() as client:
        client.get("/health")  # an idle keep-alive connection holds nothing up
        before = time.monotonic()
        os.kill(instance.http.pid, signal.SIGTERM)
        assert instance.http.wait(10) == 0
        assert time.monotonic() - before < 3


def test_an_idle_process_uses_no_cpu(server: Instance) -> None:
    process = psutil.Process(server.http.pid)
    before = sum(process.cpu_times()[:2])
    time.sleep(1.5)
    assert sum(process.cpu_times()[:2]) - before < 0.1
