"""Our ``eplb`` beside DeepSeek's published code, on the same synthetic loads.

    git clone https://github.com/deepseek-ai/EPLB build/EPLB
    PYTHONPATH=build/EPLB python -m benchmarks.placement_published

Prints one JSON line: rows, those whose imbalance is within 0.01, and the largest difference, for
the published algorithm (where a rank may hold an expert twice) and for our planner (where not).
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from benchmarks import report
from benchmarks.placement_data import zipf_loads
from benchmarks.placement_table import EPLB_TABLE
from moeserve_placement import Topology
from moeserve_placement.planners.eplb import eplb_table
from moeserve_placement.slot_table import even_shares, rank_loads

SEEDS = range(3)
NUM_LAYERS = 4


def published_imbalance(rebalance: Any, load: np.ndarray, num_slots: int, num_ranks: int) -> float:
    """Mean over layers of largest / mean rank load under the published plan."""
    slots, _, copies = rebalance(torch.from_numpy(load), num_slots, 1, 1, num_ranks)
    unit = np.take_along_axis(load / copies.numpy(), slots.numpy(), axis=1)
    ranks = unit.reshape(len(load), num_ranks, -1).sum(-1)
    return float((ranks.max(1) / ranks.mean(1)).mean())


def our_imbalance(
    load: np.ndarray, num_slots: int, num_ranks: int, *, repeats: bool = False
) -> float:
    """The same under our plan; ``repeats`` as in ``eplb_table``."""
    topology = Topology.uniform(num_ranks, num_slots // num_ranks)
    table = eplb_table(load, topology, repeats=repeats)
    ranks = rank_loads(load[None], table, shares=even_shares(table, load.shape[1]))[0]
    return float((ranks.max(1) / ranks.mean(1)).mean())


def main() -> None:
    """Compares all settings of the table."""
    from eplb import rebalance_experts  # type: ignore[import-not-found]

    rules = {"published": True, "planner": False}  # whether a rank may hold an expert twice
    distance: dict[str, list[float]] = {rule: [] for rule in rules}
    for seed in SEEDS:
        for experts, exponent, ranks, spare in EPLB_TABLE:
            rng = np.random.default_rng([seed, experts, int(10 * exponent), ranks, spare])
            load = zipf_loads(experts, exponent, NUM_LAYERS, rng)
            theirs = published_imbalance(rebalance_experts, load, experts + spare, ranks)
            for rule, repeats in rules.items():
                ours = our_imbalance(load, experts + spare, ranks, repeats=repeats)
                distance[rule].append(abs(ours - theirs))
    report.print_json(
        {
            "benchmark": "placement_published",
            **report.provenance("numpy", "torch"),
            "rows": len(distance["planner"]),
            "within_0.01": {rule: sum(d <= 0.01 for d in rows) for rule, rows in distance.items()},
            "largest_difference": {rule: max(rows) for rule, rows in distance.items()},
        }
    )


if __name__ == "__main__":
    main()
