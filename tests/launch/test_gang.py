"""Ranks that a launcher starts, on loopback: they serve, leave together, keep strangers out."""

from __future__ import annotations

import importlib.util
import os
import pickle
import signal
import socket
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
import zmq
from helpers_jobs import Job, free_port, job, listeners, serve_command, start_ranks
from helpers_server import serving, wait_until

from moeserve import LLM, SamplingParams, messages
from moeserve.engine.channel import Channel
from moeserve.engine.spec import CurveKeys

PROMPT, MAX_TOKENS = "Once upon a time", 24
EXACT = ("--dtype", "float32", "--batch-invariant")
GARBAGE = [
    b"",
    b"\0" * 100,
    b"\xff" * 1000,
    pickle.dumps({"protocol": 1}),
    b'["Hello", 1]',
    b"\x93\xa5Hello\x01" + b"\x91" * 100_000 + b"\xc0",  # nested too deep
    messages.encode(messages.Dead("not for a rank")),
]


def torchrun(*arguments: str) -> list[str]:
    """Two ranks under torchrun."""
    return [
        sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2",
        "--master-port", str(free_port()), "-m", *serve_command(*arguments),
    ]  # fmt: skip


def completion(url: str, max_tokens: int = MAX_TOKENS) -> str:
    """The greedy continuation of the prompt."""
    body = {"prompt": PROMPT, "max_tokens": max_tokens, "temperature": 0, "ignore_eos": True}
    answer = httpx.post(f"{url}/v1/completions", json=body, timeout=30)
    answer.raise_for_status()
    return str(answer.json()["choices"][0]["text"])


def single_process_text() -> str:
    """The same from one rank, without HTTP."""
    params = SamplingParams(temperature=0, max_tokens=MAX_TOKENS, ignore_eos=True)
    with LLM("embedded", dtype="float32", batch_invariant=True, num_blocks=64) as llm:
        return llm.generate([PROMPT], params, use_tqdm=False)[0].outputs[0].text


@pytest.fixture(scope="module")
def two_ranks() -> Iterator[Job]:
    """Two ranks that serve, for tests that do them no harm."""
    with job() as running:
        start_ranks(running, 2, *EXACT)
        running.url  # noqa: B018  # waits
        yield running


@pytest.mark.slow
def test_torchrun_serves_the_text_of_a_single_process_and_sigterm_ends_it() -> None:
    with job() as running:
        running.start(torchrun(*EXACT))
        assert completion(running.url) == single_process_text()
        running.starters[0].terminate()
        running.wait()
        assert "the ranks leave" in running.text and "the job ends" not in running.text


@pytest.mark.slow
def test_torchrun_ends_when_a_rank_is_killed() -> None:
    with job() as running:
        running.start(torchrun())
        completion(running.url)
        running.rank(1).kill()
        [code] = running.wait()
        assert code != 0


@pytest.mark.slow
@pytest.mark.skipif(
    importlib.util.find_spec("deepspeed") is None, reason="deepspeed can not be imported"
)
def test_the_deepspeed_launcher_serves_the_same_text() -> None:
    with job() as running:
        running.start([
            str(Path(sys.executable).parent / "deepspeed"), "--num_accelerators", "2",
            "--master_port", str(free_port()), "--no_local_rank", "--module",
            *serve_command(*EXACT),
        ])  # fmt: skip
        assert completion(running.url) == single_process_text()
        running.stop()
        running.wait()
        assert "the ranks leave" in running.text and "the job ends" not in running.text


def test_the_address_is_printed_when_all_ranks_serve(two_ranks: Job) -> None:
    state = httpx.get(f"{two_ranks.url}/ready")
    assert state.status_code == 200
    assert two_ranks.text.count("Serving on") == 1
    assert "takes no messages" not in two_ranks.text


def test_all_listeners_are_on_loopback(two_ranks: Job) -> None:
    found = listeners(two_ranks.alive())
    assert found and {address for address, _ in found} == {"127.0.0.1"}


def test_strangers_get_no_answer_and_do_no_harm(two_ranks: Job) -> None:
    """To every port of every rank: without keys, and with keys of their own."""
    own_public, own_secret = zmq.curve_keypair()
    server_public, _ = zmq.curve_keypair()
    context = zmq.Context()
    strangers = []
    for address, port in listeners([two_ranks.rank(0), two_ranks.rank(1)]):
        for has_keys in (False, True):
            stranger = context.socket(zmq.DEALER)
            if has_keys:
                stranger.curve_serverkey = server_public
                stranger.curve_publickey, stranger.curve_secretkey = own_public, own_secret
            stranger.connect(f"tcp://{address}:{port}")
            stranger.send(messages.encode(messages.Hello()))
            stranger.send(messages.encode(messages.Shutdown()))
            strangers.append(stranger)
    time.sleep(2)
    answers = [stranger.poll(0) for stranger in strangers]
    context.destroy(linger=0)
    assert len(answers) >= 4 and not any(answers)
    assert completion(two_ranks.url)


@pytest.mark.parametrize("keys", ["the job's", "none", "others", "others for the job's server"])
def test_only_the_jobs_keys_open_a_mailbox(keys: str) -> None:
    public, secret = (text.decode() for text in zmq.curve_keypair())
    channel = Channel("tcp://127.0.0.1:*", CurveKeys(public, secret))
    context = zmq.Context()
    socket_ = context.socket(zmq.DEALER)
    if keys != "none":
        others = zmq.curve_keypair()
        own = (public.encode(), secret.encode()) if keys == "the job's" else others
        socket_.curve_serverkey = public.encode() if "job's" in keys else others[0]
        socket_.curve_publickey, socket_.curve_secretkey = own
    socket_.connect(channel.endpoint)
    socket_.send(messages.encode(messages.Shutdown()))
    mail = channel.wait(3.0 if keys == "the job's" else 1.0)
    assert [item.message for item in mail] == [messages.Shutdown()] * (keys == "the job's")
    assert channel.num_bad_frames == 0
    context.destroy(linger=0)
    channel.close()


