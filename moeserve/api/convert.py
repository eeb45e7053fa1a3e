"""From a client's request to what ranks understand: sampling parameters, prompts, messages."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from moeserve.api.errors import ApiError, bad_request, cut
from moeserve.api.openai import ChatRequest, CompletionRequest, GenerationRequest
from moeserve.api.tokenizer import TokenizerError, read_json
from moeserve.messages import ParamError, SamplingParams, validate_vocab

MAX_PROMPTS = 64
_INT64_MAX = 2**63 - 1
_ROLES = ("system", "developer", "user", "assistant", "tool")
_PASSED_ON = (
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "seed",
    "ignore_eos",
    "min_tokens",
    "include_stop_str_in_output",
    "skip_special_tokens",
    "spaces_between_special_tokens",
)
_MODEL_DEFAULTS = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")


def load_sampling_defaults(folder: Path) -> dict[str, Any]:
    """The sampling parameters that the model's ``generation_config.json`` recommends.

    Raises:
        TokenizerError: the file holds one that is out of range.
    """
    path = folder / "generation_config.json"
    config = read_json(path)
    defaults = {name: config[name] for name in _MODEL_DEFAULTS if config.get(name) is not None}
    try:
        msgspec.convert(defaults, SamplingParams)
    except ValueError as error:
        raise TokenizerError(f"{path}: {error}") from error
    return defaults


def sampling_params(
    request: GenerationRequest, defaults: Mapping[str, Any], vocab_size: int
) -> SamplingParams:
    """The parameters of a request's first sample.

    ``max_tokens`` is what the client wants, None for up to the context; see ``fit_to_context``.

    Raises:
        ApiError: 400, a parameter is out of range; the text names it.
    """
    values = dict(defaults)
    for name in _PASSED_ON:
        if (value := getattr(request, name)) is not None:
            values[name] = value
    values["stop"] = _stops(request.stop)
    for name in ("stop_token_ids", "allowed_token_ids"):
        if (token_ids := getattr(request, name)) is not None:
            values[name] = check_token_ids(name, token_ids, vocab_size)
    if request.logit_bias:
        values["logit_bias"] = _logit_bias(request.logit_bias)
    if isinstance(request, ChatRequest):
        values |= _chat_fields(request)
    elif isinstance(request, CompletionRequest):
        values |= _completion_fields(request)
    try:
        params = SamplingParams(n=1 if request.n is None else request.n, **values)
        validate_vocab(params, vocab_size)
    except ParamError as error:
        raise bad_request(str(error), param=error.param) from error
    return params


def _max_tokens(value: int) -> int:
    return min(value, _INT64_MAX)  # any number that large means: up to the context


def _chat_fields(request: ChatRequest) -> dict[str, Any]:
    wanted = request.max_completion_tokens
    name = "max_tokens" if wanted is None else "max_completion_tokens"
    wanted = request.max_tokens if wanted is None else wanted
    if wanted is not None and wanted < 1:
        raise bad_request(f"{name} = {cut(str(wanted))}: must be at least 1", param=name)
    if request.top_logprobs and not request.logprobs:
        raise bad_request("top_logprobs needs logprobs: true", param="top_logprobs")
    if request.top_logprobs is not None and not 0 <= request.top_logprobs <= 20:
        text = f"top_logprobs = {cut(str(request.top_logprobs))}: must be between 0 and 20"
        raise bad_request(text, param="top_logprobs")
    return {
        "max_tokens": None if wanted is None else _max_tokens(wanted),
        "logprobs": (request.top_logprobs or 0) if request.logprobs else None,
    }


def _completion_fields(request: CompletionRequest) -> dict[str, Any]:
    wanted = 16 if request.max_tokens is None else request.max_tokens
    least = 0 if request.echo else 1
    if wanted < least:
        text = f"max_tokens = {cut(str(wanted))}: must be at least 1, or 0 with echo: true"
        raise bad_request(text, param="max_tokens")
    n = 1 if request.n is None else request.n
    if request.best_of is not None and request.best_of != n:
        text = f"best_of = {cut(str(request.best_of))}: must equal n ({cut(str(n))}) here"
        raise bad_request(text, param="best_of")
    return {
        "max_tokens": _max_tokens(wanted),
        "logprobs": request.logprobs,
        "prompt_logprobs": request.logprobs if request.echo else None,
    }


def _stops(stop: Any) -> list[str]:
    if stop is None or stop == []:
        return []
    stops = [stop] if isinstance(stop, str) else stop
    if not isinstance(stops, list) or not all(isinstance(text, str) for text in stops):
        raise bad_request("stop: must be a string or a list of strings", param="stop")
    return stops


def _logit_bias(bias: Mapping[str, float]) -> dict[int, float]:
    try:
        return {int(token_id): value for token_id, value in bias.items()}
    except ValueError as error:
        text = "logit_bias: keys must be token ids, written in decimal digits"
        raise bad_request(text, param="logit_bias") from error


def fit_to_context(
    params: SamplingParams, num_prompt_tokens: int, max_model_len: int
) -> SamplingParams:
    """``params`` with ``max_tokens`` cut to the room that a prompt leaves.

    Raises:
        ApiError: 400, the prompt does not leave room for one token.
    """
    room = max_model_len - num_prompt_tokens
    if room < (0 if params.max_tokens == 0 else 1):
        raise context_length_exceeded(f"{num_prompt_tokens} tokens", max_model_len)
    wanted = room if params.max_tokens is None else min(params.max_tokens, room)
    try:
        return msgspec.structs.replace(params, max_tokens=wanted)
    except ParamError as error:  # min_tokens above what fits
        raise bad_request(str(error), param=error.param) from error


def context_length_exceeded(length: str, max_model_len: int) -> ApiError:
    """The 400 for a prompt that can not fit; ``length`` such as "1200 tokens"."""
    return bad_request(
        f"the prompt has {length}, but this model's maximum context length is "
        f"{max_model_len} tokens, of which the answer needs at least one",
        param="prompt",
        code="context_length_exceeded",
    )


def samples(params: SamplingParams) -> list[SamplingParams]:
    """The parameters of each of the ``n`` samples; a given seed is counted up."""
    if params.seed is None or params.n == 1:
        return [msgspec.structs.replace(params, n=1)] * params.n
    seeds = ((params.seed + i + 2**63) % 2**64 - 2**63 for i in range(params.n))
    return [msgspec.structs.replace(params, n=1, seed=seed) for seed in seeds]


# ---- prompts ----


def read_prompts(prompt: Any, vocab_size: int) -> list[str | list[int]]:
    """The prompts of a completion request: texts, or token ids below ``vocab_size``.

    Raises:
        ApiError: 400, of no accepted form, too many, or an id out of range.
    """
    if isinstance(prompt, str):
        return [prompt]
    if not isinstance(prompt, list) or not prompt:
        raise _wrong_prompt()
    if isinstance(prompt[0], int):
        return [check_token_ids("prompt", prompt, vocab_size)]
    if len(prompt) > MAX_PROMPTS:
        text = f"prompt: a list of {len(prompt)}, at most {MAX_PROMPTS} are taken at once"
        raise bad_request(text, param="prompt")
    if all(isinstance(text, str) for text in prompt):
        return list(prompt)
    if not all(isinstance(token_ids, list) and token_ids for token_ids in prompt):
        raise _wrong_prompt()
    return [check_token_ids("prompt", token_ids, vocab_size) for token_ids in prompt]


def _wrong_prompt() -> ApiError:
    text = "prompt: must be a string, token ids, or a list of either; not empty"
    return bad_request(text, param="prompt")


def check_token_ids(field: str, token_ids: Any, vocab_size: int) -> list[int]:
    """``token_ids`` if it is a list of ids below ``vocab_size``.

    Raises:
        ApiError: 400, naming ``field`` and the first wrong element.
    """
    if not isinstance(token_ids, list):
        raise bad_request(f"{field}: must be a list of token ids", param=field)
    for token_id in token_ids:
        if type(token_id) is not int or not 0 <= token_id < vocab_size:
            text = f"{field} has {cut(token_id)}: must be token ids in [0, {vocab_size})"
            raise bad_request(text, param=field)
    return token_ids


# ---- messages ----


@dataclasses.dataclass(frozen=True, slots=True)
class Chat:
    """Checked messages, ready for a template."""

    messages: list[dict[str, str]]

    @property
    def num_chars(self) -> int:
        """Characters of all contents: a lower bound of the prompt's."""
        return sum(len(message["content"]) for message in self.messages)


