"""What the HTTP process and the ranks say to each other: typed msgpack, no pickle.

Every message is a tagged, frozen ``msgspec.Struct``; a frame that is not one of them raises
``msgspec.DecodeError`` at the receiver, who drops and counts it. Fields are sent by position
(``array_like``), so both ends must be of one version: ``PROTOCOL`` is checked at the handshake.
"""

from __future__ import annotations

from typing import Literal

import msgspec

PROTOCOL = 3

FinishReason = Literal["stop", "length", "abort", "error"]


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """How tokens are chosen and when a request ends. Field names and meanings are vLLM's.

    ``validate`` in this module states the ranges. ``max_tokens`` None means: up to the context.
    """

    n: int = 1
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0  # 0 or -1: off
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: dict[int, float] = {}
    allowed_token_ids: list[int] | None = None
    seed: int | None = None
    stop: list[str] = []
    stop_token_ids: list[int] = []
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    min_tokens: int = 0
    max_tokens: int | None = 16
    logprobs: int | None = None  # number of top alternatives; 0: the chosen token only
    prompt_logprobs: int | None = None
    skip_special_tokens: bool = True
    spaces_between_special_tokens: bool = True

    def __post_init__(self) -> None:
        validate(self)


class ParamError(ValueError):
    """A sampling parameter is out of range: ``param`` names it, the text says what is right."""

    def __init__(self, param: str, value: object, wanted: str) -> None:
        super().__init__(f"{param} = {str(value)[:80]}: must be {wanted}")
        self.param = param


MAX_N = 64
MAX_LOGPROBS = 20
MAX_STOP = 32
MAX_STOP_CHARS = 1024
MAX_BIAS = 1024


def validate(params: SamplingParams) -> None:
    """Checks every range that needs no model.

    Raises:
        ParamError: the first parameter that is out of range.
    """
    for name, low, high in (
        ("n", 1, MAX_N),
        ("temperature", 0.0, 100.0),
        ("top_p", 0.0, 1.0),
        ("top_k", -1, 2**63 - 1),
        ("min_p", 0.0, 1.0),
        ("presence_penalty", -2.0, 2.0),
        ("frequency_penalty", -2.0, 2.0),
        ("seed", -(2**63), 2**63 - 1),
        ("min_tokens", 0, 2**63 - 1),
        ("max_tokens", 0, 2**63 - 1),
        ("logprobs", 0, MAX_LOGPROBS),
        ("prompt_logprobs", 0, MAX_LOGPROBS),
    ):
        value = getattr(params, name)
        if value is not None and not low <= value <= high:  # NaN fails this too
            raise ParamError(name, value, f"between {low} and {high}")
    if not 0.01 <= params.repetition_penalty <= 100.0:
        raise ParamError("repetition_penalty", params.repetition_penalty, "between 0.01 and 100")
    if params.max_tokens is not None and params.min_tokens > params.max_tokens:
        raise ParamError("min_tokens", params.min_tokens, f"at most max_tokens {params.max_tokens}")
    _validate_lists(params)


def _validate_lists(params: SamplingParams) -> None:
    if len(params.stop) > MAX_STOP or any(not 0 < len(s) <= MAX_STOP_CHARS for s in params.stop):
        wanted = f"at most {MAX_STOP} strings of 1 to {MAX_STOP_CHARS} characters"
        raise ParamError("stop", f"{len(params.stop)} strings", wanted)
    if len(params.stop_token_ids) > MAX_BIAS:
        raise ParamError("stop_token_ids", f"{len(params.stop_token_ids)} ids", f"<= {MAX_BIAS}")
    if len(params.logit_bias) > MAX_BIAS:
        raise ParamError("logit_bias", f"{len(params.logit_bias)} entries", f"<= {MAX_BIAS}")
    if any(not -100.0 <= bias <= 100.0 for bias in params.logit_bias.values()):
        raise ParamError("logit_bias", "a value out of range", "values between -100 and 100")
    if params.allowed_token_ids is not None and not params.allowed_token_ids:
        raise ParamError("allowed_token_ids", "[]", "null or at least one token id")


def validate_vocab(params: SamplingParams, vocab_size: int) -> None:
    """Checks every token id against the width of the logits.

    Raises:
        ParamError: an id is not in ``[0, vocab_size)``.
    """
    for name in ("logit_bias", "stop_token_ids", "allowed_token_ids"):
        for token_id in getattr(params, name) or ():
            if not 0 <= token_id < vocab_size:
                raise ParamError(name, token_id, f"token ids in [0, {vocab_size})")


