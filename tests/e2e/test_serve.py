"""The whole server, as a user starts it: two ranks, the embedded model, real clients."""

from __future__ import annotations

import json
import random
import re
import time
from concurrent.futures import ThreadPoolExecutor

import httpx
import openai
import pytest
from helpers_server import Server, wait_until


@pytest.fixture
def ai(server: Server) -> openai.OpenAI:
    return openai.OpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0)


def test_start_up_is_explained(server: Server) -> None:
    text = "".join(server.log)
    for words in ("load weights", "meet the other ranks", "KV cache", "curl http://", "rank 1"):
        assert words in text


def test_chat_answers_in_language(ai: openai.OpenAI) -> None:
    answer = ai.chat.completions.create(
        model="embedded",
        messages=[{"role": "user", "content": "Tell me a story about a fox."}],
        temperature=0,
        max_tokens=60,
    )
    text = answer.choices[0].message.content
    assert text and "fox" in text
    assert answer.usage and answer.usage.completion_tokens == 60
    assert answer.choices[0].finish_reason == "length"


def test_stream_equals_the_whole(ai: openai.OpenAI) -> None:
    request = {"model": "embedded", "prompt": "Once upon a time", "max_tokens": 40, "seed": 5}
    whole = ai.completions.create(**request)  # type: ignore[call-overload]
    chunks = list(
        ai.completions.create(**request, stream=True, stream_options={"include_usage": True})  # type: ignore[call-overload]
    )
    text = "".join(choice.text for chunk in chunks for choice in chunk.choices)
    assert text == whole.choices[0].text
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens


def test_echo_with_logprobs_scores_a_prompt_the_same_twice(ai: openai.OpenAI) -> None:
    request = {
        "model": "embedded", "prompt": [[70, 300, 41, 900, 77, 12]], "max_tokens": 1,
        "echo": True, "logprobs": 1, "temperature": 0, "seed": 1234,
    }  # fmt: skip
    first, second = (ai.completions.create(**request) for _ in range(2))  # type: ignore[call-overload]
    numbers = first.choices[0].logprobs.token_logprobs
    assert len(numbers) == 7 and numbers[0] is None
    assert all(-50 < number <= 0 for number in numbers[1:])
    assert second.choices[0].logprobs.token_logprobs == pytest.approx(
        numbers, abs=1e-3, nan_ok=True
    )


def test_second_request_finds_its_prefix(client: httpx.Client) -> None:
    body = {"prompt": [9] * 200, "max_tokens": 1}
    client.post("/v1/completions", json=body).raise_for_status()
    usage = client.post("/v1/completions", json=body).json()["usage"]
    assert usage["prompt_tokens_details"]["cached_tokens"] >= 176


def test_load_is_exact(client: httpx.Client) -> None:
    def load() -> int:
        return sum(sum(c) for c in client.get("/experts/load").json()["layers"].values())

    before = load()
    body = {"prompt": [random.randrange(3, 4000) for _ in range(50)], "max_tokens": 10,
            "ignore_eos": True}  # fmt: skip
    client.post("/v1/completions", json=body).raise_for_status()
    assert load() - before == (50 + 9) * 2 * 8  # tokens x top_k x layers


def test_placement_shows_every_expert(client: httpx.Client) -> None:
    placement = client.get("/experts/placement").json()
    for ranks in placement["layers"].values():
        assert sorted(expert for rank in ranks for expert in rank) == list(range(16))


def test_metrics_and_health(client: httpx.Client) -> None:
    client.post("/v1/completions", json={"prompt": "x", "max_tokens": 2}).raise_for_status()
    assert client.get("/health").status_code == 200
    assert client.get("/ready").status_code == 200
    text = client.get("/metrics").text
    for name in ("num_requests_running", "kv_cache_usage_perc", "time_to_first_token_seconds",
                 "moe_rank_tokens"):  # fmt: skip
        assert f"moeserve:{name}" in text


def test_a_request_too_long_for_the_model_is_refused_with_numbers(client: httpx.Client) -> None:
    answer = client.post("/v1/completions", json={"prompt": [5] * 2000, "max_tokens": 1})
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert error["code"] == "context_length_exceeded" and "1024" in error["message"]


def test_idle_ranks_use_no_cpu(server: Server, client: httpx.Client) -> None:
    client.post("/v1/completions", json={"prompt": "x", "max_tokens": 4}).raise_for_status()
    time.sleep(0.5)
    ranks = [server.member(f"rank {rank}") for rank in range(2)]
    before = [sum(p.cpu_times()[:2]) for p in ranks]
    time.sleep(2)
    after = [sum(p.cpu_times()[:2]) for p in ranks]
    assert max(b - a for a, b in zip(before, after, strict=True)) < 0.06  # 3 % of a core


def test_only_the_api_port_is_open_to_others_than_loopback(server: Server) -> None:
    for process in server.family():
        for connection in process.net_connections("inet"):
            assert connection.laddr.ip in ("127.0.0.1", "::1")


def test_many_mixed_requests_with_aborts_leave_no_block_in_use(
    server: Server, client: httpx.Client
) -> None:
    rng = random.Random(1)

    def one(_: int) -> None:
        body = {
            "prompt": [rng.randrange(3, 4000) for _ in range(rng.randrange(1, 120))],
            "max_tokens": rng.randrange(1, 40),
            "temperature": rng.choice((0, 1)),
            "n": rng.choice((1, 1, 2)),
            "stream": rng.random() < 0.7,
        }
        with httpx.Client(base_url=server.url, timeout=60) as http:
            try:
                with http.stream("POST", "/v1/completions", json=body) as answer:
                    for index, _ in enumerate(answer.iter_lines()):
                        if rng.random() < 0.05 and index:
                            return  # closes the connection in the middle
            except httpx.HTTPError:
                pass

    with ThreadPoolExecutor(16) as pool:
        list(pool.map(one, range(150)))

    def usage() -> list[float]:
        found = re.findall(r"moeserve:kv_cache_usage_perc\{.*\} (\S+)", client.get("/metrics").text)
        return [float(value) for value in found]

    wait_until(lambda: usage() == [0.0, 0.0], 20)


def test_stream_has_the_documented_shape(client: httpx.Client) -> None:
    body = {
        "messages": [{"role": "user", "content": "Hello"}], "stream": True, "max_tokens": 8,
        "stream_options": {"include_usage": True},
    }  # fmt: skip
    with client.stream("POST", "/v1/chat/completions", json=body) as answer:
        lines = [line for line in answer.iter_lines() if line]
    assert lines[-1] == "data: [DONE]"
    chunks = [json.loads(line.removeprefix("data: ")) for line in lines[:-1]]
    assert chunks[0]["choices"][0]["delta"]["role"] == "assistant"
    assert chunks[-1]["choices"] == [] and chunks[-1]["usage"]["completion_tokens"] <= 8
    assert [c["choices"][0]["finish_reason"] for c in chunks[:-1]].count(None) == len(chunks) - 2


def test_titles_name_the_processes(server: Server) -> None:
    titles = {p.pid: " ".join(p.cmdline()) for p in server.family()}
    assert any("moeserve rank 0" in title for title in titles.values())
