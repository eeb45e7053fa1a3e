"""Log-probabilities in the two shapes of OpenAI's API. All numbers are finite."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from moeserve.api.output import OutputToken
from moeserve.api.tokenizer import Tokenizer
from moeserve.messages import TokenLogprobs

_LEAST = -9999.0  # JSON has no infinity; vLLM's number


class CompletionLogprobs(msgspec.Struct):
    """``choices[].logprobs`` of completions: parallel lists, one element per token."""

    text_offset: list[int]
    token_logprobs: list[float | None]
    tokens: list[str]
    top_logprobs: list[dict[str, float] | None]


class TopLogprob(msgspec.Struct):
    """One alternative in a chat completion."""

    token: str
    logprob: float
    bytes: list[int]


class ChatLogprob(msgspec.Struct):
    """One token in a chat completion."""

    token: str
    logprob: float
    bytes: list[int]
    top_logprobs: list[TopLogprob]


class ChatLogprobs(msgspec.Struct):
    """``choices[].logprobs`` of chat completions."""

    content: list[ChatLogprob]


class TokenNames:
    """How tokens are written: by their text, or by their id where there is no tokenizer."""

    def __init__(self, tokenizer: Tokenizer | None) -> None:
        self._tokenizer = tokenizer

    def text(self, token_id: int) -> str:
        """A token on its own."""
        return (
            f"token_id:{token_id}" if not self._tokenizer else self._tokenizer.token_text(token_id)
        )

    def bytes(self, token_id: int) -> list[int]:
        """Its bytes."""
        return list(self._tokenizer.token_bytes(token_id)) if self._tokenizer else []

    def shown(self, token: OutputToken) -> str:
        """A token in its text: its share of it, or its own name if it has none there."""
        if self._tokenizer is None or token.token_id in self._tokenizer.special_ids:
            return token.text or self.text(token.token_id)
        return token.text


def completion_logprobs(
    tokens: Sequence[OutputToken], names: TokenNames, num_top: int, offset: int
) -> CompletionLogprobs:
    """The logprobs of some tokens of a completion.

    Args:
        num_top: alternatives per token; the token itself is always among them.
        offset: characters of the choice's text before the first of ``tokens``.
    """
    result = CompletionLogprobs([], [], [], [])
    for token in tokens:
        result.text_offset.append(offset)
        result.tokens.append(names.shown(token))
        offset += len(token.text)
        if token.logprobs is None:  # nothing comes before the first token of a prompt
            result.token_logprobs.append(None)
            result.top_logprobs.append(None)
            continue
        own = finite(token.logprobs.logprob)
        top = {names.text(i): value for i, value in _top(token.logprobs, num_top)}
        top.setdefault(names.text(token.token_id), own)
        result.token_logprobs.append(own)
        result.top_logprobs.append(top)
    return result


def chat_logprobs(tokens: Sequence[OutputToken], names: TokenNames, num_top: int) -> ChatLogprobs:
    """The logprobs of some tokens of a chat completion."""
    return ChatLogprobs(
        [
            ChatLogprob(
                token=names.shown(token),
                logprob=finite(token.logprobs.logprob),
                bytes=names.bytes(token.token_id),
                top_logprobs=[
                    TopLogprob(names.text(i), value, names.bytes(i))
                    for i, value in _top(token.logprobs, num_top)
                ],
            )
            for token in tokens
            if token.logprobs is not None
        ]
    )


def _top(logprobs: TokenLogprobs, num_top: int) -> list[tuple[int, float]]:
    pairs = zip(logprobs.top_ids, logprobs.top_logprobs, strict=False)
    return [(token_id, finite(value)) for token_id, value in list(pairs)[:num_top]]


def finite(value: float) -> float:
    """``value``; the least number for -inf and NaN."""
    return value if value > _LEAST else _LEAST
