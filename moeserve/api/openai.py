"""What clients may send: the fields of OpenAI's API and vLLM's extras. The only pydantic in here.

Three kinds of fields. Declared ones do what they say. ``NOT_IMPLEMENTED`` ones are known but not
built: anything but their neutral value is a 400, never silently dropped. All others are ignored.
``null`` means "not given" everywhere.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar

from pydantic import BaseModel, ConfigDict, Field, WithJsonSchema

_STRINGS: dict[str, Any] = {"type": "array", "items": {"type": "string"}}
_TOKENS: dict[str, Any] = {"type": "array", "items": {"type": "integer", "minimum": 0}}

# Long lists are checked by our own code: pydantic would report each wrong element once per branch.
Prompt = Annotated[
    Any,
    WithJsonSchema(
        {"anyOf": [{"type": "string"}, _STRINGS, _TOKENS, {"type": "array", "items": _TOKENS}]}
    ),
]
TokenIds = Annotated[Any, WithJsonSchema(_TOKENS)]
Stop = Annotated[Any, WithJsonSchema({"anyOf": [{"type": "string"}, _STRINGS, {"type": "null"}]})]
_PART: dict[str, Any] = {
    "type": "object",
    "properties": {"type": {"const": "text"}, "text": {"type": "string"}},
    "required": ["type", "text"],
}
Messages = Annotated[
    Any,
    WithJsonSchema(
        {
            "type": "array",
            "minItems": 1,
            "items": {
                "type": "object",
                "properties": {
                    "role": {"enum": ["system", "developer", "user", "assistant", "tool"]},
                    "content": {"anyOf": [{"type": "string"}, {"type": "array", "items": _PART}]},
                    "name": {"type": "string"},
                },
                "required": ["role", "content"],
            },
        }
    ),
]


class _Request(BaseModel):
    model_config = ConfigDict(strict=True, extra="ignore", allow_inf_nan=False)
    NOT_IMPLEMENTED: ClassVar[Mapping[str, tuple[Any, ...]]] = {}  # field: neutral values


class StreamOptions(_Request):
    """Which chunks of a stream carry usage."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


_NOT_IMPLEMENTED: Mapping[str, tuple[Any, ...]] = {
    "bad_words": ([],),
    "use_beam_search": (False,),
    "length_penalty": (1.0, 1),
    "prompt_logprobs": (),
    "truncate_prompt_tokens": (),
    "logits_processors": ([],),
    "structured_outputs": (),
    "guided_json": (),
    "guided_regex": (),
    "guided_choice": (),
    "guided_grammar": (),
    "kv_transfer_params": (),
    "response_format": ({"type": "text"},),
}


class GenerationRequest(_Request):
    """The fields that completions and chat completions share."""

    model: str | None = None
    temperature: float | None = None
    top_p: float | None = None
    n: int | None = None
    max_tokens: int | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    seed: int | None = None
    stop: Stop = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    # vLLM's extras
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    stop_token_ids: TokenIds | None = None
    allowed_token_ids: TokenIds | None = None
    include_stop_str_in_output: bool | None = None
    ignore_eos: bool | None = None
    min_tokens: int | None = None
    skip_special_tokens: bool | None = None
    spaces_between_special_tokens: bool | None = None
    add_special_tokens: bool | None = None
    return_token_ids: bool | None = None
    priority: int | None = None
    request_id: str | None = Field(None, pattern="^[A-Za-z0-9_.-]{1,64}$")
    cache_salt: str | None = Field(None, pattern="^[A-Za-z0-9_-]{1,64}$")


class CompletionRequest(GenerationRequest):
    """``POST /v1/completions``."""

    NOT_IMPLEMENTED: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        **_NOT_IMPLEMENTED,
        "suffix": ("",),
        "prompt_embeds": (),
    }

    prompt: Prompt
    best_of: int | None = None
    echo: bool | None = None
    logprobs: int | None = None


class ChatRequest(GenerationRequest):
    """``POST /v1/chat/completions``."""

    NOT_IMPLEMENTED: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        **_NOT_IMPLEMENTED,
        "tools": ([],),
        "tool_choice": ("none", "auto"),
        "functions": ([],),
        "function_call": ("none", "auto"),
        "modalities": (["text"],),
        "audio": (),
        "prediction": (),
        "reasoning_effort": ("none",),
        "verbosity": ("medium",),
        "web_search_options": (),
        "chat_template": (),
        "documents": ([],),
        "echo": (False,),
        "best_of": (1,),
        "mm_processor_kwargs": (),
    }

    messages: Messages
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None


class TokenizeRequest(_Request):
    """``POST /tokenize``: ``prompt`` or ``messages``."""

    model: str | None = None
    prompt: str | None = None
    messages: Messages | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    return_token_strs: bool | None = None


class DetokenizeRequest(_Request):
    """``POST /detokenize``."""

    model: str | None = None
    tokens: TokenIds
