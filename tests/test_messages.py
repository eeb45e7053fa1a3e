"""Messages: round trips, hostile frames, parameter ranges."""

from __future__ import annotations

import contextlib
import math
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from moeserve import messages
from moeserve.messages import ParamError, SamplingParams

IDS = st.lists(st.integers(0, 2**31), max_size=5)


@given(
    request_id=st.text(max_size=20),
    token_ids=IDS,
    temperature=st.floats(0, 100),
    top_k=st.integers(-1, 2**63 - 1),
    seed=st.none() | st.integers(-(2**63), 2**63 - 1),
    bias=st.dictionaries(st.integers(0, 10**6), st.floats(-100, 100), max_size=3),
)
def test_requests_survive_the_wire(
    request_id: str,
    token_ids: list[int],
    temperature: float,
    top_k: int,
    seed: int | None,
    bias: dict[int, float],
) -> None:
    params = SamplingParams(temperature=temperature, top_k=top_k, seed=seed, logit_bias=bias)
    request = messages.NewRequest(request_id, token_ids, params, 3, "salt", 1.5)
    assert messages.decode_to_rank(messages.encode(request)) == request


@given(st.binary(max_size=200))
def test_garbage_is_a_decode_error_and_nothing_else(frame: bytes) -> None:
    for decode in (messages.decode_to_rank, messages.decode_from_rank, messages.decode_to_http):
        with contextlib.suppress(msgspec.DecodeError, ValueError):
            decode(frame)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("n", 0), ("n", 65), ("temperature", -0.1), ("temperature", math.nan),
        ("temperature", math.inf), ("top_p", 1.1), ("top_p", -0.1), ("top_k", -2), ("min_p", 2.0),
        ("presence_penalty", 3.0), ("frequency_penalty", -3.0), ("repetition_penalty", 0.0),
        ("seed", 2**63), ("max_tokens", -1), ("min_tokens", -1), ("logprobs", 21),
        ("logprobs", -1), ("prompt_logprobs", 21), ("stop", [""]), ("stop", ["x"] * 33),
        ("stop", ["x" * 1025]), ("logit_bias", {1: 101.0}), ("logit_bias", {1: math.nan}),
        ("allowed_token_ids", []), ("min_tokens", 17),
    ],
)  # fmt: skip
def test_out_of_range_is_refused_by_name(name: str, value: Any) -> None:
    with pytest.raises(ParamError) as caught:
        SamplingParams(**{name: value})
    assert caught.value.param == name
    assert name in str(caught.value)


@pytest.mark.parametrize("name", ["logit_bias", "stop_token_ids", "allowed_token_ids"])
@pytest.mark.parametrize("token_id", [-1, 256, 2**40])
def test_token_ids_outside_the_vocabulary_are_refused(name: str, token_id: int) -> None:
    value: Any = {token_id: 1.0} if name == "logit_bias" else [token_id]
    with pytest.raises(ParamError, match=name):
        messages.validate_vocab(SamplingParams(**{name: value}), 256)


@given(st.integers(-(2**63), 2**63 - 1), st.integers(2, 64))
def test_samples_have_different_seeds_in_range(seed: int, n: int) -> None:
    params = SamplingParams(seed=seed, n=n)
    seeds = [messages.for_sample(params, index).seed for index in range(n)]
    assert len(set(seeds)) == n
    assert seeds[0] == seed


def test_a_message_of_another_kind_is_not_taken_for_ours() -> None:
    with pytest.raises(msgspec.DecodeError):
        messages.decode_to_rank(messages.encode(messages.Dead("x")))
