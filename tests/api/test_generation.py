"""Completions through OpenAI's own client, and the shape of what it reads."""

from __future__ import annotations

import concurrent.futures
from typing import Any

import openai
import pytest

from benchmarks.stub_rank import expected_tokens
from moeserve.api.tokenizer import Tokenizer

from .conftest import Instance, parse_events

PROMPT = [100, 101, 102]


@pytest.fixture(scope="module")
def client(server: Instance) -> openai.OpenAI:
    return openai.OpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0)


def _text(tokenizer: Tokenizer, prompt: list[int], count: int, seed: int | None = None) -> str:
    return tokenizer.decode(expected_tokens(prompt, seed, count, 4096))


def _script(tokenizer: Tokenizer, data: bytes | str) -> list[int]:
    """A prompt after which the stub emits exactly these bytes, one token each."""
    single = {tokenizer.token_bytes(i): i for i in range(3, 300)}
    raw = data.encode() if isinstance(data, str) else data
    return [5, *(single[bytes([byte])] for byte in raw)]


# ---- completions ----


def test_completion(client: openai.OpenAI, tokenizer: Tokenizer) -> None:
    result = client.completions.create(model="embedded", prompt="Once upon", max_tokens=7)
    prompt = tokenizer.encode("Once upon")
    assert result.id.startswith("cmpl-")
    assert (result.object, result.model) == ("text_completion", "embedded")
    [choice] = result.choices
    assert choice.text == _text(tokenizer, prompt, 7)
    assert (choice.index, choice.finish_reason, choice.logprobs) == (0, "length", None)
    assert result.usage is not None
    assert result.usage.prompt_tokens == len(prompt)
    assert result.usage.completion_tokens == 7
    assert result.usage.total_tokens == len(prompt) + 7
    assert result.usage.prompt_tokens_details is not None
    assert result.usage.prompt_tokens_details.cached_tokens == 0


def test_default_max_tokens(server: Instance) -> None:
    completion = server.post("/v1/completions", prompt=PROMPT).json()
    assert completion["usage"]["completion_tokens"] == 16
    chat = server.post("/v1/chat/completions", messages=[{"role": "user", "content": "x"}]).json()
    assert chat["usage"]["total_tokens"] == 1024


def test_stream_equals_whole(client: openai.OpenAI, tokenizer: Tokenizer) -> None:
    chunks = list(
        client.completions.create(model="embedded", prompt=PROMPT, max_tokens=9, stream=True)
    )
    assert "".join(c.choices[0].text for c in chunks) == _text(tokenizer, PROMPT, 9)
    assert [c.choices[0].finish_reason for c in chunks] == [None] * (len(chunks) - 1) + ["length"]
    assert len({c.id for c in chunks}) == 1
    assert all(c.usage is None for c in chunks)


@pytest.mark.parametrize(
    "prompt",
    ["a b", ["a b", "c"], PROMPT, [PROMPT, [7, 8]], ["x"] * 64],
    ids=["text", "texts", "ids", "lists of ids", "64"],
)
def test_prompt_forms_and_indices(server: Instance, tokenizer: Tokenizer, prompt: Any) -> None:
    batch = [prompt] if isinstance(prompt, str) or isinstance(prompt[0], int) else prompt
    ids = [tokenizer.encode(p) if isinstance(p, str) else p for p in batch]
    body = server.complete(prompt=prompt, n=2, seed=5, max_tokens=3).json()
    assert [c["index"] for c in body["choices"]] == list(range(2 * len(ids)))
    for choice in body["choices"]:
        own, sample = divmod(choice["index"], 2)
        assert choice["text"] == _text(tokenizer, ids[own], 3, seed=5 + sample)
    assert body["usage"]["prompt_tokens"] == sum(map(len, ids))
    assert body["usage"]["completion_tokens"] == 6 * len(ids)


def test_n_choices_are_independent_and_end_once(client: openai.OpenAI) -> None:
    whole = client.completions.create(model="embedded", prompt=PROMPT, n=4, seed=1, max_tokens=6)
    texts = [choice.text for choice in whole.choices]
    assert len(set(texts)) == 4
    streamed = ["", "", "", ""]
    ends = [0, 0, 0, 0]
    for chunk in client.completions.create(
        model="embedded", prompt=PROMPT, n=4, seed=1, max_tokens=6, stream=True
    ):
        choice = chunk.choices[0]
        assert ends[choice.index] == 0, "a chunk after the finish"
        streamed[choice.index] += choice.text
        ends[choice.index] += choice.finish_reason is not None
    assert streamed == texts
    assert ends == [1, 1, 1, 1]


