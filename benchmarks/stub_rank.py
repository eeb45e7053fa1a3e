"""A rank without a model: speaks the ranks' protocol, makes up tokens.

For tests of the HTTP process and for ``bench_http``.

Run as ``python -m benchmarks.stub_rank`` with a ``StubConfig`` as JSON on stdin. What it emits is a
function of the request alone, so tests know what to expect (``expected_tokens``). Requests may also
say what they want by their prompt: see ``StubConfig.script_token``.
"""

from __future__ import annotations

import hashlib
import math
import sys
import time
from collections import deque
from pathlib import Path

import msgspec
import zmq

from moeserve import messages
from moeserve.messages import NewRequest, RankStats, TokenLogprobs, TokenOutput


class StubConfig(msgspec.Struct, frozen=True, kw_only=True):
    """How the stub behaves.

    delay_s: pause between two steps; ready_path: ``Hello`` is answered once this file exists;
    max_num_seqs: requests that run at once; tokens_per_output: tokens in one output;
    eos_token_id: ends a request when the stub emits it, unless ignored;
    script_token: a prompt that starts with it is followed by the tokens to emit, in order;
    die_after: outputs after which the stub exits without a word; error_after: outputs after which
    a request ends with an error (0: refused before the first token);
    garbage: sends a frame that is no message before each output;
    log_path: a file that gets a line for each NewRequest and Abort.
    """

    endpoint: str
    rank: int = 0
    protocol: int = messages.PROTOCOL
    vocab_size: int = 4096
    max_model_len: int = 1024
    max_num_seqs: int = 1 << 30
    delay_s: float = 0.0
    ready_path: str | None = None
    tokens_per_output: int = 1
    eos_token_id: int | None = None
    script_token: int | None = None
    die_after: int | None = None
    error_after: int | None = None
    garbage: bool = False
    log_path: str | None = None


def expected_tokens(prompt: list[int], seed: int | None, count: int, vocab_size: int) -> list[int]:
    """The first ``count`` tokens that the stub emits for a prompt and a seed."""
    data = msgspec.msgpack.encode((prompt, seed))
    start = int.from_bytes(hashlib.blake2b(data, digest_size=8).digest())
    # Ids below 16 are left out: tokenizers keep their control tokens there.
    return [16 + (start + 7919 * i) % (vocab_size - 16) for i in range(count)]


class _Sequence:
    """A request that is being answered."""

    def __init__(self, request: NewRequest, source: bytes, config: StubConfig) -> None:
        self.request = request
        self.source = source
        self.num_emitted = 0
        wanted = request.sampling.max_tokens
        self.limit = config.max_model_len - len(request.prompt_token_ids)
        self.limit = self.limit if wanted is None else min(self.limit, wanted)
        prompt = request.prompt_token_ids
        if config.script_token is not None and prompt[0] == config.script_token:
            self.tokens = prompt[1 : 1 + self.limit]
            self.limit = len(self.tokens)
        else:
            seed = request.sampling.seed
            self.tokens = expected_tokens(prompt, seed, self.limit, config.vocab_size)


