"""Unchanged clients from PyPI: what they send is understood, what they get is right.

The reference for numbers is transformers on the same checkpoint, both in float32.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
import torch
import transformers
from helpers_server import Server, serving

from moeserve import config

KEY = "a-key-of-this-test"
PROMPT = "Once upon a time"
MESSAGES = [{"role": "user", "content": "Tell me a story about a fox."}]
GREEDY: dict[str, Any] = {"model": "embedded", "temperature": 0, "max_tokens": 24}
SAMPLED: dict[str, Any] = {"model": "embedded", "temperature": 1, "max_tokens": 24, "seed": 7}
SAMPLE = Path(__file__).parent.parent / "data" / "embedded_sample.json"
TOLERANCE = 1e-3  # of a log-probability: float32 sums in another order move it by 1e-5


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    """Two ranks in float32, closed to everybody without the key."""
    with serving("--ep", "2", "--dtype", "float32", "--api-key", KEY) as running:
        yield running


@pytest.fixture
def ai(server: Server) -> Iterator[Any]:
    """The openai client; ``Any``: its overloads know no plain dictionaries of arguments."""
    with openai.OpenAI(base_url=server.url + "/v1", api_key=KEY, max_retries=0) as client:
        yield client


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    """The embedded model's tokenizer, as transformers reads it."""
    return transformers.AutoTokenizer.from_pretrained(config.embedded_model_path())


class Scorer:
    """transformers' log-probabilities of every token but the first."""

    def __init__(self) -> None:
        torch.set_num_threads(1)
        self._model = transformers.AutoModelForCausalLM.from_pretrained(
            config.embedded_model_path(), dtype=torch.float32
        ).eval()

    def __call__(self, token_ids: list[int]) -> tuple[list[float], list[float]]:
        """The log-probability of each token, and of the likeliest token in its place."""
        with torch.inference_mode():
            logits = self._model(torch.tensor([token_ids])).logits[0, :-1]
        logprobs = logits.float().log_softmax(-1)
        own = logprobs.gather(-1, torch.tensor(token_ids[1:])[:, None])[:, 0]
        return own.tolist(), logprobs.amax(-1).tolist()


@pytest.fixture(scope="module")
def score() -> Scorer:
    """The reference."""
    return Scorer()


def near(values: list[float]) -> Any:
    """Equal up to the order of float32 sums."""
    return pytest.approx(values, abs=TOLERANCE, rel=0)


# ---- openai: completions ----


def test_models_are_listed_and_found(ai: Any) -> None:
    assert [model.id for model in ai.models.list()] == ["embedded"]
    assert ai.models.retrieve("embedded").object == "model"
    with pytest.raises(openai.NotFoundError):
        ai.models.retrieve("gpt-4")


def test_every_form_of_prompt_gives_the_same_text(ai: Any, tokenizer: Any) -> None:
    token_ids = tokenizer.encode(PROMPT)
    alone = ai.completions.create(prompt=PROMPT, **GREEDY)
    text = alone.choices[0].text
    assert text and alone.usage.prompt_tokens == len(token_ids)
    for prompt in ([PROMPT], token_ids, [token_ids]):
        assert ai.completions.create(prompt=prompt, **GREEDY).choices[0].text == text
    other = ai.completions.create(prompt="The old man", **GREEDY).choices[0].text
    several = ai.completions.create(prompt=[PROMPT, "The old man", PROMPT], **GREEDY)
    assert [choice.index for choice in several.choices] == [0, 1, 2]
    assert [choice.text for choice in several.choices] == [text, other, text]
    assert several.usage.completion_tokens == 3 * GREEDY["max_tokens"]


def test_a_stream_of_several_choices_equals_the_whole(ai: Any) -> None:
    request = {**SAMPLED, "prompt": [PROMPT, "The old man"], "n": 2}
    whole = ai.completions.create(**request)
    texts = [""] * 4
    ends: list[Any] = [None] * 4
    for chunk in ai.completions.create(**request, stream=True):
        for choice in chunk.choices:
            texts[choice.index] += choice.text
            ends[choice.index] = ends[choice.index] or choice.finish_reason
    assert texts == [choice.text for choice in whole.choices]
    assert ends == [choice.finish_reason for choice in whole.choices]
    assert len(set(texts)) == 4


def test_a_seed_is_reproducible_and_another_differs(ai: Any) -> None:
    def text(seed: int) -> Any:
        return ai.completions.create(prompt=PROMPT, **{**SAMPLED, "seed": seed}).choices[0].text

    assert text(1) == text(1) != text(2)