def test_seed_is_reproducible(server: Instance) -> None:
    texts = [server.complete(seed=s).json()["choices"][0]["text"] for s in (3, 3, 4, -(2**63))]
    assert texts[0] == texts[1] != texts[2]


def test_same_request_alone_and_among_others(server: Instance, tokenizer: Tokenizer) -> None:
    with concurrent.futures.ThreadPoolExecutor(16) as threads:
        bodies = threads.map(
            lambda i: server.complete(prompt=[100, i % 3], max_tokens=20).json(), range(48)
        )
        for i, body in enumerate(bodies):
            assert body["choices"][0]["text"] == _text(tokenizer, [100, i % 3], 20)


@pytest.mark.parametrize("as_ids", [True, False])
@pytest.mark.parametrize("stream", [True, False])
def test_stop_string_across_tokens(
    server: Instance, tokenizer: Tokenizer, as_ids: bool, stream: bool
) -> None:
    prompt: Any = _script(tokenizer, "abcDEFGHIJxyz")
    if not as_ids:  # a text prompt stops at the same place
        text = _text(tokenizer, tokenizer.encode("tell"), 12)
        stop, prompt, expected = text[5:9], "tell", text[: text.index(text[5:9])]
    else:
        stop, expected = "DEFGHIJ", "abc"
    body = {"prompt": prompt, "stop": [stop, "never"], "max_tokens": 12}
    if stream:
        events = server.events("/v1/completions", **body)
        assert "".join(e["choices"][0]["text"] for e in events) == expected
        end = events[-1]["choices"][0]
    else:
        end = server.complete(**body).json()["choices"][0]
        assert end["text"] == expected
    assert (end["finish_reason"], end["stop_reason"]) == ("stop", stop)


def test_a_stop_string_aborts_the_sequence(server: Instance, tokenizer: Tokenizer) -> None:
    before = server.num("abort")
    server.complete(prompt=_script(tokenizer, "abc" * 100), stop="c", max_tokens=300)
    # The stub may have finished already; what matters is that nothing is left behind.
    assert server.num("abort") - before <= 1


def test_stop_keeps_text_ids_and_logprobs_together(server: Instance, tokenizer: Tokenizer) -> None:
    script = _script(tokenizer, "a🔥bSTOp cSTOPd")
    events = server.events(
        "/v1/completions",
        prompt=script,
        stop="STOP",
        max_tokens=99,
        logprobs=1,
        return_token_ids=True,
    )
    assert events[0]["choices"][0]["prompt_token_ids"] == script
    seen = 0
    for event in events:
        choice = event["choices"][0]
        ids = choice["token_ids"]
        assert choice["text"] == tokenizer.decode(ids)
        if ids:
            logprobs = choice["logprobs"]
            assert "".join(logprobs["tokens"]) == choice["text"]
            assert len(logprobs["token_logprobs"]) == len(ids) == len(logprobs["text_offset"])
            assert logprobs["text_offset"][0] == seen
        seen += len(choice["text"])
    assert "".join(e["choices"][0]["text"] for e in events) == "a🔥bSTOp c"


def test_utf8_is_never_split(server: Instance, tokenizer: Tokenizer) -> None:
    text = "🔥é漢字 👩‍👩‍👧 ok"
    events = server.events("/v1/completions", prompt=_script(tokenizer, text), max_tokens=99)
    pieces = [e["choices"][0]["text"] for e in events]
    assert "".join(pieces) == text
    assert all("\ufffd" not in piece for piece in pieces)
    cut = server.complete(prompt=_script(tokenizer, "é🔥".encode()[:-1]), max_tokens=99).json()
    assert cut["choices"][0]["text"] == "é\ufffd"


