"""Offline inference in the shape of vLLM's ``LLM``: prompts in, texts out, no HTTP.

    from moeserve import LLM, SamplingParams

    with LLM("embedded", ep=2) as llm:
        for output in llm.generate(["Once upon a time"], SamplingParams(max_tokens=32)):
            print(output.outputs[0].text)

The ranks are the same processes that ``moeserve serve`` starts; this is a client of theirs.
"""

from __future__ import annotations

import dataclasses
import itertools
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from tqdm import tqdm

from moeserve import config, messages
from moeserve.api.chat_template import ChatTemplate, load_chat_template
from moeserve.api.output import Delta, OutputProcessor
from moeserve.api.tokenizer import Tokenizer
from moeserve.launch.children import LaunchError, failed, listen
from moeserve.launch.client import RankClient
from moeserve.launch.ranks import RankGroup
from moeserve.messages import SamplingParams
from moeserve_placement import Placement

Prompt = str | Mapping[str, Any]


@dataclasses.dataclass(slots=True, kw_only=True)
class CompletionOutput:
    """One of a request's ``n`` texts.

    logprobs: one per token id, raw (before temperature and penalties), None unless asked for;
    finish_reason: "stop", "length", "abort" or "error"; stop_reason: the stop string or stop token
    id that ended it, None for the end of the sequence.
    """

    index: int
    text: str = ""
    token_ids: list[int] = dataclasses.field(default_factory=list)
    logprobs: list[messages.TokenLogprobs] | None = None
    finish_reason: str | None = None
    stop_reason: str | int | None = None