def read_messages(messages: Any, max_messages: int) -> Chat:
    """The messages of a chat request; text parts are joined by newlines.

    Raises:
        ApiError: 400, naming the message and the field.
    """
    if not isinstance(messages, list) or not messages:
        raise bad_request("messages: must be a list of at least one message", param="messages")
    if len(messages) > max_messages:
        raise bad_request(f"messages: {len(messages)} are too many", param="messages")
    return Chat([_read_message(f"messages.{i}", m) for i, m in enumerate(messages)])


def _read_message(place: str, message: Any) -> dict[str, str]:
    if not isinstance(message, dict):
        raise bad_request(f"{place}: must be an object", param="messages")
    role = message.get("role")
    if not isinstance(role, str) or role not in _ROLES:
        text = f"{place}.role is {cut(role)}: must be one of {', '.join(_ROLES)}"
        raise bad_request(text, param="messages")
    for field in ("tool_calls", "function_call", "audio"):
        if message.get(field):
            raise bad_request(f"{place}.{field} is not implemented here", param="messages")
    read = {"role": role, "content": _read_content(f"{place}.content", message.get("content"))}
    for field in ("name", "reasoning_content"):
        if isinstance(value := message.get(field), str):
            read[field] = value
    return read


def _read_content(place: str, content: Any) -> str:
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise bad_request(f"{place}: must be a string or a list of parts", param="messages")
    texts = []
    for i, part in enumerate(content):
        text = part.get("text") if isinstance(part, dict) else None
        if not isinstance(text, str) or part.get("type") != "text":
            wanted = 'must be {"type": "text", "text": "..."}: this model takes only text'
            raise bad_request(f"{place}.{i}: {wanted}", param="messages")
        texts.append(text)
    return "\n".join(texts)