def test_eos_and_min_tokens(server: Instance, tokenizer: Tokenizer) -> None:
    script = [5, 300, 2, 301, 302, 2, 303]
    ended = server.complete(prompt=script, max_tokens=9).json()
    assert ended["choices"][0]["text"] == tokenizer.token_text(300)
    assert ended["choices"][0]["finish_reason"] == "stop"
    assert ended["choices"][0]["stop_reason"] is None
    assert ended["usage"]["completion_tokens"] == 2
    later = server.complete(prompt=script, max_tokens=9, min_tokens=4).json()
    assert later["usage"]["completion_tokens"] == 5
    never = server.complete(prompt=script, max_tokens=9, ignore_eos=True).json()
    assert never["choices"][0]["finish_reason"] == "length"
    by_id = server.complete(prompt=script, max_tokens=9, ignore_eos=True, stop_token_ids=[302])
    assert by_id.json()["choices"][0]["stop_reason"] == 302


def test_special_tokens_in_the_text(server: Instance) -> None:
    script = [5, 300, 1, 301]
    hidden = server.complete(prompt=script).json()["choices"][0]["text"]
    shown = server.complete(prompt=script, skip_special_tokens=False).json()["choices"][0]["text"]
    assert "<|im_start|>" in shown
    assert shown.replace("<|im_start|>", "") == hidden


# ---- logprobs and echo ----


def test_completion_logprobs(client: openai.OpenAI, tokenizer: Tokenizer) -> None:
    result = client.completions.create(model="embedded", prompt=PROMPT, max_tokens=4, logprobs=5)
    logprobs = result.choices[0].logprobs
    assert logprobs is not None and logprobs.tokens and logprobs.top_logprobs
    assert "".join(logprobs.tokens) == result.choices[0].text
    assert logprobs.token_logprobs == [-0.5] * 4
    for top in logprobs.top_logprobs:  # the stub's last two are -inf
        assert len(top) == 5
        assert min(top.values()) == -9999.0


def test_lm_eval_loglikelihood_request(server: Instance, tokenizer: Tokenizer) -> None:
    """What lm-eval's local-completions sends."""
    body = {
        "model": "embedded",
        "prompt": [[400, 401, 402, 403]],
        "max_tokens": 1,
        "echo": True,
        "logprobs": 1,
        "temperature": 0,
        "seed": 1234,
    }
    result = server.post("/v1/completions", **body).json()
    [choice] = result["choices"]
    logprobs = choice["logprobs"]
    ids = [400, 401, 402, 403, *expected_tokens([400, 401, 402, 403], 1234, 1, 4096)]
    assert choice["text"] == tokenizer.decode(ids)
    assert logprobs["tokens"] == [tokenizer.token_text(i) for i in ids]
    assert logprobs["token_logprobs"] == [None, -0.5, -0.5, -0.5, -0.5]
    assert logprobs["top_logprobs"][0] is None
    assert logprobs["top_logprobs"][1] == {tokenizer.token_text(401): -0.5}
    for offset, token in zip(logprobs["text_offset"], logprobs["tokens"], strict=True):
        assert choice["text"][offset:].startswith(token)
    assert result["usage"]["completion_tokens"] == 1


def test_lm_eval_keeps_the_last_token_even_if_it_is_eos(server: Instance) -> None:
    body = {"prompt": [[5, 2, 100]], "max_tokens": 1, "echo": True, "logprobs": 1}
    logprobs = server.post("/v1/completions", **body).json()["choices"][0]["logprobs"]
    assert logprobs["tokens"][-1] == "<|im_end|>"
    assert len(logprobs["tokens"]) == 4


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("max_tokens", [0, 3])
def test_echo(server: Instance, tokenizer: Tokenizer, stream: bool, max_tokens: int) -> None:
    body = {"prompt": "Say hi", "echo": True, "max_tokens": max_tokens, "stream": stream}
    response = server.post("/v1/completions", **body)
    choices = (
        [e["choices"][0] for e in parse_events(response.text)]
        if stream
        else response.json()["choices"]
    )
    expected = "Say hi" + _text(tokenizer, tokenizer.encode("Say hi"), max_tokens)
    assert "".join(choice["text"] for choice in choices) == expected
    assert choices[-1]["finish_reason"] == "length"


def test_echo_with_top_k_one_and_many_logprobs(server: Instance) -> None:
    body = server.complete(echo=True, logprobs=5, top_k=1, max_tokens=2)
    assert body.status_code == 200
    assert "Infinity" not in body.text and "NaN" not in body.text
