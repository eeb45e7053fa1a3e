"""What ``/experts/*`` shows: where experts are, and how many tokens each was given."""

from __future__ import annotations

from typing import Any

import msgspec

from moeserve.api.engine_client import EngineClient
from moeserve.metrics import balancedness


class _Load(msgspec.Struct):
    """What a rank answers, see ``engine/views.py``."""

    layers: dict[str, list[int]]  # tokens by logical expert
    pairs: list[int] = []
    compute_s: float = 0.0
    steps: int = 0


async def expert_placement(client: EngineClient) -> bytes:
    """Rank 0's placement, as the placement library writes it.

    Raises:
        ApiError: 503, the rank does not answer.
    """
    return (await client.query("placement", [0]))[0]


async def expert_load(client: EngineClient) -> dict[str, Any]:
    """Tokens by layer and expert over all ranks, and how evenly the ranks are loaded.

    By rank: ``tokens``, the (token, expert) pairs that its experts computed, and ``pairs``, the
    same by layer; ``routed``, pairs that its own requests caused; ``compute_s``, seconds that its
    experts computed; ``steps``, its forward passes.

    ``balancedness`` is mean / largest rank load (1.0 is even), ``imbalance`` (largest - mean) /
    mean (0.0 is even).

    Raises:
        ApiError: 503, a rank does not answer.
    """
    ranks = sorted(client.infos)
    layers: dict[str, list[int]] = {}
    loads = [msgspec.json.decode(body, type=_Load) for body in await client.query("load", ranks)]
    for load in loads:
        for layer, counts in load.layers.items():
            total = layers.setdefault(layer, [0] * len(counts))
            layers[layer] = [a + b for a, b in zip(total, counts, strict=True)]
    tokens = [client.stats[rank].rank_tokens if rank in client.stats else 0 for rank in ranks]
    mean = sum(tokens) / len(tokens)
    return {
        "layers": layers,
        "ranks": [
            {
                "rank": rank,
                "tokens": count,
                "pairs": load.pairs,
                "routed": sum(map(sum, load.layers.values())),
                "compute_s": load.compute_s,
                "steps": load.steps,
            }
            for rank, count, load in zip(ranks, tokens, loads, strict=True)
        ],
        "balancedness": balancedness(tokens),
        "imbalance": (max(tokens) - mean) / mean if mean else 0.0,
    }