class StubRank:
    """The stub's state; ``run`` never returns except by ``Shutdown``."""

    def __init__(self, config: StubConfig) -> None:
        self._config = config
        self._context = zmq.Context()
        self._router = self._context.socket(zmq.ROUTER)
        self._router.setsockopt(zmq.SNDHWM, 0)
        self._router.setsockopt(zmq.LINGER, 0)
        self._router.bind(config.endpoint)
        self._running: dict[str, _Sequence] = {}
        self._waiting: deque[_Sequence] = deque()
        self._log = open(config.log_path, "a", buffering=1) if config.log_path else None  # noqa: SIM115
        self._num_outputs = 0
        self._num_tokens = 0
        self._step = 0

    def run(self) -> None:
        """Answers mail and steps while there is work."""
        while True:
            self._router.poll(0 if self._has_work() else None)
            while self._router.poll(0):
                source, frame = self._router.recv_multipart()
                if not self._handle(source, messages.decode_to_rank(frame)):
                    return
            if self._has_work():
                self._make_step()

    def _has_work(self) -> bool:
        return bool(self._running or (self._waiting and self._config.max_num_seqs))

    def _note(self, *words: object) -> None:
        if self._log is not None:
            self._log.write(" ".join(map(str, words)) + "\n")

    def _handle(self, source: bytes, message: messages.ToRank) -> bool:
        match message:
            case messages.Hello():
                ready_path = self._config.ready_path
                if ready_path is None or Path(ready_path).exists():
                    self._send(source, self._info())
            case NewRequest():
                self._note("new", message.request_id, len(message.prompt_token_ids))
                self._waiting.append(_Sequence(message, source, self._config))
            case messages.Abort():
                for request_id in message.request_ids:
                    self._note("abort", request_id)
                    self._running.pop(request_id, None)
                aborted = set(message.request_ids)
                self._waiting = deque(
                    s for s in self._waiting if s.request.request_id not in aborted
                )
            case messages.Query():
                self._send(source, self._answer(message))
            case messages.Command(query_id):
                refusal = "a stub has no experts to move"
                self._send(source, messages.Answer(query_id, self._config.rank, b"null", refusal))
            case messages.Shutdown():
                return False
        return True

    def _info(self) -> messages.RankInfo:
        config = self._config
        return messages.RankInfo(
            config.rank, config.protocol, config.vocab_size, config.max_model_len, 16, 64, 2, 4
        )

    def _answer(self, query: messages.Query) -> messages.Answer:
        rank = self._config.rank
        placement = {"num_experts": 4, "layers": {"0": [[0, 1], [2, 3]], "1": [[0, 1], [2, 3]]}}
        load = {"layers": {"0": [rank + 1, 2, 3, 4], "1": [4, 3, 2, 1]}}
        history: dict[str, object] = {"entries": []}
        views = {"placement": placement, "load": load, "history": history}
        body = msgspec.json.encode(views[query.what])
        return messages.Answer(query.query_id, rank, body)

    def _make_step(self) -> None:
        while self._waiting and len(self._running) < self._config.max_num_seqs:
            sequence = self._waiting.popleft()
            self._running[sequence.request.request_id] = sequence
        outputs: dict[bytes, list[TokenOutput]] = {}
        for sequence in list(self._running.values()):
            outputs.setdefault(sequence.source, []).append(self._advance(sequence))
        self._step += 1
        for source, of_source in outputs.items():
            if self._config.garbage:
                self._router.send_multipart([source, b"\xc1garbage"])
            self._send(source, messages.StepOutputs(of_source, self._stats()))
            self._num_outputs += len(of_source)
        if self._config.die_after is not None and self._num_outputs >= self._config.die_after:
            raise SystemExit(3)
        if self._config.delay_s:
            time.sleep(self._config.delay_s)

    def _advance(self, sequence: _Sequence) -> TokenOutput:
        config, request = self._config, sequence.request
        sampling = request.sampling
        if config.error_after is not None and sequence.num_emitted >= config.error_after:
            del self._running[request.request_id]
            text = "the prompt needs 12 KV blocks, this rank has 10"
            return TokenOutput(request.request_id, [], "error", error=text)
        start, end = sequence.num_emitted, sequence.num_emitted + config.tokens_per_output
        tokens = sequence.tokens[start : min(end, sequence.limit)]
        stops = set(sampling.stop_token_ids)
        if config.eos_token_id is not None and not sampling.ignore_eos:
            stops.add(config.eos_token_id)
        stop_at = next(
            (i for i, t in enumerate(tokens) if t in stops and start + i >= sampling.min_tokens),
            None,
        )
        tokens = tokens if stop_at is None else tokens[: stop_at + 1]
        sequence.num_emitted += len(tokens)
        self._num_tokens += len(tokens)
        is_over = stop_at is not None or sequence.num_emitted >= sequence.limit
        if is_over:
            del self._running[request.request_id]
        return TokenOutput(
            request.request_id,
            tokens,
            finish_reason=("stop" if stop_at is not None else "length") if is_over else None,
            stop_token_id=tokens[stop_at] if stop_at is not None else None,
            logprobs=self._logprobs(tokens, sampling.logprobs),
            prompt_logprobs=self._prompt_logprobs(sequence) if start == 0 else None,
        )

    def _logprobs(self, tokens: list[int], num_top: int | None) -> list[TokenLogprobs] | None:
        if num_top is None:
            return None
        size = self._config.vocab_size
        return [
            TokenLogprobs(
                token,
                -0.5,
                1,
                [(token + i) % size for i in range(num_top)],
                [-0.5 - i if i < 3 else -math.inf for i in range(num_top)],
            )
            for token in tokens
        ]

    def _prompt_logprobs(self, sequence: _Sequence) -> list[TokenLogprobs | None] | None:
        num_top = sequence.request.sampling.prompt_logprobs
        if num_top is None:
            return None
        return [None, *(self._logprobs(sequence.request.prompt_token_ids[1:], num_top) or [])]

    def _stats(self) -> RankStats:
        waiting = sum(len(s.request.prompt_token_ids) for s in self._waiting)
        return RankStats(
            self._config.rank,
            self._step,
            len(self._running),
            len(self._waiting),
            waiting,
            0.25,
            0,
            self._num_tokens,
            0,
            self._num_tokens,
            self._num_tokens,
            {"stub": self._step},
        )

    def _send(self, target: bytes, message: messages.FromRank) -> None:
        self._router.send_multipart([target, messages.encode(message)])


def main() -> None:
    """Runs one stub rank."""
    StubRank(msgspec.json.decode(sys.stdin.buffer.read(), type=StubConfig)).run()


if __name__ == "__main__":
    main()
