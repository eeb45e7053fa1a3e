"""One HTTP request while it is being answered: outputs in, deltas and usage out."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import msgspec

from moeserve.api.engine_client import EngineClient
from moeserve.api.errors import ApiError, bad_request, cut
from moeserve.api.mailbox import Mailbox
from moeserve.api.output import Delta, OutputProcessor, OutputToken
from moeserve.api.tokenizer import Tokenizer
from moeserve.messages import SamplingParams, TokenLogprobs, TokenOutput


@dataclasses.dataclass(frozen=True, slots=True)
class Prompt:
    """A prompt as text (None: it was given as token ids) and as token ids."""

    text: str | None
    token_ids: list[int]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """A checked request: what to answer, and how.

    Sequence ``i`` is sample ``i % n`` of prompt ``i // n``; ``samplings`` has one entry for each.
    """

    response_id: str
    model: str
    created: int
    prompts: list[Prompt]
    samplings: list[SamplingParams]
    n: int
    echo: bool = False
    num_logprobs: int | None = None
    return_token_ids: bool = False
    stream: bool = False
    include_usage: bool = False
    continuous_usage: bool = False

    @property
    def with_tokens(self) -> bool:
        """Whether answers show single tokens."""
        return self.num_logprobs is not None or self.return_token_ids


class PromptTokensDetails(msgspec.Struct):
    """``usage.prompt_tokens_details``."""

    cached_tokens: int


class Usage(msgspec.Struct):
    """``usage``: prompts count once, whatever ``n``; completions are summed."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails


class Generation:
    """Follows all sequences of a job.

    Args:
        mailbox: where ``client`` puts the outputs of the job's sequences.
        tokenizer: None gives empty texts.
    """

    def __init__(
        self, job: Job, client: EngineClient, mailbox: Mailbox, tokenizer: Tokenizer | None
    ) -> None:
        self.job = job
        self.mailbox = mailbox
        self._client = client
        self._tokenizer = tokenizer
        self._processors = [
            OutputProcessor(tokenizer, sampling, with_tokens=job.with_tokens)
            for sampling in job.samplings
        ]
        self._num_open = len(job.samplings)
        self._num_prompt_tokens = sum(len(prompt.token_ids) for prompt in job.prompts)
        self._num_cached = [0] * len(job.prompts)
        self._echoes: dict[int, list[TokenLogprobs | None]] = (
            {index: [] for index in range(len(job.samplings))} if job.echo else {}
        )

    @property
    def is_over(self) -> bool:
        """Every sequence has ended."""
        return self._num_open == 0

    @property
    def usage(self) -> Usage:
        """Tokens so far."""
        num_completion = sum(len(p.token_ids) for p in self._processors)
        return self._usage(num_completion, self._num_prompt_tokens, sum(self._num_cached))

    def token_ids(self, index: int) -> list[int]:
        """All tokens that a sequence was given, stop token and stop text included."""
        return self._processors[index].token_ids

    def usage_of(self, index: int) -> Usage:
        """Tokens so far of one sequence and its prompt."""
        prompt = index // self.job.n
        num_prompt = len(self.job.prompts[prompt].token_ids)
        num_completion = len(self._processors[index].token_ids)
        return self._usage(num_completion, num_prompt, self._num_cached[prompt])

    @staticmethod
    def _usage(num_completion: int, num_prompt: int, num_cached: int) -> Usage:
        total = num_prompt + num_completion
        return Usage(num_prompt, num_completion, total, PromptTokensDetails(num_cached))

    def process(self, outputs: list[tuple[int, TokenOutput]]) -> Iterator[tuple[int, Delta]]:
        """The deltas of some outputs, with their sequence's index; deltas without content too.

        Raises:
            ApiError: 400, a rank refused a sequence before it began; 500, it failed later.
        """
        for index, output in outputs:
            processor = self._processors[index]
            if processor.finish_reason is not None:
                continue  # stopped by a stop string; this crossed the abort on its way
            if output.finish_reason == "error":
                raise self._error(output, has_begun=bool(processor.token_ids))
            if output.num_cached_tokens and index % self.job.n == 0:
                self._num_cached[index // self.job.n] = output.num_cached_tokens
            delta = processor.process(output)
            if index in self._echoes:
                self._echo(index, output, delta)
            if delta.finish_reason is not None:
                self._num_open -= 1
                if output.finish_reason is None:
                    self._client.cancel(self.mailbox, index)
            yield index, delta

    def check_refused(self, first: list[tuple[int, TokenOutput]]) -> None:
        """Raises the ``ApiError`` 400 if one of the very first outputs is a refusal."""
        for _, output in first:
            if output.finish_reason == "error":
                raise self._error(output, has_begun=False)

    @staticmethod
    def _error(output: TokenOutput, *, has_begun: bool) -> ApiError:
        text = cut(output.error or "the request failed")
        return ApiError(500, text) if has_begun else bad_request(text)

    def _echo(self, index: int, output: TokenOutput, delta: Delta) -> None:
        """Puts the prompt before the first delta that has something to show."""
        self._echoes[index] += output.prompt_logprobs or []
        if not output.token_ids and output.finish_reason is None:
            return  # a part of the prompt's logprobs
        logprobs = self._echoes.pop(index)
        prompt = self.job.prompts[index // self.job.n]
        tokens = self._prompt_tokens(prompt, index, logprobs)
        text = "".join(token.text for token in tokens) if prompt.text is None else prompt.text
        delta.text = text + delta.text
        if self.job.num_logprobs is not None:
            delta.tokens[:0] = tokens

    def _prompt_tokens(
        self, prompt: Prompt, index: int, logprobs: list[TokenLogprobs | None]
    ) -> list[OutputToken]:
        shown = SamplingParams(skip_special_tokens=self.job.samplings[index].skip_special_tokens)
        processor = OutputProcessor(self._tokenizer, shown, with_tokens=True)
        last = TokenOutput("", prompt.token_ids, finish_reason="length")
        tokens = processor.process(last).tokens
        for token, entry in zip(tokens, logprobs, strict=False):
            token.logprobs = entry
        return tokens

    def close(self) -> None:
        """Ends what is still going on and gives the places back. Idempotent."""
        self._client.release(self.mailbox)
