"""The paging study: policies, with and without prefetch, over batch sizes and cache capacities.

Sequences are split at random into training and scored ones. Priors, regressions, count tables and
memories start from the training ones; of the scored ones they see what is past, never more. The two
bounds, ``belady`` and ``oracle``, are the exception: they know the future.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from moeserve_placement.paging import reuse
from moeserve_placement.paging.belady import Belady, Oracle
from moeserve_placement.paging.limits import reason_against
from moeserve_placement.paging.neighbours import NeighbourPredictor
from moeserve_placement.paging.policies import EvictionPolicy, FastSlow, Lfu, Lru, Random
from moeserve_placement.paging.predictors import CountTablePredictor, Predictor
from moeserve_placement.paging.prefetch import PrefetchRule
from moeserve_placement.paging.results import PagingResult
from moeserve_placement.paging.reuse import LinearReuse
from moeserve_placement.paging.shared_pool import simulate_pool
from moeserve_placement.paging.simulate import simulate
from moeserve_placement.paging.stall import StallModel
from moeserve_placement.paging.steps import (
    MAX_BATCH,
    DecodeSteps,
    decode_steps,
    split_sequences,
)
from moeserve_placement.traces.trace import MAX_EXPERTS, RoutingTrace

POLICIES = ("random", "lru", "lfu", "fast-slow", "reuse", "belady")
"""Eviction policies for one cache per layer. ``lru`` and ``belady`` always run: others are measured
between them."""
PREDICTORS = ("none", "count-tables", "neighbours", "oracle")
"""What prefetch rests on; ``oracle`` knows the future and is a bound."""
POOL_POLICIES = ("lru", "layer-lru", "belady")
"""Eviction policies for one pool over all layers."""

Progress = Callable[[str, int, int], None]
"""Called with what runs now, the steps done and the steps in all."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StudyOptions:
    """What to run.

    capacities: experts per layer. batches: sequences decoded together.
    policies, predictors: names out of POLICIES and PREDICTORS; each predictor but "none" runs on
        top of the last of the policies that is not belady; "neighbours" also on top of lru.
    shared_pool: also compare policies for one pool of capacity x layers experts.
    horizon: layer steps that prefetch looks ahead; fewer where the model has fewer layers.
    train_share, seed: the split.

    Raises:
        ValueError: a setting is out of range or names nothing.
    """

    capacities: tuple[int, ...]
    batches: tuple[int, ...] = (1, 8, 32)
    policies: tuple[str, ...] = POLICIES
    predictors: tuple[str, ...] = PREDICTORS
    shared_pool: bool = True
    stall: StallModel = field(default_factory=StallModel)
    rule: PrefetchRule = field(default_factory=PrefetchRule)
    horizon: int = 4
    train_share: float = 0.5
    seed: int = 0

    def __post_init__(self) -> None:
        _check_each("capacity", self.capacities, most=MAX_EXPERTS)
        _check_each("batch", self.batches, most=MAX_BATCH)
        _check_names("policy", self.policies, POLICIES)
        _check_names("predictor", self.predictors, PREDICTORS)
        if self.horizon < 1:
            raise ValueError(f"horizon = {self.horizon}: must be at least 1 layer step")
        if self.seed < 0:
            raise ValueError(f"seed = {self.seed}: must be 0 or more")


@dataclass(frozen=True, slots=True, kw_only=True)
class StudyRow:
    """A result beside LRU's and Belady's of the same caches.

    gap_closed: share of the hits between LRU (0) and Belady's bound (1); None: there is no gap.
        Above 1 with prefetch means more than any eviction policy could give.
    stall_ratio, stall_us_ratio: stalls and time stalled, in units of LRU's; None: LRU has none.
    shared_pool: one pool over all layers instead of one cache per layer.
    """

    result: PagingResult
    gap_closed: float | None
    stall_ratio: float | None
    stall_us_ratio: float | None
    shared_pool: bool = False

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        result = self.result
        return {
            "policy": result.policy,
            "predictor": result.predictor,
            "shared_pool": self.shared_pool,
            "capacity": result.capacity,
            "batch": result.batch,
            "tokens_per_step": result.num_tokens / result.num_steps,
            "num_tokens": result.num_tokens,
            "experts_per_layer_step": result.requests_per_layer_step,
            "hit_rate": result.hit_rate,
            "gap_closed": self.gap_closed,
            "precision": result.precision,
            "coverage": result.coverage,
            "prefetches": result.prefetches,
            "unused_prefetches": result.prefetches - result.useful_prefetches,
            "late": result.late,
            "misses": result.misses,
            "fetches_per_token": result.fetches_per_token,
            "stalls_per_token": result.stalls_per_token,
            "stall_us_per_token": result.stall_us_per_token,
            "stall_ratio_to_lru": self.stall_ratio,
            "stall_us_ratio_to_lru": self.stall_us_ratio,
            "policy_us_per_token": result.policy_us_per_token,
        }


def run_study(
    trace: RoutingTrace, options: StudyOptions, *, progress: Progress | None = None
) -> list[StudyRow]:
    """Rows by batch, then capacity, then policy.

    Raises:
        ValueError: the trace has fewer than two sequences, more experts than a policy takes, or is
            one that a predictor can not run on (see ``left_out_predictors``).
    """
    for name, reason in left_out_predictors(trace, options).items():
        raise ValueError(f"predictor = {name!r}: {reason}")
    training, scored = split_sequences(trace, train_share=options.train_share, seed=options.seed)
    rows: list[StudyRow] = []
    for batch in options.batches:
        rows += _BatchStudy(
            decode_steps(training, batch=batch),
            decode_steps(scored, batch=batch),
            options,
            progress,
        ).rows()
    return rows


