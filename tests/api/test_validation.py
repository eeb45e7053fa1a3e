"""Requests that can not be served: a 4xx in OpenAI's shape that names the field, never a 500."""

from __future__ import annotations

import re
from typing import Any

import httpx
import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from moeserve.api.openai import ChatRequest, CompletionRequest

from .conftest import Instance

JSON = {"content-type": "application/json"}
CHAT = [{"role": "user", "content": "Hi"}]


def check_error(
    response: httpx.Response, status: int = 400, param: str | None = None
) -> dict[str, Any]:
    assert response.status_code == status, response.text
    error: dict[str, Any] = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert 0 < len(error["message"]) < 4000
    assert not re.search(r"/work|/tmp|/usr|site-packages|Traceback|\.py", response.text)
    if param is not None:
        assert error["param"] == param, error
        assert param.partition(".")[0] in error["message"]
    return error


BAD_FIELDS: list[tuple[dict[str, Any], str]] = [
    ({"temperature": -1}, "temperature"),
    ({"temperature": 101}, "temperature"),
    ({"temperature": "hot"}, "temperature"),
    ({"temperature": True}, "temperature"),
    ({"top_p": 1.1}, "top_p"),
    ({"top_p": -0.1}, "top_p"),
    ({"top_k": -5}, "top_k"),
    ({"top_k": 1.5}, "top_k"),
    ({"min_p": 2}, "min_p"),
    ({"presence_penalty": 1e30}, "presence_penalty"),
    ({"frequency_penalty": -2.1}, "frequency_penalty"),
    ({"repetition_penalty": 0}, "repetition_penalty"),
    ({"seed": 2**63}, "seed"),
    ({"seed": 2**70}, "seed"),
    ({"seed": 1.5}, "seed"),
    ({"n": 0}, "n"),
    ({"n": 65}, "n"),
    ({"n": 10**9}, "n"),
    ({"n": True}, "n"),
    ({"max_tokens": -1}, "max_tokens"),
    ({"max_tokens": 0}, "max_tokens"),
    ({"max_tokens": 2.5}, "max_tokens"),
    ({"max_tokens": True}, "max_tokens"),
    ({"max_tokens": "5"}, "max_tokens"),
    ({"min_tokens": -1}, "min_tokens"),
    ({"min_tokens": 5, "max_tokens": 4}, "min_tokens"),
    ({"min_tokens": 99, "max_tokens": None}, "min_tokens"),
    ({"min_tokens": 5000, "max_tokens": 10**18}, "min_tokens"),
    ({"logprobs": 21}, "logprobs"),
    ({"logprobs": 10**6}, "logprobs"),
    ({"logprobs": -1}, "logprobs"),
    ({"logprobs": True}, "logprobs"),
    ({"best_of": 2}, "best_of"),
    ({"suffix": "x"}, "suffix"),
    ({"stop": [""]}, "stop"),
    ({"stop": ""}, "stop"),
    ({"stop": ["x"] * 33}, "stop"),
    ({"stop": "x" * 1025}, "stop"),
    ({"stop": [1]}, "stop"),
    ({"stop": {}}, "stop"),
    ({"stop_token_ids": [-1]}, "stop_token_ids"),
    ({"stop_token_ids": [4096]}, "stop_token_ids"),
    ({"stop_token_ids": [1.0]}, "stop_token_ids"),
    ({"stop_token_ids": [True]}, "stop_token_ids"),
    ({"stop_token_ids": 7}, "stop_token_ids"),
    ({"stop_token_ids": [1] * 1025}, "stop_token_ids"),
    ({"allowed_token_ids": [4096]}, "allowed_token_ids"),
    ({"allowed_token_ids": []}, "allowed_token_ids"),
    ({"logit_bias": {"4096": 1}}, "logit_bias"),
    ({"logit_bias": {"-1": 1}}, "logit_bias"),
    ({"logit_bias": {"x": 1}}, "logit_bias"),
    ({"logit_bias": {"9" * 5000: 1}}, "logit_bias"),
    ({"logit_bias": {"1": 101}}, "logit_bias"),
    ({"logit_bias": {str(i): 1 for i in range(1025)}}, "logit_bias"),
    ({"priority": 1}, "priority"),
    ({"cache_salt": "no spaces"}, "cache_salt"),
    ({"cache_salt": "x" * 65}, "cache_salt"),
    ({"cache_salt": ""}, "cache_salt"),
    ({"request_id": "a/b"}, "request_id"),
    ({"stream": 1}, "stream"),
    ({"stream_options": {"include_usage": True}}, "stream_options"),
    ({"stream": True, "stream_options": {"include_usage": "yes"}}, "stream_options"),
    ({"prompt": [-1]}, "prompt"),
    ({"prompt": [4096]}, "prompt"),
    ({"prompt": [2**70]}, "prompt"),
    ({"prompt": [1.5]}, "prompt"),
    ({"prompt": [True]}, "prompt"),
    ({"prompt": [[1], [4096]]}, "prompt"),
    ({"prompt": [[1], "a"]}, "prompt"),
    ({"prompt": ["a", [1]]}, "prompt"),
    ({"prompt": [[]]}, "prompt"),
    ({"prompt": []}, "prompt"),
    ({"prompt": ""}, "prompt"),
    ({"prompt": None}, "prompt"),
    ({"prompt": 7}, "prompt"),
    ({"prompt": {"a": 1}}, "prompt"),
    ({"prompt": [[[1]]]}, "prompt"),
    ({"prompt": ["x"] * 65}, "prompt"),
    ({"prompt": ["x"] * 100_000}, "prompt"),
    ({"bad_words": ["x"]}, "bad_words"),
    ({"prompt_logprobs": 1}, "prompt_logprobs"),
    ({"truncate_prompt_tokens": 4}, "truncate_prompt_tokens"),
    ({"response_format": {"type": "json_object"}}, "response_format"),
]