@dataclasses.dataclass(slots=True, kw_only=True)
class RequestOutput:
    """A prompt and what came of it; ``num_cached_tokens`` of it were found in the prefix cache."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    prompt_logprobs: list[messages.TokenLogprobs | None] | None = None
    num_cached_tokens: int = 0
    finished: bool = False


class RequestError(ValueError):
    """A rank refused a request; the text says why, with numbers."""


class LLM:
    """A model on ``ep`` ranks, for offline inference.

    Args:
        model: folder of a Hugging Face checkpoint, or "embedded".
        ep: number of expert-parallel ranks (``data_parallel_size`` is accepted too).
        settings: any setting of ``moeserve.config``, by name: dtype, max_model_len, num_blocks ...

    Raises:
        config.ConfigError: a setting is unknown or out of range.
        LaunchError: a rank could not start; the text says why.
    """

    def __init__(self, model: str = "embedded", *, ep: int = 1, **settings: Any) -> None:
        settings.pop("enable_expert_parallel", None)  # ranks are always expert parallel
        ep = settings.pop("data_parallel_size", ep)
        self._config = config.from_flat(model=str(model), ep=ep, **settings)
        self._request_ids = itertools.count()
        self._ranks = RankGroup(self._config)
        try:
            self._tokenizer = _load_tokenizer(self._config.model)
            self._ranks.wait_ready()
            self._client = RankClient(self._ranks.endpoints)
        except BaseException:
            self._ranks.kill()
            raise

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = True,
    ) -> list[RequestOutput]:
        """Continues every prompt; returns when all are done, in the order of the prompts.

        Args:
            prompts: texts, ``{"prompt": text}`` or ``{"prompt_token_ids": [...]}``; one or many.
            sampling_params: one for all or one per prompt.
            use_tqdm: shows a progress bar.

        Raises:
            ValueError: a prompt or parameter is wrong; nothing has been started then.
            RequestError: a rank refused a request.
            LaunchError: a rank died.
        """
        items = [prompts] if isinstance(prompts, str | Mapping) else list(prompts)
        params = sampling_params or SamplingParams()
        each = [params] * len(items) if isinstance(params, SamplingParams) else list(params)
        if len(each) != len(items):
            raise ValueError(f"sampling_params: {len(each)} for {len(items)} prompts")
        run = _Run(self._client, self._tokenizer)
        for item, one in zip(items, each, strict=True):
            run.add(str(next(self._request_ids)), *self._token_ids(item), one)
        with tqdm(total=len(items), unit="prompt", disable=not use_tqdm) as bar:
            run.start()
            while run.num_unfinished:
                self._check_alive()
                if num_finished := run.step():
                    bar.update(num_finished)
        return run.outputs

    def stream(self, prompt: Prompt, sampling_params: SamplingParams) -> Iterator[str]:
        """Continues one prompt and yields pieces of text as they become certain.

        Closing the iterator early aborts the request.
        """
        run = _Run(self._client, self._tokenizer)
        run.add(str(next(self._request_ids)), *self._token_ids(prompt), sampling_params)
        [output] = run.outputs
        num_sent = 0
        run.start()
        try:
            while run.num_unfinished:
                self._check_alive()
                run.step()
                if piece := output.outputs[0].text[num_sent:]:
                    num_sent += len(piece)
                    yield piece
        finally:
            run.abort()

    def chat_prompt(self, chat: Sequence[Mapping[str, str]]) -> list[int]:
        """Token ids of a conversation, by the model's chat template, ready for the next answer.

        Args:
            chat: messages with ``role`` and ``content``.

        Raises:
            ValueError: the model has no chat template, or it refused the messages.
        """
        model = self._config.model
        override = Path(model.chat_template) if model.chat_template else None
        source = load_chat_template(_tokenizer_folder(model), override)
        if source is None:
            raise ValueError("the model has no chat template: set chat_template")
        longest = self.tokenizer.max_token_chars * self._client.infos[0].max_model_len
        template = ChatTemplate(source, self.tokenizer)
        rendered = template.render(chat, max_chars=longest, add_generation_prompt=True)
        return self.tokenizer.encode_chat(rendered.text, rendered.fake_positions)

    @property
    def tokenizer(self) -> Tokenizer:
        """The model's tokenizer.

        Raises:
            ValueError: the LLM was made with ``skip_tokenizer_init``.
        """
        if self._tokenizer is None:
            raise ValueError("skip_tokenizer_init = True: prompts must be prompt_token_ids")
        return self._tokenizer

    @property
    def config(self) -> config.ServeConfig:
        """The settings, complete."""
        return self._config

    def expert_load(self) -> dict[int, list[int]]:
        """Tokens that each logical expert got since start, by layer; the sum is tokens x top_k."""
        total: dict[int, list[int]] = {}
        for body in self._client.query("load"):
            for layer, counts in body["layers"].items():
                so_far = total.get(int(layer), [0] * len(counts))
                total[int(layer)] = [a + b for a, b in zip(so_far, counts, strict=True)]
        return total

    def place_experts(self, placement: Placement) -> int:
        """Starts moving experts to where ``placement`` has them, while requests run.

        Returns the id of the decision in ``expert_history``.

        Raises:
            ValueError: the placement does not fit the model or its slots, or a plan is in progress.
        """
        layers = {str(layer): ranks for layer, ranks in placement.layers.items()}
        body = {"num_experts": placement.num_experts, "layers": layers}
        return int(self._client.command("place", body)["id"])

    def rebalance_experts(self, planner: str | None = None, *, dry_run: bool = False) -> int:
        """Asks for a plan for the load so far and carries it out; returns the decision's id.

        Raises:
            ValueError: a plan is in progress.
        """
        body = {"planner": planner, "dry_run": dry_run}
        return int(self._client.command("rebalance", body)["id"])

    def rollback_experts(self, decision_id: int | None = None) -> int:
        """Goes back to the placement before that decision (default: the last that moved anything).

        Raises:
            ValueError: there is none, or a plan is in progress.
        """
        return int(self._client.command("rollback", {"id": decision_id})["id"])

    def expert_history(self) -> dict[str, Any]:
        """The placement manager's state and its decisions, the newest first (``entries``)."""
        history: dict[str, Any] = self._client.history()
        return history

    def check(self) -> None:
        """Raises RuntimeError if a rank's accounts are wrong or KV blocks are still in use."""
        for rank, problem in enumerate(self._client.query("check")):
            if problem is not None:
                raise RuntimeError(f"rank {rank}: {problem}")

    def _token_ids(self, prompt: Prompt) -> tuple[str | None, list[int]]:
        if isinstance(prompt, str):
            return prompt, self.tokenizer.encode(prompt)
        if "prompt_token_ids" in prompt:
            return prompt.get("prompt"), list(prompt["prompt_token_ids"])
        if "prompt" not in prompt:
            raise ValueError("prompt: must be a text or have the key prompt or prompt_token_ids")
        return prompt["prompt"], self.tokenizer.encode(prompt["prompt"])

    def _check_alive(self) -> None:
        listen(self._ranks.children, 0.0)
        if child := failed(self._ranks.children):
            raise LaunchError(child.last_words())

    def shutdown(self) -> None:
        """Stops the ranks; a second call does nothing."""
        self._client.close()
        self._ranks.stop()

    def __enter__(self) -> LLM:
        return self

    def __exit__(self, *exc: object) -> None:
        self.shutdown()


