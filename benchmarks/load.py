"""One closed-loop load on an OpenAI-compatible server, measured: what bench_serve runs per cell."""

from __future__ import annotations

import asyncio
import dataclasses
import random
import time
from typing import Any

import msgspec
import psutil

from benchmarks import report, server_process
from benchmarks.sse_client import Address, ClientError, Connection, Reply, Timing, decode_stream

# Words that most tokenizers know as one token each, so that --input-len is about right for chat.
WORDS = (
    "time", "year", "people", "way", "day", "man", "thing", "woman", "life", "child", "world",
    "school", "state", "family", "student", "group", "country", "problem", "hand", "part",
    "place", "case", "week", "company", "system", "program", "question", "work", "number",
    "night", "point", "home", "water", "room", "mother", "area", "money", "story", "fact",
    "month", "lot", "right", "study", "book", "eye", "job", "word",
)  # fmt: skip
PATHS = {"completions": "/v1/completions", "chat": "/v1/chat/completions"}


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Cell:
    """One load: how many workers, how many requests in all, which lengths."""

    concurrency: int
    num_prompts: int
    input_len: int
    output_len: int


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Target:
    """The server, and what to send it."""

    address: Address
    endpoint: str
    model: str
    vocab_size: int
    api_key: str | None = None
    fixed_length: bool = True
    extra: dict[str, Any] = dataclasses.field(default_factory=dict)
    timeout_s: float = 600.0


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Run:
    """One repetition of a cell, as measured."""

    wall_s: float
    timings: tuple[Timing, ...]
    errors: tuple[str, ...]
    client_cores: float
    server_cores: float | None
    other_cores: float | None

    @property
    def output_tokens_per_s(self) -> float:
        """Output tokens of all finished requests over the wall time."""
        return sum(timing.output_tokens for timing in self.timings) / self.wall_s


def request_body(target: Target, cell: Cell, seed: str) -> bytes:
    """The JSON of one request, made from ``seed`` alone."""
    rng = random.Random(seed)
    body: dict[str, Any] = {
        "model": target.model,
        "max_tokens": cell.output_len,
        "temperature": 0.0,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    if target.fixed_length:
        body |= {"min_tokens": cell.output_len, "ignore_eos": True}
    if target.endpoint == "chat":
        text = " ".join(rng.choices(WORDS, k=cell.input_len))
        body["messages"] = [{"role": "user", "content": text}]
    else:  # low ids are special tokens and single bytes
        low = min(300, target.vocab_size // 2)
        body["prompt"] = [rng.randrange(low, target.vocab_size) for _ in range(cell.input_len)]
    return msgspec.json.encode(body | target.extra)


async def run_cell(
    target: Target, cell: Cell, seed: str, server: psutil.Process | None = None
) -> Run:
    """One repetition. All request bodies are made before the clock starts."""
    bodies = [request_body(target, cell, f"{seed}/{i}") for i in range(cell.num_prompts)]
    return await run_bodies(target, bodies, cell.concurrency, server)


async def run_bodies(
    target: Target, bodies: list[bytes], concurrency: int, server: psutil.Process | None = None
) -> Run:
    """Sends all bodies, so many at a time, and empties the list, from its end."""
    replies: list[Reply | str] = []
    busy_before, server_before = report.busy_core_seconds(), _cpu_seconds(server)
    client_before, start = time.process_time(), time.perf_counter()
    await asyncio.gather(
        *[_worker(target, bodies, replies) for _ in range(min(concurrency, len(bodies)))]
    )
    wall_s = time.perf_counter() - start
    client_s = time.process_time() - client_before
    busy_s = report.busy_core_seconds() - busy_before
    timings, errors = _decode(replies)
    server_s = None if server is None else _cpu_seconds(server) - server_before
    return Run(
        wall_s=wall_s,
        timings=tuple(timings),
        errors=tuple(errors),
        client_cores=client_s / wall_s,
        server_cores=None if server_s is None else server_s / wall_s,
        other_cores=None if server_s is None else (busy_s - client_s - server_s) / wall_s,
    )


async def _worker(target: Target, bodies: list[bytes], replies: list[Reply | str]) -> None:
    """Takes bodies from the common list until none is left."""
    connection = Connection(target.address, target.api_key)
    while bodies:
        body = bodies.pop()
        try:
            async with asyncio.timeout(target.timeout_s):
                replies.append(await connection.request("POST", PATHS[target.endpoint], body))
        except (ClientError, TimeoutError) as error:
            replies.append(str(error) or f"no answer in {target.timeout_s} s")
            connection.close()
    connection.close()


def _decode(replies: list[Reply | str]) -> tuple[list[Timing], list[str]]:
    timings, errors = [], []
    for reply in replies:
        if isinstance(reply, str):
            errors.append(reply)
            continue
        try:
            timings.append(decode_stream(reply))
        except ClientError as error:
            errors.append(str(error))
    return timings, errors


def _cpu_seconds(server: psutil.Process | None) -> float:
    return 0.0 if server is None else server_process.cpu_seconds(server)
