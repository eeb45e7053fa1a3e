"""What the routes do: check, take a place, tokenise, send, answer.

The order matters. A place in the queue is taken before anything costly happens, and from the moment
the body is read a client that hangs up ends its request, in every phase.
"""

from __future__ import annotations

import secrets
import time
from typing import Any

from moeserve.api.admission import Reservation
from moeserve.api.convert import (
    Chat,
    fit_to_context,
    read_messages,
    read_prompts,
    samples,
    sampling_params,
)
from moeserve.api.encoder import TextEncoder, check_model
from moeserve.api.engine_client import EngineClient, PromptRequest
from moeserve.api.errors import bad_request, cut
from moeserve.api.generation import Generation, Job, Prompt
from moeserve.api.logprobs import TokenNames
from moeserve.api.openai import ChatRequest, CompletionRequest, GenerationRequest
from moeserve.api.render import Answer, ChatFormat, CompletionFormat, EventWriter, Format
from moeserve.api.stream import DisconnectWatch, EventStream
from moeserve.config import ServeConfig
from moeserve.messages import SamplingParams
from moeserve.metrics import Metrics

_CHARS_PER_TOKEN = 4  # an estimate, until the text is tokenised


class Service:
    """Answers generation requests with one model."""

    def __init__(
        self,
        config: ServeConfig,
        client: EngineClient,
        encoder: TextEncoder,
        metrics: Metrics,
        sampling_defaults: dict[str, Any],
    ) -> None:
        self.client = client
        self.encoder = encoder
        self.metrics = metrics
        self.model_name = config.model.served_model_name or config.model.model
        self.model_root = config.model.model
        self.created = int(time.time())
        self._has_priorities = config.scheduler.scheduling_policy == "priority"
        self._defaults = sampling_defaults
        self._names = TokenNames(encoder.tokenizer)

    async def completion(
        self, request: CompletionRequest, watch: DisconnectWatch
    ) -> EventStream | bytes:
        """Answers ``/v1/completions``: the stream, or the JSON body.

        Raises:
            ApiError: the request can not be served.
            ClientGone: nobody waits for the answer.
        """
        params = self._check(request)
        prompts = read_prompts(request.prompt, self.client.info.vocab_size)
        num_tokens = sum(
            len(p) // _CHARS_PER_TOKEN + 1 if isinstance(p, str) else len(p) for p in prompts
        )
        reservation = self._reserve(params, len(prompts), num_tokens)
        try:
            add = request.add_special_tokens is not False
            context = self.client.info.max_model_len
            encoded = [
                Prompt(p, await self.encoder.encode(p, context, add_special_tokens=add))
                if isinstance(p, str)
                else Prompt(None, p)
                for p in prompts
            ]
            watch.check()
            job = self._job("cmpl", request, params, encoded, echo=bool(request.echo))
            generation = self._send(job, request, reservation)
        except BaseException:
            reservation.release()
            raise
        return await self._answer(generation, CompletionFormat(job, self._names), watch)

    async def chat(self, request: ChatRequest, watch: DisconnectWatch) -> EventStream | bytes:
        """Answers ``/v1/chat/completions``; see ``completion``."""
        params = self._check(request)
        chat = read_messages(request.messages, self.client.info.max_model_len)
        num_tokens = chat.num_chars // _CHARS_PER_TOKEN + 1
        reservation = self._reserve(params, 1, num_tokens)
        try:
            text, token_ids = await self._encode_chat(request, chat)
            watch.check()
            job = self._job("chatcmpl", request, params, [Prompt(text, token_ids)])
            generation = self._send(job, request, reservation)
        except BaseException:
            reservation.release()
            raise
        return await self._answer(generation, ChatFormat(job, self._names), watch)

    def _check(self, request: GenerationRequest) -> SamplingParams:
        self.client.check_serving()
        check_model(request.model, self.model_name)
        if request.priority and not self._has_priorities:
            text = f"priority = {cut(str(request.priority))}: needs --scheduling-policy priority"
            raise bad_request(text, param="priority")
        if request.priority is not None and not -(2**31) <= request.priority < 2**31:
            raise bad_request("priority: must fit in 32 bits", param="priority")
        if request.stream_options is not None and not request.stream:
            raise bad_request("stream_options needs stream: true", param="stream_options")
        return sampling_params(request, self._defaults, self.client.info.vocab_size)

    def _reserve(self, params: SamplingParams, num_prompts: int, num_tokens: int) -> Reservation:
        try:
            return self.client.admission.reserve(num_prompts * params.n, num_tokens * params.n)
        except Exception:
            self.metrics.reject("queue_full")
            raise

    async def _encode_chat(self, request: ChatRequest, chat: Chat) -> tuple[str, list[int]]:
        continues = bool(request.continue_final_message)
        add_prompt = request.add_generation_prompt
        return await self.encoder.encode_chat(
            chat,
            self.client.info.max_model_len,
            add_generation_prompt=not continues if add_prompt is None else add_prompt,
            continue_final_message=continues,
            add_special_tokens=bool(request.add_special_tokens),
            variables=request.chat_template_kwargs,
        )

    def _job(
        self,
        prefix: str,
        request: GenerationRequest,
        params: SamplingParams,
        prompts: list[Prompt],
        *,
        echo: bool = False,
    ) -> Job:
        max_model_len = self.client.info.max_model_len
        samplings = []
        for prompt in prompts:
            if not prompt.token_ids:
                raise bad_request("prompt: is empty", param="prompt")
            fitted = fit_to_context(params, len(prompt.token_ids), max_model_len)
            samplings += samples(fitted)
        options = request.stream_options
        return Job(
            response_id=f"{prefix}-{request.request_id or secrets.token_hex(16)}",
            model=self.model_name,
            created=int(time.time()),
            prompts=prompts,
            samplings=samplings,
            n=params.n,
            echo=echo,
            num_logprobs=params.logprobs,
            return_token_ids=bool(request.return_token_ids) or self.encoder.tokenizer is None,
            stream=bool(request.stream),
            include_usage=bool(options and options.include_usage),
            continuous_usage=bool(options and options.continuous_usage_stats),
        )

    def _send(self, job: Job, request: GenerationRequest, reservation: Reservation) -> Generation:
        reservation.resize(sum(len(prompt.token_ids) for prompt in job.prompts) * job.n)
        requests = [
            PromptRequest(
                prompt_token_ids=prompt.token_ids,
                samplings=job.samplings[i * job.n : (i + 1) * job.n],
                priority=request.priority or 0,
                cache_salt=request.cache_salt or "",
            )
            for i, prompt in enumerate(job.prompts)
        ]
        mailbox = self.client.submit(requests, reservation)
        return Generation(job, self.client, mailbox, self.encoder.tokenizer)

    async def _answer(
        self, generation: Generation, format: Format, watch: DisconnectWatch
    ) -> EventStream | bytes:
        watch.follow(generation)
        try:
            first = await generation.mailbox.take()
            if generation.job.stream:
                generation.check_refused(first)
                return EventStream(generation, EventWriter(generation, format), first, watch.stop)
            answer = Answer(generation, format)
            outputs = first
            while True:
                for index, delta in generation.process(outputs):
                    answer.add(index, delta)
                if generation.is_over:
                    break
                outputs = await generation.mailbox.take()
            generation.close()
            return answer.encode()
        except BaseException:
            generation.close()
            raise