def test_garbage_is_dropped_and_counted() -> None:
    channel = Channel("tcp://127.0.0.1:*")
    context = zmq.Context()
    socket_ = context.socket(zmq.DEALER)
    socket_.connect(channel.endpoint)
    for frame in GARBAGE:
        socket_.send(frame)
    socket_.send_multipart([b"a", b"b", messages.encode(messages.Abort([])), b"c"])
    socket_.send(messages.encode(messages.Shutdown()))
    mail = channel.wait(5.0)
    while not mail:
        mail = channel.wait(5.0)
    assert [item.message for item in mail] == [messages.Shutdown()]
    assert channel.num_bad_frames == len(GARBAGE) + 1
    context.destroy(linger=0)
    channel.close()


def test_garbage_at_the_sockets_of_a_server_does_no_harm() -> None:
    with serving("--ep", "2") as server:
        endpoints = {
            connection.laddr
            for number in (0, 1)
            for connection in server.member(f"rank {number}").net_connections(kind="unix")
            if str(connection.laddr).endswith(f"/rank{number}")
        }
        assert len(endpoints) == 2
        context = zmq.Context()
        for endpoint in endpoints:
            assert Path(endpoint).parent.stat().st_mode & 0o077 == 0
            socket_ = context.socket(zmq.DEALER)
            socket_.connect(f"ipc://{endpoint}")
            for frame in GARBAGE:
                socket_.send(frame)
        wait_until(lambda: "".join(server.log).count("dropped a frame") == 2 * len(GARBAGE), 20)
        context.destroy(linger=0)
        assert completion(server.url)


@pytest.mark.parametrize("who", ["rank 0", "rank 1", "http"])
def test_a_death_while_idle_ends_the_job(who: str) -> None:
    """No launcher here that would end the rest: the ranks notice by themselves."""
    with job() as running:
        start_ranks(running, 2)
        completion(running.url, max_tokens=1)
        victim = {
            "rank 0": lambda: running.rank(0),
            "rank 1": lambda: running.rank(1),
            "http": running.http,
        }[who]()
        victim.kill()
        codes = running.wait(20)
        assert 0 not in codes, running.text
        if who == "rank 1":
            assert "rank 1 (tcp://127.0.0.1:" in running.text and "is gone" in running.text
        if who == "http":
            assert "http 0: died (killed by SIGKILL); the job ends" in running.text


def test_sigterm_lets_requests_finish_and_exits_with_zero() -> None:
    body = {"prompt": PROMPT, "max_tokens": 200, "stream": True, "ignore_eos": True}
    with job() as running:
        start_ranks(running, 2)
        with httpx.stream("POST", f"{running.url}/v1/completions", json=body, timeout=40) as answer:
            lines = answer.iter_lines()
            next(lines)
            running.stop()
            # A launcher may send it to the HTTP process too.
            running.http().send_signal(signal.SIGTERM)
            events = [line for line in lines if line]
        assert events[-1] == "data: [DONE]"
        assert '"finish_reason":"length"' in events[-2].replace(": ", ":")
        assert running.wait() == [0, 0], running.text


def refused(num_ranks: int, *arguments: str) -> str:
    """What a job says that can not start."""
    with job() as running:
        start_ranks(running, num_ranks, *arguments)
        codes = running.wait(60)
        assert 0 not in codes
        assert "Traceback" not in running.text
        return running.text


def test_a_port_in_use_is_reported_by_rank_0() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        text = refused(2, "--port", port)
    assert f"[rank 0] moeserve.launch.gang: --host 127.0.0.1 --port {port}: Address already" in text


def test_a_wrong_number_of_ranks_is_refused_by_name() -> None:
    assert "ep = 3: the launcher started 2 processes" in refused(2, "--ep", "3")


def test_a_wrong_interface_is_refused_by_name() -> None:
    text = refused(2, "--interface", "no-such0")
    assert "interface = 'no-such0'" in text and "lo (127.0.0.1)" in text


def test_a_wrong_interface_is_refused_without_a_launcher_too() -> None:
    with serving("--ep", "2", "--interface", "no-such0", wait=False) as server:
        assert server.wait(60) == 1
    text = "".join(server.log)
    assert "interface = 'no-such0'" in text and "Traceback" not in text


def test_settings_that_differ_between_ranks_are_refused_by_name() -> None:
    with job() as running:
        port = str(free_port())
        for rank, dtype in enumerate(("float32", "bfloat16")):
            running.start(
                [sys.executable, "-m", *serve_command("--dtype", dtype)],
                {"RANK": str(rank), "WORLD_SIZE": "2",
                 "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port},
            )  # fmt: skip
        assert 0 not in running.wait(60)
    assert "dtype = bfloat16 on rank 1: must be as on rank 0, float32" in running.text


def test_two_jobs_do_not_meet_at_one_port() -> None:
    """As with the deepspeed launcher, whose port is the same for every job unless given."""
    with job() as running:
        port = str(free_port())
        place = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        command = [sys.executable, "-m", *serve_command()]
        running.start(command, place)
        assert completion(running.url, max_tokens=1)
        running.start(command, place)
        assert running.starters[1].wait(60) == 1
        assert f"MASTER_PORT = {port}: another job meets there" in running.text
        assert completion(running.url, max_tokens=1)
        os.kill(running.starters[0].pid, signal.SIGTERM)
        assert running.wait() == [0, 1]