def test_completion_logprobs_are_those_of_transformers(
    ai: Any, tokenizer: Any, score: Scorer
) -> None:
    answer = ai.completions.create(
        prompt=PROMPT, logprobs=3, extra_body={"return_token_ids": True}, **GREEDY
    )
    [choice] = answer.choices
    prompt = tokenizer.encode(PROMPT)
    own, best = score([*prompt, *choice.token_ids])
    assert choice.logprobs.token_logprobs == near(own[len(prompt) - 1 :])
    assert choice.logprobs.token_logprobs == near(best[len(prompt) - 1 :])  # greedy
    assert "".join(choice.logprobs.tokens) == choice.text
    assert all(len(top) == 3 for top in choice.logprobs.top_logprobs)
    for offset, token in zip(choice.logprobs.text_offset, choice.logprobs.tokens, strict=True):
        assert choice.text[offset:].startswith(token)


@pytest.mark.parametrize("stream", [False, True])
def test_stop_across_tokens(ai: Any, stream: bool) -> None:
    whole = ai.completions.create(prompt=PROMPT, logprobs=0, **GREEDY).choices[0]
    fifth, sixth = whole.logprobs.tokens[5:7]
    stop = fifth[-2:] + sixth[:2]  # no token holds it
    cut = whole.text.index(stop)
    answer = ai.completions.create(prompt=PROMPT, stop=["never", stop], stream=stream, **GREEDY)
    choices = [chunk.choices[0] for chunk in answer] if stream else answer.choices
    assert "".join(choice.text for choice in choices) == whole.text[:cut]
    assert choices[-1].finish_reason == "stop"
    assert choices[-1].stop_reason == stop


# ---- openai: chat ----


def test_chat_stream_equals_the_whole(ai: Any) -> None:
    whole = ai.chat.completions.create(messages=MESSAGES, n=2, **SAMPLED)
    texts = ["", ""]
    for chunk in ai.chat.completions.create(messages=MESSAGES, n=2, stream=True, **SAMPLED):
        for choice in chunk.choices:
            texts[choice.index] += choice.delta.content or ""
    assert texts == [choice.message.content for choice in whole.choices]
    assert texts[0] != texts[1]


def test_chat_logprobs_are_those_of_transformers(ai: Any, tokenizer: Any, score: Scorer) -> None:
    answer = ai.chat.completions.create(
        messages=MESSAGES, logprobs=True, top_logprobs=2,
        extra_body={"return_token_ids": True}, **GREEDY,
    )  # fmt: skip
    [choice] = answer.choices
    prompt = tokenizer.apply_chat_template(MESSAGES, add_generation_prompt=True)["input_ids"]
    content = choice.logprobs.content
    own, _ = score([*prompt, *choice.token_ids])
    assert [token.logprob for token in content] == near(own[len(prompt) - 1 :])
    for token in content:
        first, second = token.top_logprobs
        assert first.token == token.token and first.logprob == token.logprob >= second.logprob
    spelled = b"".join(bytes(token.bytes) for token in content)
    assert spelled.decode() == choice.message.content


def test_the_stream_helper_of_chat(ai: Any) -> None:
    text = ai.chat.completions.create(messages=MESSAGES, **GREEDY).choices[0].message.content
    request = {
        **GREEDY, "messages": MESSAGES, "logprobs": True, "top_logprobs": 1, "stop": text[30:34],
    }  # fmt: skip
    answer = ai.chat.completions.create(**request)
    [whole] = answer.choices
    with ai.chat.completions.stream(**request, stream_options={"include_usage": True}) as stream:
        events = list(stream)
        final = stream.get_final_completion()
    [choice] = final.choices
    assert whole.message.content == text[: text.index(text[30:34])]
    assert "".join(e.delta for e in events if e.type == "content.delta") == whole.message.content
    assert (choice.message.content, choice.message.role) == (whole.message.content, "assistant")
    assert choice.finish_reason == whole.finish_reason == "stop"
    streamed, at_once = choice.logprobs.content, whole.logprobs.content
    assert [token.token for token in streamed] == [token.token for token in at_once]
    assert [t.logprob for t in streamed] == near([t.logprob for t in at_once])
    assert final.usage.completion_tokens == answer.usage.completion_tokens
    assert {"content.delta", "content.done", "logprobs.content.delta"} <= {e.type for e in events}


def test_the_stream_helper_tells_of_a_text_cut_at_max_tokens(ai: Any) -> None:
    """The helper's own rule: a text that ended by length is an error with the text in it."""
    with ai.chat.completions.stream(messages=MESSAGES, **GREEDY) as stream:
        text = "".join(event.delta for event in stream if event.type == "content.delta")
        with pytest.raises(openai.LengthFinishReasonError) as caught:
            stream.get_final_completion()
    assert caught.value.completion.choices[0].message.content == text


# ---- openai: answers around the text ----


