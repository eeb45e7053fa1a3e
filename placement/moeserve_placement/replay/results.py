"""What a replay found: runs of planners, and the comparison of them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from moeserve_placement.replay.metrics import Balance, balance
from moeserve_placement.replay.score import Levels
from moeserve_placement.replay.settings import ReplaySettings
from moeserve_placement.replay.traffic import Traffic
from moeserve_placement.slot_table import Floats, Ints
from moeserve_placement.topology import Topology

FIXED = "fixed"
BATCH = "batch"
SPLITS = (FIXED, BATCH)
REFERENCE = "linear"
"""The planner that every comparison has: what engines start with."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanRecord:
    """One call of a planner.

    window: index of the scored window before which the plan took effect. seconds: time of the call.
    split: the split that it planned for, see ``Plan``.
    num_copies, num_bytes: what its moves copied, bytes_by_link: the bytes by kind of link.
    predicted, predicted_worst: imbalance that it forecast, mean over layers; None without forecast.
    """

    window: int
    seconds: float
    split: str
    num_copies: int
    num_bytes: int
    bytes_by_link: Mapping[str, int]
    predicted: float | None
    predicted_worst: float | None
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Run:
    """One planner with one budget on one order of the trace.

    levels: (split, batch size) -> levels of all its batches; split is 'fixed' (even, or the shares
    that came with the plan) or 'batch' (solved for every batch). batch_windows: by batch size, the
    scored window of each batch of the fixed split.
    rank_levels: level of each rank over the mean, whole windows, fixed split, float64 [num_windows,
    num_layers, num_ranks]. traffic: of each window; empty for a trace of counts.
    """

    planner: str
    budget: str
    seed: int
    levels: Mapping[tuple[str, int], Levels]
    batch_windows: Mapping[int, Ints]
    rank_levels: Floats
    plans: tuple[PlanRecord, ...]
    traffic: tuple[Traffic, ...] = ()

    @property
    def label(self) -> str:
        """Planner and budget, for tables and legends."""
        return self.planner if self.budget == "none" else f"{self.planner} ({self.budget})"

    @property
    def num_copies(self) -> int:
        """Experts copied by all plans."""
        return sum(plan.num_copies for plan in self.plans)

    @property
    def num_bytes(self) -> int:
        """Bytes copied by all plans."""
        return sum(plan.num_bytes for plan in self.plans)

    def window_imbalance(self, batch_size: int, *, split: str = FIXED) -> Floats:
        """Imbalance, mean over layers and batches: float64 [num_windows].

        For a split per batch every batch must have been solved for.
        """
        values = self.levels[split, batch_size].imbalance.mean(1)
        windows = self.batch_windows[batch_size]
        result: Floats = np.bincount(windows, values) / np.bincount(windows)
        return result

    def part(self, windows: Ints, batch_size: int) -> Levels:
        """Levels under the fixed split of the batches in these scored windows."""
        inside = np.isin(self.batch_windows[batch_size], windows)
        levels = self.levels[FIXED, batch_size]
        return Levels(peak=levels.peak[inside], mean=levels.mean[inside])


@dataclass(frozen=True, slots=True, kw_only=True)
class Spread:
    """A figure over several seeds: mean, least and largest."""

    mean: float
    low: float
    high: float

    @classmethod
    def of(cls, values: list[float]) -> Spread:
        """Of one or more values."""
        return cls(mean=float(np.mean(values)), low=min(values), high=max(values))


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Comparison:
    """All runs on one trace.

    trace: its name. facts: what it is, in words. window_labels: by seed, the domain of each scored
    window. expert_load: tokens per expert over the scored windows of the first seed, int64
    [num_layers, num_experts]. notes: what was left out.
    """

    trace: str
    facts: Mapping[str, str]
    topology: Topology
    settings: ReplaySettings
    seeds: tuple[int, ...]
    layer_ids: tuple[int, ...]
    expert_load: Ints
    window_labels: Mapping[int, tuple[str | None, ...]]
    runs: tuple[Run, ...]
    notes: tuple[str, ...] = ()

    @property
    def groups(self) -> dict[tuple[str, str], tuple[Run, ...]]:
        """(planner, budget) -> its runs, one per seed, in order of the runs."""
        found: dict[tuple[str, str], list[Run]] = {}
        for run in self.runs:
            found.setdefault((run.planner, run.budget), []).append(run)
        return {key: tuple(runs) for key, runs in found.items()}

    @property
    def shown_layer(self) -> int:
        """Row of the layer that is worst under the linear placement: the one pictures show."""
        reference = self.runs[0]
        levels = reference.levels[FIXED, self.batch_of(reference)]
        return int(levels.imbalance.mean(0).argmax())

    def batch_of(self, run: Run) -> int:
        """The batch size for headlines: the main one; for a trace of counts the only one, 0."""
        main = self.settings.main_batch
        return main if (FIXED, main) in run.levels else 0

    def statistics(self, run: Run, split: str, batch_size: int) -> Balance:
        """Balance of a run under one split and batch size."""
        return balance(run.levels[split, batch_size], self.layer_ids)

    def by_label(self, run: Run) -> dict[str, float]:
        """Mean imbalance of each domain's windows (fixed split, main batch size)."""
        labels = self.window_labels[run.seed]
        size = self.batch_of(run)
        found = {}
        for name in sorted({label for label in labels if label is not None}):
            windows = np.array([i for i, label in enumerate(labels) if label == name])
            found[name] = float(run.part(windows, size).imbalance.mean())
        return found