def for_sample(params: SamplingParams, index: int) -> SamplingParams:
    """Parameters of sample ``index`` out of ``n``: one sequence, with a seed of its own."""
    if params.n == 1:
        return params
    seed = None if params.seed is None else (params.seed + index + 2**63) % 2**64 - 2**63
    return msgspec.structs.replace(params, n=1, seed=seed)


class NewRequest(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """HTTP -> rank: one sequence to produce (``n`` samples are ``n`` of these)."""

    request_id: str
    prompt_token_ids: list[int]
    sampling: SamplingParams
    priority: int = 0
    cache_salt: str = ""
    arrival_time: float = 0.0  # time.monotonic() at the HTTP process


class Abort(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """HTTP -> rank: forget these requests; unknown and finished ids are ignored."""

    request_ids: list[str]


class Wake(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Rank -> rank: the sender enters step ``step``; who has passed it ignores this."""

    step: int


class Hello(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """HTTP -> rank: here is a listener; ``protocol`` must equal the rank's ``PROTOCOL``."""

    protocol: int = PROTOCOL


class Command(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """HTTP -> rank 0: do something about placement; answered like a ``Query``. ``body``: JSON."""

    query_id: int
    what: str  # rebalance, place, rollback, freeze, unfreeze, pin, unpin, cancel
    body: bytes


class Query(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """HTTP -> rank: asks for ``what``; answered by ``Answer`` with the same ``query_id``."""

    query_id: int
    what: Literal["placement", "load", "check", "history"]


class Shutdown(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Supervisor -> rank: leave together with all ranks at the next agreed step."""


ToRank = NewRequest | Abort | Wake | Hello | Query | Command | Shutdown


class TokenLogprobs(msgspec.Struct, frozen=True, array_like=True):
    """Raw log-probabilities (before temperature and penalties) of one position.

    ``top_ids``/``top_logprobs`` are the best alternatives in falling order; all values are finite.
    ``rank`` is 1 for the most likely token.
    """

    token_id: int
    logprob: float
    rank: int
    top_ids: list[int]
    top_logprobs: list[float]


class TokenOutput(msgspec.Struct, frozen=True, array_like=True):
    """What one request got in one step. ``finish_reason`` set: this is its last output."""

    request_id: str
    token_ids: list[int]
    finish_reason: FinishReason | None = None
    stop_token_id: int | None = None  # the stop token that ended it (it is in token_ids)
    logprobs: list[TokenLogprobs] | None = None  # one per token id
    prompt_logprobs: list[TokenLogprobs | None] | None = None  # a part of the prompt's, in order
    num_cached_tokens: int = 0
    queued_s: float = 0.0  # how long it waited for its first step
    error: str | None = None


class RankStats(msgspec.Struct, frozen=True, array_like=True):
    """A rank's gauges and counters since start (counters only grow)."""

    rank: int
    step: int
    num_running: int
    num_waiting: int
    num_waiting_tokens: int
    kv_usage: float  # 0..1
    num_preemptions: int
    prefix_cache_queries: int  # tokens
    prefix_cache_hits: int  # tokens
    iteration_tokens: int  # scheduled tokens since start
    rank_tokens: int  # (token, expert) pairs computed by this rank's experts since start
    dispatches: dict[str, int] = {}  # calls of MoE layers by dispatcher


class StepOutputs(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Rank -> HTTP: the outputs of one step for that HTTP process, and the rank's state."""

    outputs: list[TokenOutput]
    stats: RankStats


class RankInfo(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Rank -> HTTP, answer to ``Hello``: the rank is ready and this is what it found out."""

    rank: int
    protocol: int
    vocab_size: int
    max_model_len: int
    block_size: int
    num_blocks: int
    num_layers: int
    num_experts: int


class Answer(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Rank -> HTTP: ``body`` is JSON; ``error``: why the rank would not, for the user."""

    query_id: int
    rank: int
    body: bytes
    error: str | None = None


FromRank = StepOutputs | RankInfo | Answer


class Dead(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Supervisor -> HTTP: the engine is gone for the reason given; fail what is in flight."""

    reason: str


class Drain(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Supervisor -> HTTP: take nothing new, finish or abort within ``timeout`` seconds, leave."""

    timeout: float


ToHttp = Dead | Drain

encode = msgspec.msgpack.Encoder().encode
decode_to_rank = msgspec.msgpack.Decoder(ToRank).decode
decode_from_rank = msgspec.msgpack.Decoder(FromRank).decode
decode_to_http = msgspec.msgpack.Decoder(ToHttp).decode