def _tokenizer_folder(model: config.ModelConfig) -> Path:
    return Path(model.tokenizer) if model.tokenizer else config.resolve_model_path(model.model)


def _load_tokenizer(model: config.ModelConfig) -> Tokenizer | None:
    return None if model.skip_tokenizer_init else Tokenizer.load(_tokenizer_folder(model))


@dataclasses.dataclass(slots=True)
class _Sample:
    """One sequence in flight."""

    message: messages.NewRequest
    rank: int
    request: RequestOutput
    output: CompletionOutput
    processor: OutputProcessor


class _Run:
    """One call's requests on their way through the ranks."""

    def __init__(self, client: RankClient, tokenizer: Tokenizer | None) -> None:
        self._client = client
        self._tokenizer = tokenizer
        self._samples: dict[str, _Sample] = {}
        self.outputs: list[RequestOutput] = []

    def add(
        self, request_id: str, prompt: str | None, token_ids: list[int], params: SamplingParams
    ) -> None:
        """Prepares a request; its samples share a rank, for the prefix cache's sake.

        Raises:
            ValueError: a parameter or token id does not suit the model.
        """
        info = self._client.infos[0]
        messages.validate_vocab(params, info.vocab_size)
        if bad := [i for i in token_ids if not 0 <= i < info.vocab_size]:
            raise ValueError(f"prompt token id {bad[0]}: must be in [0, {info.vocab_size})")
        if params.stop and self._tokenizer is None:
            raise ValueError("stop: needs a tokenizer; use stop_token_ids")
        request = RequestOutput(
            request_id=request_id, prompt=prompt, prompt_token_ids=token_ids, outputs=[]
        )
        rank = len(self.outputs) % len(self._client.infos)
        self.outputs.append(request)
        for index in range(params.n):
            sample_id = f"{request_id}-{index}"
            output = CompletionOutput(index=index)
            request.outputs.append(output)
            message = messages.NewRequest(
                sample_id, token_ids, messages.for_sample(params, index), 0, "", time.monotonic()
            )
            processor = OutputProcessor(self._tokenizer, params)
            self._samples[sample_id] = _Sample(message, rank, request, output, processor)

    def start(self) -> None:
        """Sends everything to the ranks."""
        for sample in self._samples.values():
            self._client.send(sample.rank, sample.message)

    @property
    def num_unfinished(self) -> int:
        """Sequences in flight."""
        return len(self._samples)

    def step(self) -> int:
        """Waits a moment for outputs and takes them; returns how many requests got finished."""
        num_finished = 0
        for _, message in self._client.receive(0.1):
            if isinstance(message, messages.StepOutputs):
                for output in message.outputs:
                    num_finished += self._take(output)
        return num_finished

    def _take(self, output: messages.TokenOutput) -> bool:
        sample = self._samples.get(output.request_id)
        if sample is None:
            return False  # aborted or ended by a stop string; the rank had not heard yet
        if output.error is not None:
            self.abort()
            raise RequestError(output.error)
        delta = sample.processor.process(output)
        request, choice = sample.request, sample.output
        choice.text += delta.text
        choice.token_ids += output.token_ids
        if output.logprobs is not None:
            choice.logprobs = [*(choice.logprobs or []), *output.logprobs]
        if output.prompt_logprobs is not None and choice.index == 0:
            request.prompt_logprobs = [*(request.prompt_logprobs or []), *output.prompt_logprobs]
        request.num_cached_tokens = max(request.num_cached_tokens, output.num_cached_tokens)
        if delta.finish_reason is None:
            return False
        return self._finish(sample, output, delta)

    def _finish(self, sample: _Sample, output: messages.TokenOutput, delta: Delta) -> bool:
        sample.output.finish_reason = delta.finish_reason
        sample.output.stop_reason = delta.stop_reason
        del self._samples[output.request_id]
        if output.finish_reason is None:  # a stop string, which only we see
            self._client.send(sample.rank, messages.Abort([output.request_id]))
        request = sample.request
        request.finished = all(o.finish_reason is not None for o in request.outputs)
        return request.finished

    def abort(self) -> None:
        """Makes the ranks forget what is still in flight."""
        for request_id, sample in self._samples.items():
            self._client.send(sample.rank, messages.Abort([request_id]))
        self._samples.clear()
