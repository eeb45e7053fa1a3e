"""Texts and chats to token ids off the event loop, behind limits in characters."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from moeserve.api.chat_template import ChatTemplate, TemplateFault
from moeserve.api.convert import Chat, context_length_exceeded
from moeserve.api.errors import ApiError, bad_request
from moeserve.api.tokenizer import Tokenizer

_INLINE_CHARS = 2048  # a shorter text is encoded before a thread could be woken
_NUM_THREADS = 2

T = TypeVar("T")


class TextEncoder:
    """The tokenizer and chat template of the served model.

    Args:
        tokenizer: None refuses texts: only token ids are served.
        template: Jinja text; None refuses chats.

    Raises:
        TokenizerError: the template is not valid.
    """

    def __init__(self, tokenizer: Tokenizer | None, template: str | None) -> None:
        self.tokenizer = tokenizer
        self._template: ChatTemplate | None = None
        if tokenizer is not None and template is not None:
            self._template = ChatTemplate(template, tokenizer)
        self._threads = ThreadPoolExecutor(_NUM_THREADS, thread_name_prefix="encode")

    async def encode(self, text: str, max_model_len: int, *, add_special_tokens: bool) -> list[int]:
        """Token ids of a prompt.

        Raises:
            ApiError: 400, longer than any context.
        """
        tokenizer = self._require_tokenizer()
        _check_chars(len(text), tokenizer, max_model_len)
        return await self._run(
            len(text), lambda: tokenizer.encode(text, add_special_tokens=add_special_tokens)
        )

    async def encode_chat(
        self,
        chat: Chat,
        max_model_len: int,
        *,
        add_generation_prompt: bool,
        continue_final_message: bool,
        add_special_tokens: bool,
        variables: dict[str, Any] | None,
    ) -> tuple[str, list[int]]:
        """The prompt that the template makes of a chat, and its token ids.

        Raises:
            ApiError: 400, no template, refused by it, or longer than any context.
        """
        tokenizer = self._require_tokenizer()
        if (template := self._template) is None:
            text = "the model has no chat template: give one with --chat-template"
            raise bad_request(text, param="messages")
        if add_generation_prompt and continue_final_message:
            text = "continue_final_message and add_generation_prompt exclude each other"
            raise bad_request(text, param="continue_final_message")
        max_chars = _check_chars(chat.num_chars, tokenizer, max_model_len)

        def render() -> tuple[str, list[int]]:
            rendered = template.render(
                chat.messages,
                max_chars=max_chars,
                add_generation_prompt=add_generation_prompt,
                continue_final_message=continue_final_message,
                variables=variables,
            )
            token_ids = tokenizer.encode_chat(
                rendered.text, rendered.fake_positions, add_special_tokens=add_special_tokens
            )
            return rendered.text, token_ids

        try:
            return await self._run(chat.num_chars, render)
        except TemplateFault as error:
            raise bad_request(str(error), param="messages") from error

    def _require_tokenizer(self) -> Tokenizer:
        if self.tokenizer is None:
            text = "prompt: this server has no tokenizer, so it must be token ids"
            raise bad_request(text, param="prompt")
        return self.tokenizer

    async def _run(self, num_chars: int, work: Callable[[], T]) -> T:
        if num_chars <= _INLINE_CHARS:
            return work()
        return await asyncio.get_running_loop().run_in_executor(self._threads, work)

    def close(self) -> None:
        """Ends the threads."""
        self._threads.shutdown(wait=False, cancel_futures=True)


def _check_chars(num_chars: int, tokenizer: Tokenizer, max_model_len: int) -> int:
    """The most characters that fit into the context, however they are tokenised.

    Raises:
        ApiError: 400, there are more.
    """
    max_chars = max_model_len * tokenizer.max_token_chars
    if num_chars > max_chars:
        raise context_length_exceeded(f"{num_chars} characters", max_model_len)
    return max_chars


def check_model(asked: str | None, served: str) -> None:
    """Raises ``ApiError`` 404 unless the served model is asked for (or none in particular)."""
    if asked is not None and asked != served:
        text = f"the model {asked[:100]!r} does not exist; this server has {served!r}"
        raise ApiError(404, text, param="model", code="model_not_found")
