"""Routers for benchmarks: experts are chosen by a made-up load instead of by the model's gate.

Each layer walks through a table of rows of k different experts; over a whole table every expert is
chosen exactly as often as the workload says. An expert owns an interval of the table's rows (laid
end to end and wrapped, McNaughton's rule), and rows are visited in steps of about the golden ratio,
so that short batches come close to the shares too. Ranks and layers start at different rows.

============= ======================================================= =========================
workload      what it does, in every layer                            number, and its default
============= ======================================================= =========================
balanced      all experts alike                                       none
zipf          popularity rank^-s, another order in every layer        s, 1.2
hot-expert    one expert is chosen by this share of the tokens        share, 1
hot-rank      this share of the load is on the experts that the       share, 1
              linear placement gives to rank 0
spread-hot    one expert of every rank is hot, together they have     share, 0.5
              this share of the load (or all that top-k allows)
empty-rank    the experts of rank 0 get nothing                       none
rotating      each rank in turn has all load for so many steps        steps, 256
burst         balanced; hot-rank in the last of every four spans of   steps, 256
              so many steps
============= ======================================================= =========================
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch

from moeserve_placement.traces.sampling import inclusion
from moeserve_placement.traces.synth import linear_ranks

_TABLE_ROWS = 4096  # about; shares are exact to one row
_GOLDEN = (math.sqrt(5) - 1) / 2


@dataclass(frozen=True, slots=True, kw_only=True)
class _Shape:
    """What a workload is made for."""

    num_layers: int
    num_experts: int
    top_k: int
    rank_of: np.ndarray  # int64 [num_experts], of the linear placement
    number: float


@dataclass(frozen=True, slots=True, kw_only=True)
class ForcedRouting:
    """A workload for one model and number of ranks.

    layers: model layer indices of the MoE layers. chances: float64 [num_phases, num_layers,
    num_experts], share of a layer's tokens that choose an expert; a row sums to ``top_k``.
    phase_steps: steps of a phase; phases follow each other in a circle. num_ranks: of the
    placement that is meant.
    """

    workload: str
    layers: tuple[int, ...]
    top_k: int
    num_ranks: int
    chances: np.ndarray
    phase_steps: int

    def phase(self, step: int) -> int:
        """The phase of the step that is the ``step``-th since start, from 0."""
        return step // self.phase_steps % len(self.chances)

    def router(self, layer: int, rank: int) -> ForcedRouter:
        """The router of one layer on one rank."""
        row = self.layers.index(layer)
        tables = tuple(table_of(chances[row], self.top_k) for chances in self.chances)
        num_rows = tables[0].shape[0]
        shift = rank / self.num_ranks + row / len(self.layers) / self.num_ranks
        return ForcedRouter(self, tables, start=int(shift * num_rows))


class ForcedRouter:
    """Stands in for the gate of one layer; see ``router.Router``."""

    def __init__(
        self, routing: ForcedRouting, tables: tuple[torch.Tensor, ...], *, start: int
    ) -> None:
        """tables: int64 [num_rows, top_k] by phase; start: the first token's place in them."""
        self._routing = routing
        self._tables = tables
        self._place = start
        self._step = 0

    def __call__(self, hidden_states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """[T, H] -> topk_weights float32 [T, k], all 1 / k, topk_ids int64 [T, k]."""
        table = self._tables[self._routing.phase(self._step)]
        num_tokens = hidden_states.shape[0]
        places = (torch.arange(num_tokens) + self._place) % table.shape[0]
        self._place = (self._place + num_tokens) % table.shape[0]
        self._step += 1
        weights = torch.full((num_tokens, table.shape[1]), 1.0 / table.shape[1])
        return weights, table[places]


def make_routing(
    workload: str, *, layers: tuple[int, ...], num_experts: int, top_k: int, num_ranks: int
) -> ForcedRouting:
    """The routing that ``workload`` names, such as ``zipf:1.2``.

    Raises:
        ValueError: no such workload, a number that is out of range, or experts too few for top_k;
            the text names the setting.
    """
    name, number = _parse(workload)
    shape = _Shape(
        num_layers=len(layers),
        num_experts=num_experts,
        top_k=top_k,
        rank_of=linear_ranks(num_experts, num_ranks),
        number=number,
    )
    chances = WORKLOADS[name].chances(shape)
    if chances.max() > 1 + 1e-9 or not np.allclose(chances.sum(-1), top_k):
        raise ValueError(
            f"force_routing = {workload!r}: can not be with top_k = {top_k} of {num_experts} "
            f"experts on {num_ranks} ranks, as a token chooses {top_k} different experts"
        )
    return ForcedRouting(
        workload=workload,
        layers=layers,
        top_k=top_k,
        num_ranks=num_ranks,
        chances=np.minimum(chances, 1.0),
        phase_steps=int(number) if len(chances) > 1 else 1,
    )


def table_of(chances: np.ndarray, top_k: int) -> torch.Tensor:
    """Rows of ``top_k`` different experts in the order they are visited, int64 [num_rows, top_k].

    chances: float64 [num_experts], at most 1, sum ``top_k``. Expert e is in ``chances[e]`` of the
    rows, rounded to whole rows.
    """
    num_rows = chances.size * max(1, _TABLE_ROWS // chances.size)
    quotas = _quotas(chances, num_rows, top_k)
    filled = np.repeat(np.arange(chances.size), quotas).reshape(top_k, num_rows)
    # Every row comes up once where step and number of rows have no common divisor.
    near = range(round(num_rows * _GOLDEN), num_rows + 1)
    stride = next(step for step in near if math.gcd(step, num_rows) == 1)
    order = np.arange(num_rows) * stride % num_rows
    return torch.from_numpy(np.ascontiguousarray(filled.T[order]))


def _quotas(chances: np.ndarray, num_rows: int, top_k: int) -> np.ndarray:
    """Rows of each expert, int64, sum ``num_rows * top_k``, largest remainders rounded up."""
    exact = np.round(chances * num_rows, 6)
    quotas = np.floor(exact).astype(np.int64)
    missing = num_rows * top_k - int(quotas.sum())
    quotas[np.argsort(quotas - exact, kind="stable")[:missing]] += 1
    assert missing >= 0 and quotas.max() <= num_rows and quotas.sum() == num_rows * top_k
    return quotas


def _parse(workload: str) -> tuple[str, float]:
    """Its name and number, 0 where it has none."""
    name, colon, text = workload.partition(":")
    if name not in WORKLOADS:
        known = ", ".join(WORKLOADS)
        raise ValueError(f"force_routing = {workload!r}: must start with one of {known}")
    low, high = WORKLOADS[name].limits
    if not colon:
        return name, WORKLOADS[name].default or 0.0
    if WORKLOADS[name].default is None:
        raise ValueError(f"force_routing = {workload!r}: {name} takes no number")
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if not low <= number <= high or (high > 1e6 and number != int(number)):
        kind = "a whole number" if high > 1e6 else "a number"
        raise ValueError(
            f"force_routing = {workload!r}: after the colon must be {kind} in [{low:g}, {high:g}]"
        )
    return name, number


def _balanced(shape: _Shape) -> np.ndarray:
    return _same(shape, np.full(shape.num_experts, shape.top_k / shape.num_experts))


def _zipf(shape: _Shape) -> np.ndarray:
    rng = np.random.default_rng(0)
    logits = -shape.number * np.log(np.arange(1, shape.num_experts + 1))
    if shape.top_k == shape.num_experts:
        return _balanced(shape)
    rows = np.stack([rng.permutation(logits) for _ in range(shape.num_layers)])
    return inclusion(rows, shape.top_k)[None]


def _hot_expert(shape: _Shape) -> np.ndarray:
    hot = np.zeros(shape.num_experts, dtype=bool)
    hot[0] = True
    return _same(shape, _split(hot, shape.number, shape))


def _hot_rank(shape: _Shape) -> np.ndarray:
    return _same(shape, _on_rank(0, shape.number, shape))


def _spread_hot(shape: _Shape) -> np.ndarray:
    _, first = np.unique(shape.rank_of, return_index=True)
    hot = np.isin(np.arange(shape.num_experts), first)
    wanted = min(shape.number * shape.top_k, float(hot.sum()))
    return _same(shape, _split(hot, wanted, shape))


def _empty_rank(shape: _Shape) -> np.ndarray:
    return _same(shape, _split(shape.rank_of > 0, shape.top_k, shape))


def _rotating(shape: _Shape) -> np.ndarray:
    ranks = range(int(shape.rank_of.max()) + 1)
    return np.concatenate([_same(shape, _on_rank(rank, 1.0, shape)) for rank in ranks])


def _burst(shape: _Shape) -> np.ndarray:
    quiet = _balanced(shape)
    return np.concatenate([quiet, quiet, quiet, _same(shape, _on_rank(0, 1.0, shape))])


def _on_rank(rank: int, share: float, shape: _Shape) -> np.ndarray:
    return _split(shape.rank_of == rank, share * shape.top_k, shape)


def _split(chosen: np.ndarray, wanted: float, shape: _Shape) -> np.ndarray:
    """Chances that give ``wanted`` of a token's choices to the chosen experts, evenly."""
    others = max(1, int((~chosen).sum()))
    count = max(1, int(chosen.sum()))
    return np.where(chosen, wanted / count, (shape.top_k - wanted) / others)


def _same(shape: _Shape, chances: np.ndarray) -> np.ndarray:
    """One phase, alike in all layers: [1, num_layers, num_experts]."""
    return np.tile(chances, (1, shape.num_layers, 1))


@dataclass(frozen=True, slots=True)
class Workload:
    """How chances are made, the number after the colon where none is given, and its limits."""

    chances: Callable[[_Shape], np.ndarray]
    default: float | None = None
    limits: tuple[float, float] = (0.0, 1.0)


_STEPS = (1, 2**31)
WORKLOADS: dict[str, Workload] = {
    "balanced": Workload(_balanced),
    "zipf": Workload(_zipf, 1.2, (0.0, 20.0)),
    "hot-expert": Workload(_hot_expert, 1.0),
    "hot-rank": Workload(_hot_rank, 1.0),
    "spread-hot": Workload(_spread_hot, 0.5),
    "empty-rank": Workload(_empty_rank),
    "rotating": Workload(_rotating, 256, _STEPS),
    "burst": Workload(_burst, 256, _STEPS),
}
"""By name; see the table above."""