@pytest.mark.parametrize(("fields", "param"), BAD_FIELDS, ids=lambda v: str(v)[:50])
def test_bad_completion_fields(server: Instance, fields: dict[str, Any], param: str) -> None:
    error = check_error(server.complete(**fields), 400, param)
    assert error["type"] == "BadRequestError"
    assert error["code"] == 400


BAD_CHATS: list[tuple[dict[str, Any], str]] = [
    ({"messages": []}, "messages"),
    ({"messages": "Hi"}, "messages"),
    ({"messages": [1]}, "messages"),
    ({"messages": [{"role": "wizard", "content": "x"}]}, "messages"),
    ({"messages": [{"role": "user"}]}, "messages"),
    ({"messages": [{"content": "x"}]}, "messages"),
    ({"messages": [{"role": "user", "content": None}]}, "messages"),
    ({"messages": [{"role": "user", "content": 7}]}, "messages"),
    ({"messages": [{"role": "user", "content": ["x"]}]}, "messages"),
    ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "messages"),
    (
        {
            "messages": [
                {
                    "role": "user",
                    "content": [{"type": "image_url", "image_url": {"url": "http://127.0.0.1/x"}}],
                }
            ]
        },
        "messages",
    ),
    ({"messages": CHAT * 2000}, "messages"),
    ({"messages": [{"role": "assistant", "content": "x", "tool_calls": [{}]}]}, "messages"),
    ({"tools": [{"type": "function"}]}, "tools"),
    ({"tool_choice": "required"}, "tool_choice"),
    ({"functions": [{}]}, "functions"),
    (
        {"response_format": {"type": "json_schema", "json_schema": {"type": "foo"}}},
        "response_format",
    ),
    ({"chat_template": "{{ 1 }}"}, "chat_template"),
    ({"chat_template_kwargs": {"messages": []}}, "messages"),
    ({"reasoning_effort": "high"}, "reasoning_effort"),
    ({"modalities": ["audio"]}, "modalities"),
    ({"logprobs": 3}, "logprobs"),
    ({"top_logprobs": 3}, "top_logprobs"),
    ({"logprobs": True, "top_logprobs": 100_000}, "top_logprobs"),
    ({"logprobs": True, "top_logprobs": -1}, "top_logprobs"),
    ({"max_completion_tokens": 0}, "max_completion_tokens"),
    ({"max_tokens": 0}, "max_tokens"),
    ({"add_generation_prompt": True, "continue_final_message": True}, "continue_final_message"),
]


@pytest.mark.parametrize(("fields", "param"), BAD_CHATS, ids=lambda v: str(v)[:50])
def test_bad_chats(server: Instance, fields: dict[str, Any], param: str) -> None:
    body = {"messages": CHAT, "max_tokens": 2, **fields}
    check_error(server.post("/v1/chat/completions", **body), 400, param)


