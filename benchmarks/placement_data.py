"""Loads for the placement benchmarks: real routing from ``../shared/data``, and synthetic ones.

The synthetic ones carry their parameters in their names; none is from a real 256-expert model, as
no public per-token trace of one is known.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from moeserve_placement.load import LoadHistory

ROUTING = Path(__file__).resolve().parents[2] / "shared" / "data" / "routing"
ESFT_DOMAINS = ("law", "summary", "intent", "translation")
WINDOW = 2048  # tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class Routing:
    """Two halves of a routing trace: plan on the first, score on the second.

    first, second: by domain, expert ids [num_tokens, num_layers, top_k]. The cut is between
    sequences, half of each domain's sequences in each.
    """

    num_experts: int
    first: dict[str, np.ndarray]
    second: dict[str, np.ndarray]

    @property
    def layer_ids(self) -> range:
        return range(next(iter(self.first.values())).shape[1])


def esft() -> Routing | None:
    """DeepSeek-V2-Lite routing of four domains; None where the file is not there."""
    path = ROUTING / "esft_dsv2lite_top6.npz"
    if not path.exists():
        return None
    with np.load(path, allow_pickle=False) as file:
        halves = {d: _halves(file[d], file[f"{d}_seqlen"]) for d in ESFT_DOMAINS}
    return Routing(
        num_experts=64,
        first={d: half[0] for d, half in halves.items()},
        second={d: half[1] for d, half in halves.items()},
    )


def gpt_oss() -> Routing | None:
    """gpt-oss-20b decoding, every other sequence in each half; None where the file is not there.

    The file is sorted by kind of prompt, so its first and second half are different traffic.
    """
    path = ROUTING / "gptoss20b_top4_decode.npz"
    if not path.exists():
        return None
    with np.load(path, allow_pickle=False) as file:
        ids, sequence = file["ids"], np.repeat(np.arange(len(file["seqlen"])), file["seqlen"])
    first, second = ids[sequence % 2 == 0], ids[sequence % 2 == 1]
    return Routing(num_experts=32, first={"all": first}, second={"all": second})


def _halves(ids: np.ndarray, lengths: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    cut = int(np.cumsum(lengths)[len(lengths) // 2 - 1])
    return ids[:cut], ids[cut:]


def windows(ids: np.ndarray, size: int = WINDOW) -> list[np.ndarray]:
    """Whole windows of ``size`` tokens, and a last one of at least half of that."""
    parts = [ids[start : start + size] for start in range(0, len(ids), size)]
    return [part for part in parts if 2 * len(part) >= size]


def count(ids: np.ndarray, num_experts: int) -> np.ndarray:
    """Tokens per expert: int64 [num_layers, num_experts]."""
    layers = ids.shape[1]
    keys = np.arange(layers)[:, None] * num_experts + ids.astype(np.int64)
    return np.bincount(keys.ravel(), minlength=layers * num_experts).reshape(layers, num_experts)


def coactivation(ids: np.ndarray, num_experts: int) -> np.ndarray:
    """Tokens that chose both experts: float64 [num_layers, num_experts, num_experts]."""
    tokens, layers, _ = ids.shape
    result = np.zeros((layers, num_experts, num_experts))
    for layer in range(layers):
        chosen = np.zeros((tokens, num_experts), dtype=np.float32)
        chosen[np.arange(tokens)[:, None], ids[:, layer]] = 1
        result[layer] = chosen.T @ chosen
    return result


def observed(
    routing: Routing, domains: Sequence[str], *, pairs: bool = False, **options: float
) -> LoadHistory:
    """A history of the first halves of these domains, window by window, domains taking turns."""
    history = LoadHistory(routing.layer_ids, routing.num_experts, **options)  # type: ignore[arg-type]
    lists = [windows(routing.first[domain]) for domain in domains]
    for turn in range(max(len(parts) for parts in lists)):
        for parts in lists:
            if turn < len(parts):
                counts = count(parts[turn], routing.num_experts)
                both = coactivation(parts[turn], routing.num_experts) if pairs else None
                history.observe(counts, both)
    return history


def zipf_loads(
    num_experts: int, exponent: float, num_layers: int, rng: np.random.Generator
) -> np.ndarray:
    """Popularity rank^-exponent with 15 % log-normal jitter, experts permuted; rows sum to 1."""
    load = np.arange(1, num_experts + 1.0) ** -exponent
    load = load * rng.lognormal(0.0, 0.15, (num_layers, num_experts))
    load = rng.permuted(load, axis=1)
    return load / load.sum(1, keepdims=True)


def ou_windows(
    num_experts: int,
    num_layers: int,
    num_windows: int,
    *,
    rho: float,
    rng: np.random.Generator,
    sigma: float = 1.0,
) -> Iterator[np.ndarray]:
    """Log popularity as an Ornstein-Uhlenbeck process: stationary normal, lag-one correlation rho.

    Yields loads [num_layers, num_experts] whose rows sum to 1.
    """
    state = rng.normal(0.0, sigma, (num_layers, num_experts))
    for _ in range(num_windows):
        load = np.exp(state)
        yield load / load.sum(1, keepdims=True)
        noise = rng.normal(0.0, sigma, state.shape)
        state = rho * state + np.sqrt(1.0 - rho * rho) * noise


def esft_cycle(routing: Routing, rounds: int) -> Iterator[np.ndarray]:
    """Counts of single-domain windows, the domain changing every window, ``rounds`` times round."""
    lists = {
        domain: windows(np.concatenate([routing.first[domain], routing.second[domain]]))
        for domain in ESFT_DOMAINS
    }
    for turn in range(rounds):
        for domain in ESFT_DOMAINS:
            parts = lists[domain]
            yield count(parts[turn % len(parts)], routing.num_experts)
