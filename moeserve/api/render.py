"""The two answer formats: completions and chat completions, whole or as stream events.

Events are put together from bytes made once per request: a token of a plain stream costs one JSON
string and one join.
"""

from __future__ import annotations

from typing import Any, Protocol

import msgspec

from moeserve.api.generation import Generation, Job, Usage
from moeserve.api.logprobs import TokenNames, chat_logprobs, completion_logprobs
from moeserve.api.output import Delta, OutputToken

DONE = b"data: [DONE]\n\n"

_json = msgspec.json.Encoder().encode


class Format(Protocol):
    """What differs between the two."""

    object: str
    chunk_object: str

    def choice(self, index: int, text: str, tokens: list[OutputToken]) -> dict[str, Any]:
        """A whole choice, without its ends (finish_reason ...)."""
        ...

    def chunk_head(self, index: int, *, is_first: bool) -> bytes:
        """A chunk's choice up to the text's JSON string."""
        ...

    def chunk_tail(self) -> bytes:
        """What follows that string before ``,"logprobs":``."""
        ...

    def logprobs(self, tokens: list[OutputToken], offset: int) -> Any:
        """The logprobs object for some tokens; ``offset`` is that of their text."""
        ...


class CompletionFormat:
    """``text_completion`` objects."""

    object = "text_completion"
    chunk_object = "text_completion"

    def __init__(self, job: Job, names: TokenNames) -> None:
        self._num_top = job.num_logprobs
        self._names = names

    def choice(self, index: int, text: str, tokens: list[OutputToken]) -> dict[str, Any]:
        """See ``Format.choice``."""
        return {"index": index, "text": text, "logprobs": self.logprobs(tokens, 0)}

    def chunk_head(self, index: int, *, is_first: bool) -> bytes:
        """See ``Format.chunk_head``."""
        return b'{"index":%d,"text":' % index

    def chunk_tail(self) -> bytes:
        """See ``Format.chunk_tail``."""
        return b""

    def logprobs(self, tokens: list[OutputToken], offset: int) -> Any:
        """See ``Format.logprobs``."""
        if self._num_top is None:
            return None
        return completion_logprobs(tokens, self._names, self._num_top, offset)


class ChatFormat:
    """``chat.completion`` and ``chat.completion.chunk`` objects."""

    object = "chat.completion"
    chunk_object = "chat.completion.chunk"

    def __init__(self, job: Job, names: TokenNames) -> None:
        self._num_top = job.num_logprobs
        self._names = names

    def choice(self, index: int, text: str, tokens: list[OutputToken]) -> dict[str, Any]:
        """See ``Format.choice``."""
        message = {"role": "assistant", "content": text}
        return {"index": index, "message": message, "logprobs": self.logprobs(tokens, 0)}

    def chunk_head(self, index: int, *, is_first: bool) -> bytes:
        """See ``Format.chunk_head``. The role comes with the first token, not before it."""
        role = b'"role":"assistant",' if is_first else b""
        return b'{"index":%d,"delta":{%s"content":' % (index, role)

    def chunk_tail(self) -> bytes:
        """See ``Format.chunk_tail``."""
        return b"}"

    def logprobs(self, tokens: list[OutputToken], offset: int) -> Any:
        """See ``Format.logprobs``."""
        if self._num_top is None:
            return None
        return chat_logprobs(tokens, self._names, self._num_top)


class Answer:
    """The whole, not streamed answer to a job: collects deltas, then becomes bytes."""

    def __init__(self, generation: Generation, format: Format) -> None:
        self._generation = generation
        self._format = format
        count = len(generation.job.samplings)
        self._texts: list[list[str]] = [[] for _ in range(count)]
        self._tokens: list[list[OutputToken]] = [[] for _ in range(count)]
        self._ends: list[Delta | None] = [None] * count

    def add(self, index: int, delta: Delta) -> None:
        """Takes the next delta of a sequence."""
        self._texts[index].append(delta.text)
        self._tokens[index] += delta.tokens
        if delta.finish_reason is not None:
            self._ends[index] = delta

    def encode(self) -> bytes:
        """The JSON body."""
        job = self._generation.job
        return _json(
            {
                "id": job.response_id,
                "object": self._format.object,
                "created": job.created,
                "model": job.model,
                "choices": [self._choice(job, index) for index in range(len(self._ends))],
                "usage": self._generation.usage,
            }
        )

    def _choice(self, job: Job, index: int) -> dict[str, Any]:
        tokens = self._tokens[index]
        choice = self._format.choice(index, "".join(self._texts[index]), tokens)
        end = self._ends[index]
        choice["finish_reason"] = end.finish_reason if end else None
        choice["stop_reason"] = end.stop_reason if end else None
        if job.return_token_ids:
            choice["prompt_token_ids"] = job.prompts[index // job.n].token_ids
            choice["token_ids"] = self._generation.token_ids(index)
        return choice


class EventWriter:
    """Server-sent events for a streamed job."""

    def __init__(self, generation: Generation, format: Format) -> None:
        self._generation = generation
        self._format = format
        job = self._job = generation.job
        head = {
            "id": job.response_id,
            "object": format.chunk_object,
            "created": job.created,
            "model": job.model,
        }
        self._envelope = b"data: " + _json(head)[:-1] + b',"choices":['
        self._end = b'],"usage":null}\n\n' if job.include_usage else b"]}\n\n"
        self._plain_tail = (
            format.chunk_tail()
            + b',"logprobs":null,"finish_reason":null,"stop_reason":null}'
            + self._end
        )
        self._is_plain = not job.with_tokens and not job.continuous_usage
        self._offsets = [0] * len(job.samplings)
        self._heads = [
            self._envelope + format.chunk_head(index, is_first=False)
            for index in range(len(job.samplings))
        ]
        self._has_begun = [False] * len(job.samplings)

    def event(self, index: int, delta: Delta) -> bytes:
        """The event for a delta; b"" if it has nothing to show."""
        if self._is_plain and delta.finish_reason is None and self._has_begun[index]:
            text = delta.text
            return self._heads[index] + _json(text) + self._plain_tail if text else b""
        if not (delta.text or delta.tokens or delta.finish_reason):
            return b""
        head = self._heads[index]
        is_first = not self._has_begun[index]
        if is_first:
            self._has_begun[index] = True
            head = self._envelope + self._format.chunk_head(index, is_first=True)
        return (
            head
            + _json(delta.text)
            + self._format.chunk_tail()
            + self._rest(index, delta, is_first=is_first)
        )

    def _rest(self, index: int, delta: Delta, *, is_first: bool) -> bytes:
        logprobs = (
            self._format.logprobs(delta.tokens, self._offsets[index]) if delta.tokens else None
        )
        self._offsets[index] += len(delta.text)
        rest: dict[str, Any] = {
            "logprobs": logprobs,
            "finish_reason": delta.finish_reason,
            "stop_reason": delta.stop_reason,
        }
        if self._job.return_token_ids:
            if is_first:
                rest["prompt_token_ids"] = self._job.prompts[index // self._job.n].token_ids
            rest["token_ids"] = [token.token_id for token in delta.tokens]
        end = self._end
        if self._job.continuous_usage:
            end = b'],"usage":' + _json(self._generation.usage_of(index)) + b"}\n\n"
        return b"," + _json(rest)[1:] + end

    def usage_event(self) -> bytes:
        """The last event before ``[DONE]`` if the client wants usage, else b""."""
        if not self._job.include_usage:
            return b""
        usage: Usage = self._generation.usage
        return self._envelope + b'],"usage":' + _json(usage) + b"}\n\n"