ACCEPTED: list[dict[str, Any]] = [
    {"max_tokens": 2**31 - 1},
    {"max_tokens": 10**18},
    {"max_tokens": 2**63},
    {"temperature": 0},
    {"temperature": 1e-300},
    {"top_p": 0, "temperature": 1},
    {"top_k": 9_999_999},
    {"top_k": -1},
    {"min_p": 0.5, "repetition_penalty": 1.1},
    {"logit_bias": {"7": 100, "4095": -100.0}},
    {"logit_bias": {}},
    {"stop": []},
    {"stop": None, "seed": None, "logprobs": None, "n": None, "echo": None, "stream": None},
    {"suffix": "", "best_of": 1, "bad_words": [], "response_format": {"type": "text"}},
    {"user": "me", "metadata": {"a": {"b": []}}, "store": True, "service_tier": "auto"},
    {"parallel_tool_calls": False, "never_heard_of": 1},
    {"priority": 0, "cache_salt": "tenant_1-a"},
    {"allowed_token_ids": [1, 2], "stop_token_ids": [], "ignore_eos": True},
    {"spaces_between_special_tokens": False, "skip_special_tokens": False},
    {"presence_penalty": 0, "frequency_penalty": 0.0},
    {"seed": -(2**63)},
    {"model": None},
]


@pytest.mark.parametrize("fields", ACCEPTED, ids=lambda v: str(v)[:50])
def test_accepted_completion_fields(server: Instance, fields: dict[str, Any]) -> None:
    response = server.complete(**fields)
    assert response.status_code == 200, response.text


def test_what_langchain_and_guidellm_send(server: Instance) -> None:
    for body in (
        {"stream": False, "max_completion_tokens": 3, "tools": None, "parallel_tool_calls": False},
        {"stream": True, "stream_options": {"include_usage": True, "continuous_usage_stats": True}},
        {"ignore_eos": True, "top_logprobs": None, "logprobs": False, "tool_choice": "none"},
        {"logprobs": False, "top_logprobs": 0, "n": 1, "stop": None, "logit_bias": None},
    ):
        body = {"messages": CHAT, "max_tokens": 3, **body}
        assert server.post("/v1/chat/completions", **body).status_code == 200


def test_huge_max_tokens_goes_up_to_the_context(server: Instance) -> None:
    usage = server.complete(max_tokens=10**30).json()["usage"]
    assert usage["total_tokens"] == 1024


def test_prompt_too_long(server: Instance) -> None:
    for prompt in ([7] * 1024, [7] * 5000, "a b " * 600, "x " * 1_000_000):
        error = check_error(server.complete(prompt=prompt), 400, "prompt")
        assert error["code"] == "context_length_exceeded"
        assert "1024" in error["message"]
    assert server.complete(prompt=[7] * 1023, max_tokens=9).json()["usage"]["total_tokens"] == 1024
    full = server.complete(prompt=[7] * 1024, max_tokens=0, echo=True)
    assert full.status_code == 200
    long_chat = [{"role": "user", "content": "a b " * 600}]
    error = check_error(server.post("/v1/chat/completions", messages=long_chat), 400)
    assert error["code"] == "context_length_exceeded"


@pytest.mark.parametrize(
    "name", ["gpt-4", "", "../../etc/passwd", "x" * 1_000_000, "embedded\u0000"]
)
def test_unknown_model(server: Instance, name: str) -> None:
    error = check_error(server.complete(model=name), 404, "model")
    assert (error["type"], error["code"]) == ("NotFoundError", "model_not_found")
    assert len(error["message"]) < 300


def _number(text: str) -> bytes:
    return b'{"prompt":"a","max_tokens":%s}' % text.encode()


BODIES: dict[str, bytes] = {
    "empty": b"",
    "array": b"[]",
    "string": b'"a"',
    "cut": b'{"prompt":',
    "bom": b'\xef\xbb\xbf{"prompt":"a"}',
    "bad utf-8": b'{"prompt":"\xff"}',
    "utf-16": '{"prompt":"a"}'.encode("utf-16"),
    "surrogate": b'{"prompt":"\\ud800"}',
    "surrogate in a key": b'{"prompt":"a","\\udc00":1}',
    "surrogate in messages": b'{"messages":[{"role":"user","content":"\\ud83d"}]}',
    "NaN": b'{"prompt":"a","temperature":NaN}',
    "Infinity": b'{"prompt":"a","temperature":-Infinity}',
    "1e999": b'{"prompt":"a","temperature":1e999}',
    "huge integer": _number("1" * 5000),
    "deep list": b'{"prompt":' + b"[" * 100_000,
    "deep but closed": b'{"prompt":"a","metadata":' + b"[" * 900 + b"]" * 900 + b"}",
    "deep objects": b'{"prompt":"a","metadata":' + b'{"a":' * 80 + b"1" + b"}" * 80 + b"}",
    "trailing": b'{"prompt":"a"} x',
    "comment": b'{"prompt":"a"/**/}',
    "nul": b'{"prompt":"a"}\x00',
}


