"""What the searches of the scenario planner share: the problem, the effort, a step."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from moeserve_placement.slot_table import Floats, Ints


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Problem:
    """What to balance: layers [A], ranks alive [G].

    loads: float64 [A, num_experts, num_scenarios], scaled so that the mean rank level is 1.
    weights: float64 [num_scenarios], sums to 1. speeds: float64 [G], mean 1. room: slots by rank.
    power: of the smooth maximum, a power of two. pair_gain: drop of the objective when a pair of
    experts shares a node, float64 [A, num_experts, num_experts], or None; nodes: by rank [G].
    """

    loads: Floats
    weights: Floats
    speeds: Floats
    room: Ints
    power: int
    nodes: Ints
    pair_gain: Floats | None = None

    def part(self, layers: Ints) -> Problem:
        """The problem of some of the layers."""
        return Problem(
            loads=self.loads[layers],
            weights=self.weights,
            speeds=self.speeds,
            room=self.room,
            power=self.power,
            nodes=self.nodes,
            pair_gain=None if self.pair_gain is None else self.pair_gain[layers],
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Effort:
    """How far to look: cold ranks to pair with (width), hot ranks to try (depth), rounds in all."""

    width: int = 4
    depth: int = 1
    rounds: int = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """Slot writes (rank, slot, expert or -1), experts copied, and how far the objective drops."""

    writes: tuple[tuple[int, int, int], ...]
    copies: int
    gain: float


def raised(values: Floats, power: int) -> Floats:
    """``values ** power`` for a power of two, by squaring: numpy's own takes ten times as long."""
    result = values * values
    for _ in range(power.bit_length() - 2):
        np.multiply(result, result, out=result)
    return result
