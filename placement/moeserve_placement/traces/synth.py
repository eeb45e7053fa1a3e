"""Synthetic routing traces with a stated imbalance that the trace really has.

Each kind describes which experts are popular in which span of tokens; how much more popular is
solved for. The trace is then drawn, its imbalance measured, and the strength corrected until every
layer is within ``tolerance`` of what was asked; a trace that misses it is an error, not a result.

============ ==================================================== =======================
kind         popularity                                           imbalance is that of
============ ==================================================== =======================
``zipf``     rank^-s, another order in every layer                experts, whole trace
``drift``    log-popularity is an Ornstein-Uhlenbeck process      experts, mean of windows
``hot-rank`` one rank of the linear placement is hot              ranks, whole trace
``rotating`` each rank in turn is hot for one window              ranks, mean of windows
``burst``    zipf of ``base_imbalance``; in some windows a few    experts, mean of the
             experts become hot                                   burst windows
============ ==================================================== =======================

Tokens are independent draws: real traces also have co-activation and runs within a sequence, which
``mix`` keeps by drawing real sequences.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from moeserve_placement.traces.format import narrow_ids
from moeserve_placement.traces.sampling import (
    inclusion,
    load_imbalance,
    sample_topk,
    solve_scale,
)
from moeserve_placement.traces.trace import (
    MAX_LAYERS,
    Array,
    RoutingTrace,
    TraceError,
    check_num_experts,
    count_experts,
)

_ATTEMPTS = 12
_MAX_CHOICES = 1 << 30
"""Expert ids of a trace: 2 GiB as they are kept, four times as much while a layer is drawn."""
_MAX_PATTERN = 1 << 27
"""Numbers of a popularity pattern, one per window, layer and expert: 1 GiB."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SynthSpec:
    """What to draw.

    imbalance: max / mean to reach, of experts or ranks as the kind says. tolerance: allowed
    relative distance of every layer from it. window_tokens: tokens of a window (drift, rotating,
    burst). num_ranks: ranks of the linear placement (hot-rank, rotating). rho: autocorrelation of
    log-popularity from window to window (drift). burst_share: share of the windows that are bursts;
    base_imbalance: imbalance of the others. sequence_length: tokens of each sequence.
    requests_per_s: rate of the Poisson arrivals.

    Raises:
        TraceError: a number is out of range.
    """

    num_tokens: int = 16384
    num_layers: int = 4
    num_experts: int = 64
    top_k: int = 8
    imbalance: float = 2.0
    tolerance: float = 0.05
    seed: int = 0
    window_tokens: int = 2048
    num_ranks: int = 8
    rho: float = 0.98
    burst_share: float = 0.25
    base_imbalance: float = 1.3
    sequence_length: int = 256
    requests_per_s: float = 1.0

    def __post_init__(self) -> None:
        check_num_experts(self.num_experts)
        self._check_sizes()
        if not 2 <= self.num_ranks <= self.num_experts:
            raise TraceError(f"num_ranks = {self.num_ranks}: must be in [2, {self.num_experts}]")
        for name, low, high in (
            ("imbalance", 1.0, np.inf),
            ("base_imbalance", 1.0, np.inf),
            ("tolerance", 0.0, 1.0),
            ("burst_share", 0.0, 1.0),
            ("requests_per_s", 0.0, np.inf),
        ):
            if not low < getattr(self, name) < high:
                raise TraceError(
                    f"{name} = {getattr(self, name)}: must be more than {low} and less than {high}"
                )
        if not 0 <= self.rho <= 1:
            raise TraceError(f"rho = {self.rho}: must be in [0, 1]")
        if self.seed < 0:
            raise TraceError(f"seed = {self.seed}: must be 0 or more")

    def _check_sizes(self) -> None:
        for name in ("num_tokens", "num_layers", "window_tokens", "sequence_length"):
            if getattr(self, name) < 1:
                raise TraceError(f"{name} = {getattr(self, name)}: must be at least 1")
        if not 1 <= self.top_k < self.num_experts:
            raise TraceError(f"top_k = {self.top_k}: must be in [1, {self.num_experts})")
        for name, most in (("num_layers", MAX_LAYERS), ("num_tokens", self._most_tokens)):
            if getattr(self, name) > most:
                raise TraceError(
                    f"{name} = {getattr(self, name)}: must be at most {most} "
                    f"(with num_layers = {self.num_layers}, top_k = {self.top_k}, num_experts = "
                    f"{self.num_experts}, window_tokens = {self.window_tokens})"
                )

    @property
    def _most_tokens(self) -> int:
        """Tokens whose choices, and whose windows, fit in memory."""
        choices = _MAX_CHOICES // (self.num_layers * self.top_k)
        windows = _MAX_PATTERN // (self.num_layers * self.num_experts)
        # The order in which experts are drawn takes a number per expert and block of 32 tokens.
        return min(choices, windows * self.window_tokens, 32 * _MAX_PATTERN // self.num_experts)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Check:
    """One stated imbalance: the mean over some spans must be ``target`` in every layer."""

    name: str
    target: float
    spans: Array


@dataclass(frozen=True, slots=True, kw_only=True)
class _Shape:
    """Which experts gain, by span of tokens.

    stops: [spans], end of each span. pattern, offset: [spans, layers, experts]; logits are
    offset + scale * pattern. groups: ranks of the experts where the imbalance is that of ranks.
    """

    stops: Array
    pattern: Array
    checks: tuple[_Check, ...]
    offset: Array | None = None
    groups: Array | None = None
    metadata: dict[str, str] = field(default_factory=dict)


def synthesize(kind: str, spec: SynthSpec) -> RoutingTrace:
    """A trace of one of ``KINDS``; its metadata states the imbalance asked for and realised.

    Raises:
        TraceError: no such kind; an imbalance that top-k routing, the pattern or the sampling noise
            of so few tokens does not allow.
    """
    if kind not in KINDS:
        raise TraceError(f"kind = {kind!r}: must be one of {', '.join(KINDS)}")
    rng = np.random.default_rng([spec.seed, 0])
    shape = KINDS[kind](spec, rng)
    layers, realised = [], []
    for layer in range(spec.num_layers):
        ids, found = _draw_layer(shape, layer, spec)
        layers.append(narrow_ids(ids, spec.num_experts))
        realised.append(found)
    num_sequences = -(-spec.num_tokens // spec.sequence_length)
    lengths = np.full(num_sequences, spec.sequence_length)
    lengths[-1] = spec.num_tokens - spec.sequence_length * (num_sequences - 1)
    times = np.cumsum(rng.exponential(1 / spec.requests_per_s, num_sequences))
    return RoutingTrace(
        topk_ids=np.stack(layers, axis=1),
        num_experts=spec.num_experts,
        layer_ids=tuple(range(spec.num_layers)),
        sequence_lengths=lengths,
        arrival_times_s=times,
        metadata=_metadata(kind, spec, shape, np.array(realised)),
    )


def _draw_layer(shape: _Shape, layer: int, spec: SynthSpec) -> tuple[Array, list[float]]:
    """Ids [num_tokens, top_k] of one layer and its realised imbalance for each check."""
    wanted = np.ones(len(shape.stops))
    for check in shape.checks:
        wanted[check.spans] = check.target
    aim = wanted.copy()
    for _ in range(_ATTEMPTS):
        ids, counts = _draw(shape, layer, spec, aim)
        measured = load_imbalance(counts, shape.groups)
        found = [float(measured[check.spans].mean()) for check in shape.checks]
        if all(
            abs(value - check.target) <= spec.tolerance * check.target
            for value, check in zip(found, shape.checks, strict=True)
        ):
            return ids, found
        for value, check in zip(found, shape.checks, strict=True):
            # Sampling noise adds to the maximum: aim lower by what the last draw was too high.
            ratio = (check.target - 1) / max(value - 1, 1e-9)
            aim[check.spans] = 1 + np.maximum(aim[check.spans] - 1, 1e-6) * min(ratio, 2.0)
    raise TraceError(_missed(shape, found, layer, spec))


def _draw(shape: _Shape, layer: int, spec: SynthSpec, aim: Array) -> tuple[Array, Array]:
    # The same random numbers in every attempt, so that only the strength changes.
    rng = np.random.default_rng([spec.seed, 1, layer])
    pattern = shape.pattern[:, layer]
    offset = 0.0 if shape.offset is None else shape.offset[:, layer]
    scale = solve_scale(pattern, aim, top_k=spec.top_k, offset=offset, groups=shape.groups)
    chances = inclusion(offset + scale[:, None] * pattern, spec.top_k)
    starts = [0, *shape.stops[:-1].tolist()]
    ids = [
        sample_topk(chance, int(stop) - start, rng=rng)
        for chance, start, stop in zip(chances, starts, shape.stops, strict=True)
    ]
    counts = [count_experts(part[:, None], spec.num_experts)[0] for part in ids]
    return np.concatenate(ids), np.stack(counts)


def _missed(shape: _Shape, found: list[float], layer: int, spec: SynthSpec) -> str:
    tokens = int(np.diff(shape.stops, prepend=0).min())
    parts = spec.num_experts if shape.groups is None else spec.num_ranks
    noise = 1 + np.sqrt(2 * np.log(parts) * parts / (tokens * spec.top_k))
    values = ", ".join(
        f"{check.name} = {check.target:.3g} became {value:.3g}"
        for value, check in zip(found, shape.checks, strict=True)
    )
    return (
        f"{values} in layer {layer}, outside tolerance = {spec.tolerance}: {tokens} tokens at "
        f"top_k = {spec.top_k} already have about {noise:.3g} by chance alone; ask for more "
        "tokens, a higher imbalance or a wider tolerance"
    )


def _metadata(kind: str, spec: SynthSpec, shape: _Shape, realised: Array) -> dict[str, str]:
    of = "ranks of the linear placement" if shape.groups is not None else "experts"
    facts = {"model": "synthetic", "synth_kind": kind, "synth_seed": str(spec.seed)}
    facts["synth_imbalance_of"] = of
    facts["synth_tolerance"] = f"{spec.tolerance:g}"
    for i, check in enumerate(shape.checks):
        low, high = realised[:, i].min(), realised[:, i].max()
        facts[f"synth_{check.name}"] = f"{check.target:g}"
        facts[f"synth_{check.name}_realised"] = f"{low:.4f} to {high:.4f} over layers"
    return facts | shape.metadata


def _zipf(spec: SynthSpec, rng: np.random.Generator) -> _Shape:
    return _Shape(
        stops=np.array([spec.num_tokens]),
        pattern=_zipf_pattern(spec, rng)[None],
        checks=(_Check(name="imbalance", target=spec.imbalance, spans=np.array([0])),),
    )


def _drift(spec: SynthSpec, rng: np.random.Generator) -> _Shape:
    stops = _stops(spec)
    states = [rng.standard_normal((spec.num_layers, spec.num_experts))]
    for _ in stops[1:]:
        step = rng.standard_normal(states[0].shape)
        states.append(spec.rho * states[-1] + np.sqrt(1 - spec.rho**2) * step)
    return _Shape(
        stops=stops,
        pattern=np.stack(states),
        checks=(_all_spans(spec, stops),),
        metadata={"synth_rho": f"{spec.rho:g}", "synth_window": str(spec.window_tokens)},
    )


def _hot_rank(spec: SynthSpec, rng: np.random.Generator) -> _Shape:
    groups = linear_ranks(spec.num_experts, spec.num_ranks)
    hot = int(rng.integers(spec.num_ranks))
    stops = np.array([spec.num_tokens])
    return _Shape(
        stops=stops,
        pattern=_hot_pattern(spec, groups, [hot]),
        checks=(_all_spans(spec, stops),),
        groups=groups,
        metadata={"synth_ranks": str(spec.num_ranks), "synth_hot_rank": str(hot)},
    )


def _rotating(spec: SynthSpec, rng: np.random.Generator) -> _Shape:
    groups = linear_ranks(spec.num_experts, spec.num_ranks)
    stops = _stops(spec)
    first = int(rng.integers(spec.num_ranks))
    hot = [(first + i) % spec.num_ranks for i in range(len(stops))]
    return _Shape(
        stops=stops,
        pattern=_hot_pattern(spec, groups, hot),
        checks=(_all_spans(spec, stops),),
        groups=groups,
        metadata={"synth_ranks": str(spec.num_ranks), "synth_window": str(spec.window_tokens)},
    )


def _burst(spec: SynthSpec, rng: np.random.Generator) -> _Shape:
    if spec.imbalance <= spec.base_imbalance:
        raise TraceError(
            f"imbalance = {spec.imbalance}: must be more than base_imbalance = "
            f"{spec.base_imbalance}, or a burst is none"
        )
    stops = _stops(spec)
    if len(stops) < 2:
        raise TraceError(f"window_tokens = {spec.window_tokens}: must leave two windows or more")
    num_bursts = min(max(1, round(spec.burst_share * len(stops))), len(stops) - 1)
    bursts = np.sort(rng.choice(len(stops), num_bursts, replace=False))
    base = _zipf_pattern(spec, rng)
    quiet = np.setdiff1d(np.arange(len(stops)), bursts)
    scale = solve_scale(base, np.full(spec.num_layers, spec.base_imbalance), top_k=spec.top_k)
    pattern = np.tile(base, (len(stops), 1, 1))
    offset = np.zeros_like(pattern)
    for span in bursts:
        for layer in range(spec.num_layers):
            # A burst adds to the usual popularity rather than replacing it.
            offset[span, layer] = scale[layer] * base[layer]
            hot = rng.choice(spec.num_experts, max(1, spec.num_experts // 32), replace=False)
            pattern[span, layer] = 0
            pattern[span, layer, hot] = 1
    return _Shape(
        stops=stops,
        pattern=pattern,
        offset=offset,
        checks=(
            _Check(name="imbalance", target=spec.imbalance, spans=bursts),
            _Check(name="base_imbalance", target=spec.base_imbalance, spans=quiet),
        ),
        metadata={
            "synth_burst_windows": ",".join(map(str, bursts.tolist())),
            "synth_window": str(spec.window_tokens),
        },
    )


KINDS: dict[str, Callable[[SynthSpec, np.random.Generator], _Shape]] = {
    "zipf": _zipf,
    "drift": _drift,
    "hot-rank": _hot_rank,
    "rotating": _rotating,
    "burst": _burst,
}
"""Kind -> its popularity."""


def linear_ranks(num_experts: int, num_ranks: int) -> Array:
    """The rank of each expert when experts go to ranks in order: int64 [num_experts]."""
    share, extra = divmod(num_experts, num_ranks)
    return np.repeat(np.arange(num_ranks), [share + (rank < extra) for rank in range(num_ranks)])


def _stops(spec: SynthSpec) -> Array:
    """Ends of the windows; a remainder shorter than half a window joins the last one."""
    count = max(1, round(spec.num_tokens / spec.window_tokens))
    stops = np.arange(1, count + 1) * spec.window_tokens
    stops[-1] = spec.num_tokens
    return stops


def _all_spans(spec: SynthSpec, stops: Array) -> _Check:
    return _Check(name="imbalance", target=spec.imbalance, spans=np.arange(len(stops)))


def _zipf_pattern(spec: SynthSpec, rng: np.random.Generator) -> Array:
    """[layers, experts]: minus the logarithm of each expert's rank in popularity."""
    order = -np.log(np.arange(1, spec.num_experts + 1))
    return np.stack([rng.permutation(order) for _ in range(spec.num_layers)])


def _hot_pattern(spec: SynthSpec, groups: Array, hot: list[int]) -> Array:
    one = np.stack([groups == rank for rank in hot]).astype(np.float64)
    return np.repeat(one[:, None], spec.num_layers, axis=1)
