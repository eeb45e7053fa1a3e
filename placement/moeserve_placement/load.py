"""What is known of the load: averages, recent windows and the distinct past ones.

A planner asks for *scenarios*: load distributions it should do well on, with weights. Averages
alone hide that traffic comes in kinds (a plan for the mean of four domains serves none of them);
single windows are noisy. So distinct windows are kept in a small reservoir, and a window counts as
distinct only by more than the sampling noise of its own size.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from moeserve_placement.checks import check_integer, check_number
from moeserve_placement.placement import PlacementError

Floats = NDArray[np.float64]
_JUDGING = 0.2  # weight of the newest window in what is known of prediction errors
_TRUST = 1.25
_RETURNS = 0.1
_OLD = 2  # windows since a kept one was last met, from which meeting it again is a return
_SMALLEST_TOTAL = 1e-9  # below this a layer has no load that could be told from rounding
_LARGEST_SUM = 2.0**62


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Scenarios:
    """Load distributions to plan for.

    loads: float64 [num_scenarios, num_layers, num_experts], every layer sums to 1.
    weights: float64 [num_scenarios], sums to 1. names: where each comes from.
    """

    loads: Floats
    weights: Floats
    names: tuple[str, ...]

    @property
    def mean(self) -> Floats:
        """The weighted mean distribution: float64 [num_layers, num_experts]."""
        return np.tensordot(self.weights, self.loads, axes=1)


class LoadHistory:
    """Load of the past windows, in the forms that planners ask for.

    layer_ids: model layer indices, the order of the rows of every array.
    num_experts: logical experts per layer.
    fast_weight, slow_weight: weight of the newest window in the two averages.
    window: recent windows kept as they are (``recent``), as engines' sliding windows do.
    reservoir_size: distinct past windows kept; 0 for none.
    novelty: total variation distance, beyond sampling noise, from which a window is distinct.
    prior_tokens: pseudo-counts per expert that pull a sparse window towards the slow average.

    Raises:
        PlacementError: an option is out of range, or a layer comes twice.
    """

    def __init__(
        self,
        layer_ids: Sequence[int],
        num_experts: int,
        *,
        fast_weight: float = 0.5,
        slow_weight: float = 0.05,
        window: int = 16,
        reservoir_size: int = 5,
        novelty: float = 0.05,
        prior_tokens: float = 1.0,
    ) -> None:
        self.layer_ids = _checked_layers(layer_ids)
        self.num_experts = check_integer("num_experts", num_experts, low=1)
        check_number("fast_weight", fast_weight, low=0, high=1, above=True)
        check_number("slow_weight", slow_weight, low=0, high=1, above=True)
        check_integer("window", window, low=1)
        check_integer("reservoir_size", reservoir_size, low=0)
        check_number("novelty", novelty, low=0)
        check_number("prior_tokens", prior_tokens, low=0, high=_LARGEST_SUM)
        self.num_windows = 0
        self.num_empty_windows = 0
        self._fast = _Average(fast_weight)
        self._slow = _Average(slow_weight)
        self._pairs = _Average(slow_weight)
        self._pair_load = _Average(slow_weight)  # windows without pairs are not in it
        self._recent: deque[Floats] = deque(maxlen=window)
        self._reservoir = _Reservoir(reservoir_size, novelty)
        self._errors = {"fast": _Average(_JUDGING), "slow": _Average(_JUDGING)}
        self._returns = _Average(_JUDGING)
        self._prior_tokens = prior_tokens

    @property
    def shape(self) -> tuple[int, int]:
        """(num_layers, num_experts), the shape of one window."""
        return len(self.layer_ids), self.num_experts

    def observe(self, counts: NDArray[np.generic], coactivation: Floats | None = None) -> None:
        """Adds one window.

        counts: tokens per expert, [num_layers, num_experts], finite and not negative. A window of
        zeros only counts as empty and changes nothing else.
        coactivation: tokens that chose both experts, [num_layers, num_experts, num_experts],
        symmetric; its diagonal is ignored.

        Raises:
            PlacementError: wrong shape, or a value that is negative, NaN or infinite.
        """
        window = _checked("counts", counts, self.shape)
        pairs = None
        if coactivation is not None:
            pairs = _checked("coactivation", coactivation, (*self.shape, self.num_experts))
        if not window.any():
            self.num_empty_windows += 1
            return
        self.num_windows += 1
        self._judge(window)
        self._fast.add(window)
        self._slow.add(window)
        if pairs is not None:
            self._pairs.add(pairs)
            self._pair_load.add(window)
        self._recent.append(window)
        self._reservoir.add(window)

    def _judge(self, window: Floats) -> None:
        """Notes how well each thing known so far would have predicted this window."""
        if not self._recent:
            return
        errors = {"fast": _distance(self.fast, window), "slow": _distance(self.slow, window)}
        for name, error in errors.items():
            self._errors[name].add(np.array(error))
        old = self._reservoir.unseen_for(_OLD)
        if old:
            nearest = min(_distance(kept, window) for kept in old)
            near = min(_distance(self.last, window), *errors.values())
            self._returns.add(np.array(float(nearest < near)))

    @property
    def is_empty(self) -> bool:
        """Whether no window with any load has been seen."""
        return self.num_windows == 0

    @property
    def last(self) -> Floats:
        """The newest window's counts: float64 [num_layers, num_experts]; zeros when empty."""
        return self._recent[-1] if self._recent else np.zeros(self.shape)

    @property
    def recent(self) -> Floats:
        """The recent windows, oldest first: float64 [<= window, num_layers, num_experts]."""
        return np.stack(self._recent) if self._recent else np.zeros((0, *self.shape))

    @property
    def mean(self) -> Floats:
        """Mean of the recent windows, the one load vector that engines feed to EPLB."""
        return self.recent.mean(0) if self._recent else np.zeros(self.shape)

    @property
    def fast(self) -> Floats:
        """The fast average of counts: float64 [num_layers, num_experts]; zeros when empty."""
        return self._fast.value(self.shape)

    @property
    def slow(self) -> Floats:
        """The slow average of counts: float64 [num_layers, num_experts]; zeros when empty."""
        return self._slow.value(self.shape)

    @property
    def has_coactivation(self) -> bool:
        """Whether pair counts were given with a window."""
        return self._pairs.weight > 0

    @property
    def coactivation(self) -> Floats | None:
        """Slow average of pair counts [layers, experts, experts]; None if none were given."""
        if not self.has_coactivation:
            return None
        pairs = self._pairs.value((*self.shape, self.num_experts))
        pairs[:, np.arange(self.num_experts), np.arange(self.num_experts)] = 0.0
        return pairs

    @property
    def coactivation_load(self) -> Floats | None:
        """Counts over the same windows as ``coactivation``, to tell pairs per token."""
        return self._pair_load.value(self.shape) if self.has_coactivation else None

    @property
    def busy_layers(self) -> NDArray[np.bool_]:
        """Layers that had any load: bool [num_layers]."""
        busy: NDArray[np.bool_] = self.slow.sum(-1) > _SMALLEST_TOTAL
        return busy

    def scenarios(self) -> Scenarios:
        """Load distributions to plan for: trusted averages and the reservoir, weighted alike.

        Past kinds of traffic are left out where they do not come back (``kinds_return``). Where
        there are several, one more is expected that has not been seen: "unknown", of which nothing
        is known, so that every expert is as likely. Without it a plan that fits the known kinds
        is worse than EPLB's for a new one. Alike,
        because kinds of traffic should do well by how bad they can get, not by how often they
        come; a smooth maximum takes little notice of weights anyway. A layer that a window
        says nothing about takes the slow average there; a layer without any load is uniform.

        Raises:
            PlacementError: no window with load has been observed.
        """
        if self.is_empty:
            raise PlacementError("load history: is empty, observe a window with load first")
        used = {name: getattr(self, name) for name in self.trusted_averages}
        if self.kinds_return:
            kept = self._reservoir.windows
            used |= {f"past {i}": window for i, window in enumerate(kept)}
            if len(kept) > 1:
                used["unknown"] = np.broadcast_to(self.slow.mean(-1, keepdims=True), self.shape)
        return Scenarios(
            loads=self.shrunk(np.stack(list(used.values()))),
            weights=np.full(len(used), 1.0 / len(used)),
            names=tuple(used),
        )

    @property
    def trusted_averages(self) -> tuple[str, ...]:
        """Of 'fast' and 'slow' those that predict the next window about as well as the better one.

        Under steady drift the slow average is stale; where kinds of traffic alternate the fast one
        is only the last of them.
        """
        errors = {n: float(e.value(())) for n, e in self._errors.items() if e.weight}
        best = min(errors.values(), default=0.0)
        return tuple(n for n in self._errors if errors.get(n, 0.0) <= _TRUST * best)

    @property
    def kinds_return(self) -> bool:
        """Whether past kinds of traffic come back, so that the reservoir is worth planning for.

        A window tells if one not seen for a while predicts it better than the averages and the
        window before do. True until there is evidence; under drift without return it is soon False.
        """
        return not self._returns.weight or float(self._returns.value(())) >= _RETURNS

    def shrunk(self, counts: Floats) -> Floats:
        """Counts [..., num_layers, num_experts] as distributions, sparse ones pulled to the mean.

        Posterior mean under a Dirichlet prior centred on the slow average, with ``prior_tokens``
        pseudo-counts per expert; the slow average itself is shrunk to uniform in the same way.
        """
        pseudo = self._prior_tokens * self.num_experts
        uniform = np.full(self.num_experts, 1.0 / self.num_experts)
        prior = _posterior(self.slow, uniform, pseudo)
        return _posterior(counts, prior, pseudo)


