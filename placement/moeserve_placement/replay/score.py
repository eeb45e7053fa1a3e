"""Rank loads of batches under one placement, with a fixed and with a per-batch split."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from moeserve_placement.shares import ShareSolver
from moeserve_placement.slot_table import Floats, Ints, even_shares
from moeserve_placement.topology import Topology


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Levels:
    """How full ranks were, batch by batch; a level is tokens over relative speed.

    peak: of the fullest rank, float64 [num_batches, num_layers]. mean: what every alive rank would
    have if all were equally full, likewise.
    """

    peak: Floats
    mean: Floats

    @property
    def imbalance(self) -> Floats:
        """Peak over mean: float64 [num_batches, num_layers]; 1 where there is no load at all."""
        some = self.mean > 0
        ratio: Floats = np.where(some, self.peak / np.where(some, self.mean, 1.0), 1.0)
        return ratio

    @classmethod
    def joined(cls, parts: list[Levels]) -> Levels:
        """The batches of all parts, in order."""
        return cls(
            peak=np.concatenate([part.peak for part in parts]),
            mean=np.concatenate([part.mean for part in parts]),
        )


class Scorer:
    """Scores batches under one placement.

    table: [num_layers, num_ranks, max_slots], -1 where free. shares: fixed split, as the table;
    None: even. nominal: expected counts [num_layers, num_experts], only a hint for speed.
    """

    def __init__(
        self,
        table: Ints,
        num_experts: int,
        *,
        topology: Topology,
        shares: Floats | None = None,
        nominal: Floats | None = None,
    ) -> None:
        self.table = table
        self.num_experts = num_experts
        self.topology = topology
        self._alive = np.flatnonzero(topology.alive)
        self._split = share_matrix(table, num_experts, shares=shares)
        self._nominal = nominal
        self._solver: ShareSolver | None = None

    def rank_loads(self, counts: Ints) -> Floats:
        """Tokens by rank under the fixed split: [num_batches, num_layers, num_ranks].

        counts: [num_batches, num_layers, num_experts].
        """
        by_layer = np.swapaxes(counts, 0, 1).astype(np.float64) @ self._split
        result: Floats = np.swapaxes(by_layer, 0, 1)
        return result

    def fixed(self, counts: Ints) -> Levels:
        """Levels of batches [num_batches, num_layers, num_experts] under the fixed split."""
        return self.levels(self.rank_loads(counts))

    def per_batch(self, counts: Ints) -> Levels:
        """Levels with the min-max split solved for each of the batches."""
        if self._solver is None:
            self._solver = ShareSolver(
                self.table,
                self.num_experts,
                speeds=self.topology.divisors,
                nominal=self._nominal,
            )
        solver = self._solver
        return self.levels(np.stack([solver.solve(batch).rank_loads for batch in counts]))

    def levels(self, loads: Floats) -> Levels:
        """Levels of rank loads [num_batches, num_layers, num_ranks]."""
        alive = loads[..., self._alive]
        return Levels(
            peak=(alive / self.topology.speeds[self._alive]).max(-1),
            mean=loads.sum(-1) / len(self._alive),
        )


def share_matrix(table: Ints, num_experts: int, *, shares: Floats | None = None) -> Floats:
    """Fraction of an expert's tokens that a rank takes: [num_layers, num_experts, num_ranks]."""
    layers, ranks, _ = table.shape
    if shares is None:
        shares = even_shares(table, num_experts)
    matrix = np.zeros((layers, num_experts + 1, ranks))
    layer = np.arange(layers)[:, None, None]
    np.add.at(matrix, (layer, table, np.arange(ranks)[None, :, None]), shares)  # -1: the extra row
    return matrix[:, :num_experts]


def sampled(counts: Ints, most: int) -> Ints:
    """At most ``most`` of the batches, evenly spaced."""
    if len(counts) <= most:
        return counts
    return counts[np.linspace(0, len(counts) - 1, most).round().astype(np.int64)]