@pytest.mark.parametrize("body", BODIES.values(), ids=BODIES.keys())
@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions", "/tokenize"])
def test_bodies_that_are_no_requests(server: Instance, path: str, body: bytes) -> None:
    check_error(httpx.post(server.url + path, content=body, headers=JSON), 400)


def test_minus_zero_and_duplicate_keys_are_json(server: Instance) -> None:
    body = b'{"prompt":"a","temperature":-0,"temperature":0.5,"max_tokens":2}'
    response = httpx.post(server.url + "/v1/completions", content=body, headers=JSON)
    assert response.status_code == 200


def test_a_million_keys(server: Instance) -> None:
    many = ",".join(f'"k{i}":0' for i in range(500_000))
    body = f'{{"prompt":"a","max_tokens":1,{many}}}'.encode()
    response = httpx.post(server.url + "/v1/completions", content=body, headers=JSON, timeout=30)
    assert response.status_code == 200


def test_content_type(server: Instance) -> None:
    body = b'{"prompt":"a","max_tokens":1}'
    url = server.url + "/v1/completions"
    for kind in ("text/plain", "multipart/form-data", "application/x-www-form-urlencoded"):
        check_error(httpx.post(url, content=body, headers={"content-type": kind}), 415)
    for kind in ("application/json; charset=utf-8", "APPLICATION/JSON", ""):
        answer = httpx.post(url, content=body, headers={"content-type": kind})
        assert answer.status_code == 200


def test_methods_and_routes(server: Instance) -> None:
    with server.client() as client:
        check_error(client.get("/v1/completions"), 405)
        check_error(client.post("/health"), 405)
        check_error(client.get("/nothing/here"), 404)
        check_error(client.get("/docs"), 404)


def test_errors_echo_little(server: Instance) -> None:
    response = server.complete(logit_bias={str(i): "x" * 5_000 for i in range(1000)})
    check_error(response)
    assert len(response.content) < 5000
    assert "and 990 more" in response.text
    assert len(server.complete(temperature="x" * 100_000).content) < 1000
    assert len(server.complete(stop=["x" * 2000] * 40).content) < 1000


# ---- anything at all ----

_SCALARS = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(2**70), 2**70),
    st.floats(allow_nan=False, allow_infinity=False),
    st.text(max_size=20),
    st.sampled_from([2**31, 2**63, -1, 0, 1, 4095, 4096, 0.5, "auto", "text", "user"]),
)
_VALUES = st.recursive(
    _SCALARS,
    lambda inner: st.one_of(
        st.lists(inner, max_size=4), st.dictionaries(st.text(max_size=8), inner, max_size=4)
    ),
    max_leaves=8,
)
_FIELDS = {
    "/v1/completions": (CompletionRequest, {"prompt": [9, 8]}),
    "/v1/chat/completions": (ChatRequest, {"messages": CHAT}),
}


@settings(
    max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(data=st.data(), path=st.sampled_from(sorted(_FIELDS)))
def test_no_body_makes_a_500(server: Instance, data: st.DataObject, path: str) -> None:
    model, base = _FIELDS[path]
    known = sorted({*model.model_fields, *model.NOT_IMPLEMENTED})
    changes = data.draw(st.dictionaries(st.sampled_from(known), _VALUES, max_size=4))
    body = {"max_tokens": 2, **base, **changes}
    raw = msgspec.json.encode(body) if data.draw(st.booleans()) else data.draw(st.binary())
    with httpx.Client(timeout=20) as client:
        response = client.post(server.url + path, content=raw, headers=JSON)
        assert response.status_code < 500, (body, response.text)
        if response.status_code != 200:
            check_error(response, response.status_code)
        assert client.get(server.url + "/health").status_code == 200