def test_raw_responses_show_headers(ai: Any) -> None:
    raw = ai.chat.completions.with_raw_response.create(
        messages=MESSAGES, extra_headers={"x-request-id": "mine-1"}, **GREEDY
    )
    assert raw.status_code == 200
    assert raw.headers["content-type"] == "application/json"
    assert raw.headers["x-request-id"] == raw.request_id == "mine-1"
    assert raw.parse().choices[0].message.content
    with ai.completions.with_streaming_response.create(
        prompt=PROMPT, stream=True, **GREEDY
    ) as streamed:
        assert streamed.headers["content-type"].startswith("text/event-stream")
        assert list(streamed.iter_lines())[-2:] == ["data: [DONE]", ""]


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"max_tokens": 0}, "max_tokens"),
        ({"temperature": -1}, "temperature"),
        ({"messages": []}, "messages"),
        ({"tools": [{"type": "function", "function": {"name": "f"}}]}, "tools"),
        ({"response_format": {"type": "json_object"}}, "response_format"),
    ],
)
def test_a_bad_request_names_its_field(ai: Any, fields: dict[str, Any], param: str) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        ai.chat.completions.create(**{**GREEDY, "messages": MESSAGES, **fields})
    assert caught.value.param == param
    assert param in caught.value.message
    assert caught.value.status_code == 400 and caught.value.request_id


def test_what_is_not_there_is_not_found(ai: Any) -> None:
    with pytest.raises(openai.NotFoundError) as caught:
        ai.completions.create(**{**GREEDY, "model": "gpt-4"}, prompt=PROMPT)
    assert "gpt-4" in caught.value.message
    for routes in (ai.responses, ai.embeddings):
        with pytest.raises(openai.NotFoundError) as caught:  # 5xx would be tried again
            routes.create(model="embedded", input=PROMPT)
        assert "not implemented here" in caught.value.message


def test_a_wrong_key_is_an_authentication_error(server: Server) -> None:
    with openai.OpenAI(base_url=server.url + "/v1", api_key="wrong", max_retries=0) as client:
        with pytest.raises(openai.AuthenticationError):
            client.models.list()
        with pytest.raises(openai.AuthenticationError):
            client.completions.create(model="embedded", prompt=PROMPT)


def test_many_at_once_with_the_asynchronous_client(server: Server, ai: Any) -> None:
    alone = ai.completions.create(prompt=PROMPT, **SAMPLED).choices[0].text

    async def run() -> list[str]:
        async with openai.AsyncOpenAI(base_url=server.url + "/v1", api_key=KEY) as client:
            create: Any = client.completions.create
            answers = await asyncio.gather(*(create(prompt=PROMPT, **SAMPLED) for _ in range(8)))
            return [answer.choices[0].text for answer in answers]

    assert asyncio.run(run()) == [alone] * 8


# ---- lm-eval ----


def lm_eval_request(prompts: list[list[int]]) -> dict[str, Any]:
    """The body that ``local-completions`` of lm-eval 0.4 sends to score ``prompts``."""
    return {
        "model": "embedded", "prompt": prompts, "temperature": 0, "max_tokens": 1,
        "logprobs": 1, "seed": 1234, "echo": True,
    }  # fmt: skip


def windows() -> list[list[int]]:
    """Held-out text as token ids, in several lengths; two that share a beginning."""
    domains = json.loads(SAMPLE.read_text())["domains"]
    texts = [window for domain in domains.values() for window in domain["windows"]]
    lengths = (2, 3, 17, 50, 64, 100)
    cut = [text[: lengths[i % len(lengths)]] for i, text in enumerate(texts[:11])]
    return [*cut, [*texts[5][:40], 77, 78]]


def test_lm_eval_scores_like_transformers(server: Server, score: Scorer) -> None:
    prompts = windows()
    headers = {"Authorization": f"Bearer {KEY}"}
    for _ in range(2):  # the second time, prefixes are in the cache
        answer = httpx.post(
            f"{server.url}/v1/completions", json=lm_eval_request(prompts), headers=headers,
            timeout=60,
        ).raise_for_status()  # fmt: skip
        choices = answer.json()["choices"]
        assert [choice["index"] for choice in choices] == list(range(len(prompts)))
        for prompt, choice in zip(prompts, choices, strict=True):
            own, best = score(prompt)
            logprobs = choice["logprobs"]
            assert logprobs["token_logprobs"][0] is None
            assert logprobs["token_logprobs"][1:-1] == near(own)
            # lm-eval calls a text greedy if each token's number is exactly the best of its top.
            tops = [max(top.values()) for top in logprobs["top_logprobs"][1:-1]]
            assert tops == near(best)
            is_best = [a == b for a, b in zip(logprobs["token_logprobs"][1:-1], tops, strict=True)]
            assert is_best == [a == b for a, b in zip(own, best, strict=True)]