class _Average:
    """An exponential average with bias correction: the first windows count as a plain mean."""

    def __init__(self, newest: float) -> None:
        self.newest = newest
        self.weight = 0.0
        self.total: Floats | None = None

    def add(self, values: Floats) -> None:
        self.weight += self.newest * (1.0 - self.weight)
        total = np.zeros_like(values) if self.total is None else self.total
        self.total = total + self.newest * (values - total)

    def value(self, shape: tuple[int, ...]) -> Floats:
        return np.zeros(shape) if self.total is None else self.total / self.weight


class _Reservoir:
    """Distinct past windows as counts; a window close to a kept one is merged into it."""

    def __init__(self, size: int, novelty: float) -> None:
        self.size = size
        self.novelty = novelty
        self.windows: list[Floats] = []
        self.recurrence: list[float] = []
        self.met: list[int] = []  # the number of the window that last came to it
        self.number = 0

    def add(self, window: Floats) -> None:
        self.number += 1
        if not self.size:
            return
        distances = [_distance_beyond_noise(window, kept) for kept in self.windows]
        if distances and min(distances) <= self.novelty:
            self._merge(int(np.argmin(distances)), window, 1.0)
            return
        self.windows.append(window)
        self.recurrence.append(1.0)
        self.met.append(self.number)
        if len(self.windows) > self.size:
            self._merge_closest()

    def _merge(self, index: int, window: Floats, recurrence: float) -> None:
        """Adds counts, but lets the older ones fade so that a kind of traffic may drift."""
        self.windows[index] = 0.75 * self.windows[index] + window
        self.recurrence[index] += recurrence
        self.met[index] = self.number

    def unseen_for(self, count: int) -> list[Floats]:
        """Kept windows that none of the last ``count`` windows came to."""
        pairs = zip(self.windows, self.met, strict=True)
        return [window for window, met in pairs if self.number - met >= count]

    def _merge_closest(self) -> None:
        pairs = [(i, j) for j in range(len(self.windows)) for i in range(j)]
        i, j = min(pairs, key=lambda pair: _distance(*(self.windows[at] for at in pair)))
        window, recurrence, met = self.windows.pop(j), self.recurrence.pop(j), self.met.pop(j)
        met = max(met, self.met[i])
        self._merge(i, window, recurrence)
        self.met[i] = met


