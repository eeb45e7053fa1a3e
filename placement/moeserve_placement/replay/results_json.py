"""Results as JSON: settings, one summary per planner and budget, and the series of every run.

The object has "format": "moeserve-placement-comparison" and "version": 1. Figures over several
seeds are objects with mean, low and high. Units: bytes, milliseconds, tokens; imbalance is a ratio.
"""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from moeserve_placement.replay.results import Comparison, Run
from moeserve_placement.replay.summary import (
    balance_rows,
    cost_rows,
    findings,
    label_rows,
    sent_bytes,
)
from moeserve_placement.replay.traffic import Traffic
from moeserve_placement.traces.files import write_text

FORMAT = "moeserve-placement-comparison"
VERSION = 1


def to_dict(comparison: Comparison) -> dict[str, Any]:
    """The comparison as plain values."""
    return {
        "format": FORMAT,
        "version": VERSION,
        "trace": {"name": comparison.trace, **comparison.facts},
        "topology": asdict(comparison.topology),
        "settings": {
            **{key: value for key, value in asdict(comparison.settings).items() if key != "seed"},
            "seeds": list(comparison.seeds),
            "window": comparison.settings.window_tokens,
            "warmup": comparison.settings.warmup_windows,
        },
        "layer_ids": list(comparison.layer_ids),
        "balance": [asdict(row) for row in balance_rows(comparison)],
        "cost": [asdict(row) for row in cost_rows(comparison)],
        "imbalance_by_domain": label_rows(comparison),
        "findings": findings(comparison),
        "notes": list(comparison.notes),
        "expert_load": comparison.expert_load.tolist(),
        "runs": [_run(comparison, run) for run in comparison.runs],
    }


def save_json(comparison: Comparison, path: Path) -> None:
    """Writes the JSON file.

    Raises:
        TraceError: it can not be written.
    """
    write_text(path, json.dumps(to_dict(comparison), indent=1, allow_nan=False) + "\n")


def _run(comparison: Comparison, run: Run) -> dict[str, Any]:
    size = comparison.batch_of(run)
    layers = {
        f"{split}:{batch}": _rounded(levels.imbalance.mean(0))
        for (split, batch), levels in run.levels.items()
    }
    return {
        "planner": run.planner,
        "budget": run.budget,
        "seed": run.seed,
        "window_labels": list(comparison.window_labels[run.seed]),
        "imbalance_by_window": _rounded(run.window_imbalance(size)),
        "imbalance_by_layer": layers,
        "plans": [asdict(plan) for plan in run.plans],
        "traffic": _traffic(comparison, run),
    }


def _traffic(comparison: Comparison, run: Run) -> dict[str, Any] | None:
    if not run.traffic:
        return None
    total = Traffic.joined(list(run.traffic))
    inside, across = sent_bytes(comparison, total)
    return {
        "num_tokens": total.num_tokens,
        "nodes_per_token_by_layer": _rounded(total.nodes),
        "nodes_per_token_fewest_by_layer": _rounded(total.nodes_fewest),
        "ranks_per_token_by_layer": _rounded(total.ranks),
        "bytes_per_token_and_layer_inside_nodes": inside,
        "bytes_per_token_and_layer_between_nodes": across,
        "rank_to_rank_bytes": (total.sent * comparison.settings.token_bytes).tolist(),
    }


def _rounded(values: Any) -> list[float]:
    return [round(value, 6) for value in np.asarray(values, dtype=np.float64).tolist()]