def default_policies(num_experts: int) -> tuple[str, ...]:
    """All policies that can run with this many experts."""
    return tuple(name for name in POLICIES if name != "reuse" or num_experts <= reuse.MAX_EXPERTS)


def left_out_predictors(trace: RoutingTrace, options: StudyOptions) -> dict[str, str]:
    """Predictors of ``options`` that can not run on the trace, and why."""
    lanes = min(max(options.batches), trace.num_sequences)
    reasons = {
        name: reason_against(
            name,
            num_layers=trace.num_layers,
            num_experts=trace.num_experts,
            horizon=options.horizon,
            lanes=lanes,
        )
        for name in options.predictors
    }
    return {name: reason for name, reason in reasons.items() if reason is not None}


class _BatchStudy:
    """All runs of one batch size."""

    def __init__(
        self,
        training: DecodeSteps,
        scored: DecodeSteps,
        options: StudyOptions,
        progress: Progress | None,
    ) -> None:
        self._training, self._scored = training, scored
        self._options, self._progress = options, progress

    def rows(self) -> list[StudyRow]:
        """Rows of the layer caches, then of the pool, by capacity."""
        options = self._options
        runs = [results for name in self._policies() for results in self._run([name], "none")]
        for predictor in options.predictors:
            if predictor != "none":
                runs += self._run(self._prefetched(predictor), predictor)
        rows = _compare(runs)
        if options.shared_pool:
            pool = [self._run_pool(name) for name in POOL_POLICIES]
            rows += _compare(pool, shared_pool=True)
        return rows

    def _policies(self) -> list[str]:
        """Asked for, plus the two that others are measured by, in the order of POLICIES."""
        asked = {*self._options.policies, "lru", "belady"}
        return [name for name in POLICIES if name in asked]

    def _prefetched(self, predictor: str) -> list[str]:
        best = [name for name in self._policies() if name != "belady"][-1]
        return list(dict.fromkeys(["lru", best])) if predictor == "neighbours" else [best]

    def _run(self, policies: list[str], predictor: str) -> list[list[PagingResult]]:
        label = " and ".join(policies) + ("" if predictor == "none" else f" + {predictor}")
        report = self._reporter(label)
        return simulate(
            self._scored,
            [self._policy(name) for name in policies],
            capacities=self._options.capacities,
            stall=self._options.stall,
            predictor=self._predictor(predictor),
            rule=self._options.rule,
            progress=report,
        )

    def _run_pool(self, policy: str) -> list[PagingResult]:
        return simulate_pool(
            self._scored,
            policy,
            capacities=self._options.capacities,
            stall=self._options.stall,
            progress=self._reporter(f"pool {policy}"),
        )

    def _reporter(self, label: str) -> Callable[[int], None] | None:
        progress, total = self._progress, self._scored.num_steps
        if progress is None:
            return None
        done = 0
        name = f"batch {self._scored.batch}: {label}"
        progress(name, 0, total)

        def report(steps: int) -> None:
            nonlocal done
            done += steps
            progress(name, done, total)

        return report

    def _policy(self, name: str) -> EvictionPolicy:
        num_layers, num_experts = self._scored.num_layers, self._scored.num_experts
        if name == "random":
            return Random(seed=self._options.seed)
        if name == "lru":
            return Lru(num_layers, num_experts)
        if name == "lfu":
            return Lfu(num_layers, num_experts)
        if name == "fast-slow":
            return FastSlow(self._training.used.mean(axis=0))
        return LinearReuse(self._training) if name == "reuse" else Belady(self._scored)

    def _predictor(self, name: str) -> Predictor | None:
        if name == "none":
            return None
        horizon = min(self._options.horizon, self._scored.num_layers - 1)
        if name == "neighbours":
            batch = self._scored.batch
            return NeighbourPredictor(self._training, batch=batch, horizon=horizon)
        if name == "oracle":
            return Oracle(self._scored, horizon=horizon)
        return CountTablePredictor(self._training, horizon=horizon)


def _compare(runs: Sequence[list[PagingResult]], *, shared_pool: bool = False) -> list[StudyRow]:
    """Rows by capacity; ``runs`` hold one result per capacity each."""
    rows = []
    for results in zip(*runs, strict=True):
        alone = {result.policy: result for result in results if result.predictor is None}
        lru, bound = alone["lru"], alone["belady"]
        gap = bound.hits - lru.hits
        rows += [
            StudyRow(
                result=result,
                gap_closed=(result.hits - lru.hits) / gap if gap else None,
                stall_ratio=result.stalls / lru.stalls if lru.stalls else None,
                stall_us_ratio=result.stall_us / lru.stall_us if lru.stall_us else None,
                shared_pool=shared_pool,
            )
            for result in results
        ]
    return rows


def _check_each(setting: str, values: tuple[int, ...], *, most: int) -> None:
    if not values:
        raise ValueError(f"{setting}: give at least one")
    for value in values:
        if value < 1:
            raise ValueError(f"{setting} = {value}: must be at least 1")
        if value > most:
            raise ValueError(f"{setting} = {value}: must be at most {most}")


def _check_names(setting: str, names: tuple[str, ...], known: tuple[str, ...]) -> None:
    for name in names:
        if name not in known:
            raise ValueError(f"{setting} = {name!r}: must be one of {', '.join(known)}")
