"""The workloads of bench_skew: what routing is forced, and what requests are sent.

Ragged sources need ranks that are busier than others. The API has no field for a rank, but the
samples of one request stay together on one rank: a request with many samples keeps one rank busy,
and the balancer sends the single requests to the others.
"""

from __future__ import annotations

import dataclasses
import json
import random
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import msgspec

from benchmarks.load import Cell, Target, request_body

SAMPLES = Path(__file__).resolve().parents[1] / "tests" / "data" / "embedded_sample.json"
DOMAINS = ("stories", "code")
RAGGED_SHARE = 0.75  # of the sequences, on the busy half of the ranks


@dataclass(frozen=True, kw_only=True, slots=True)
class Stream:
    """Requests of one kind, so many at a time; ``bodies`` in the order in which they are sent."""

    target: Target
    bodies: list[bytes]
    concurrency: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Workload:
    """forced: the server's --force-routing, None where the model's own gate decides. streams: what
    is sent, of the server, the cell, the number of ranks and a seed."""

    name: str
    forced: str | None
    streams: Callable[[Target, Cell, int, str], list[Stream]]


def workloads(*, steps: int, exponent: float) -> dict[str, Workload]:
    """All workloads by name. steps: length of a span of rotating and burst. exponent: of zipf."""
    forced = {
        "balanced": "balanced",
        "zipf": f"zipf:{exponent:g}",
        "hot-expert": "hot-expert",
        "hot-rank": "hot-rank",
        "spread-hot": "spread-hot",
        "empty-rank": "empty-rank",
        "rotating": f"rotating:{steps}",
        "burst": f"burst:{steps}",
    }
    found = {name: Workload(name=name, forced=f, streams=even) for name, f in forced.items()}
    found["ragged-sources"] = Workload(name="ragged-sources", forced="balanced", streams=ragged)
    found["natural"] = Workload(name="natural", forced=None, streams=domains)
    return found


def even(target: Target, cell: Cell, num_ranks: int, seed: str) -> list[Stream]:
    """Random prompts; the balancer spreads them evenly."""
    bodies = [request_body(target, cell, f"{seed}/{i}") for i in range(cell.num_prompts)]
    return [Stream(target=target, bodies=bodies, concurrency=cell.concurrency)]


def samples_per_busy_rank(concurrency: int, num_ranks: int) -> int:
    """How many sequences each busy rank has at a time under ``ragged``."""
    return round(RAGGED_SHARE * concurrency / num_busy(num_ranks))


def num_busy(num_ranks: int) -> int:
    """How many ranks are busy under ``ragged``."""
    return max(1, num_ranks // 2)


def source_balancedness(concurrency: int, num_ranks: int) -> float:
    """Mean over largest number of sequences of a rank under ``ragged``."""
    return concurrency / num_ranks / samples_per_busy_rank(concurrency, num_ranks)


def check_ragged(concurrency: int, num_ranks: int) -> None:
    """Raises ValueError where so few sequences can not be spread unevenly over the ranks."""
    if num_ranks < 2 or concurrency < 4 * num_busy(num_ranks):
        raise ValueError(
            f"ragged-sources: concurrency = {concurrency}, ep = {num_ranks}: needs two ranks or "
            "more, and four sequences for every second rank"
        )


def ragged(target: Target, cell: Cell, num_ranks: int, seed: str) -> list[Stream]:
    """``RAGGED_SHARE`` of the sequences on half of the ranks, one many-sample request on each.

    Raises:
        ValueError: see ``check_ragged``.
    """
    check_ragged(cell.concurrency, num_ranks)
    samples = samples_per_busy_rank(cell.concurrency, num_ranks)
    rest = cell.concurrency - samples * num_busy(num_ranks)
    waves = max(1, cell.num_prompts // cell.concurrency)
    crowd = dataclasses.replace(target, extra={**target.extra, "n": samples, "temperature": 1.0})
    many = [
        request_body(crowd, cell, f"{seed}/many{i}") for i in range(waves * num_busy(num_ranks))
    ]
    single = [request_body(target, cell, f"{seed}/{i}") for i in range(waves * rest)]
    return [
        Stream(target=crowd, bodies=many, concurrency=num_busy(num_ranks)),
        Stream(target=target, bodies=single, concurrency=rest),
    ]


def domains(target: Target, cell: Cell, num_ranks: int, seed: str) -> list[Stream]:
    """Prompts of one domain of the embedded model's text, then of another one."""
    windows = json.loads(SAMPLES.read_text())["domains"]
    rng = random.Random(seed)
    bodies = []
    for i in range(cell.num_prompts):
        domain = DOMAINS[i * len(DOMAINS) // cell.num_prompts]
        window = rng.choice(windows[domain]["windows"])
        length = min(cell.input_len, len(window) - 8)
        start = rng.randrange(len(window) - length)
        body = msgspec.json.decode(request_body(target, cell, f"{seed}/{i}"))
        bodies.append(msgspec.json.encode(body | {"prompt": window[start : start + length]}))
    return [Stream(target=target, bodies=bodies, concurrency=cell.concurrency)]