def _distance(first: Floats, second: Floats) -> float:
    """Total variation distance of two windows, mean over the layers that both have load in."""
    totals = np.stack([first.sum(-1), second.sum(-1)])
    both = (totals > _SMALLEST_TOTAL).all(0)
    if not both.any():
        return 0.0
    p = first[both] / totals[0, both, None]
    q = second[both] / totals[1, both, None]
    return float(0.5 * np.abs(p - q).sum(-1).mean())


def _distance_beyond_noise(first: Floats, second: Floats) -> float:
    """The distance less what two samples of one distribution would show on average.

    For multinomial samples of sizes n and m of a distribution p the expected distance is
    sum_e sqrt(p_e (1/n + 1/m) / (2 pi)), from the normal approximation of each count.
    """
    totals = np.stack([first.sum(-1), second.sum(-1)])
    both = (totals > _SMALLEST_TOTAL).all(0)
    if not both.any():
        return 0.0
    pooled = (first + second)[both]
    pooled = pooled / pooled.sum(-1, keepdims=True)
    inverse = (1.0 / totals[:, both]).sum(0)
    noise = np.sqrt(pooled * inverse[:, None] / (2 * math.pi)).sum(-1)
    return _distance(first, second) - float(noise.mean())


def _posterior(counts: Floats, prior: Floats, pseudo: float) -> Floats:
    totals = counts.sum(-1, keepdims=True)
    empty = totals <= _SMALLEST_TOTAL
    pulled = np.where(empty, 1.0, totals + pseudo)
    result: Floats = np.where(empty, prior, (counts + pseudo * prior) / pulled)
    normal: Floats = result / result.sum(-1, keepdims=True)
    return normal


def _checked(name: str, values: NDArray[np.generic], shape: tuple[int, ...]) -> Floats:
    array = np.asarray(values)
    if array.shape != shape:
        raise PlacementError(f"{name}: has shape {array.shape}, must have {shape}")
    if array.dtype.kind not in "iuf":
        raise PlacementError(f"{name}: has dtype {array.dtype}, must be integer or floating")
    result = array.astype(np.float64)
    if not np.isfinite(result).all():
        raise PlacementError(f"{name}: holds NaN or infinite values, must be finite")
    if (result < 0).any():
        raise PlacementError(f"{name}: holds {result.min()}, must be 0 or more")
    if result.sum() > _LARGEST_SUM:
        raise PlacementError(f"{name}: sums to {result.sum():.3g}, must be at most 2^62")
    return result


def _checked_layers(layer_ids: Sequence[int]) -> tuple[int, ...]:
    layers = tuple(check_integer("layer_ids", layer, low=0) for layer in layer_ids)
    if not layers or len(set(layers)) < len(layers):
        raise PlacementError(f"layer_ids = {layers}: must be one or more layers, each once")
    return layers
