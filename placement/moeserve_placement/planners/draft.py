"""What is to become of every layer, while the scenario planner spends one budget over all."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from moeserve_placement.moves import num_copies
from moeserve_placement.planners.problem import Step
from moeserve_placement.slot_table import Floats, Ints


@dataclass(slots=True, kw_only=True, eq=False)
class Draft:
    """Tables of all layers so far, what they are worth and what they take of the budget.

    here: what is in place. base: that with lost experts put back, which is outside the budget.
    before: objective of ``base`` by layer. budget: copies in all, may be infinite.
    table, value: the choice so far and its objective. steps: those that lead from ``base`` to
    ``table``, by layer. jumps: the name of the candidate that replaces a layer as a whole, or None.
    is_bound: whether the budget keeps layers from steps that would pay.
    """

    here: Ints
    base: Ints
    before: Floats
    budget: float
    table: Ints
    value: Floats
    steps: list[list[Step]]
    is_bound: bool = False
    jumps: list[str | None] = field(init=False)
    copies: Ints = field(init=False)

    def __post_init__(self) -> None:
        self.jumps = [None] * len(self.steps)
        self.copies = np.array([sum(step.copies for step in layer) for layer in self.steps])

    def cost(self, target: Ints) -> Ints:
        """What a target would take of the budget, by layer."""
        result: Ints = num_copies(self.here, target) - num_copies(self.here, self.base)
        return result

    def may_afford(self, copies: Ints) -> NDArray[np.bool_]:
        """Layers that may take these numbers of copies: alone, or all of them at once."""
        if copies.sum() <= self.budget:
            return np.ones(len(copies), dtype=np.bool_)
        others = self.copies.sum() - self.copies
        fits: NDArray[np.bool_] = others + copies <= self.budget
        return fits

    def take_where_better(self, name: str, target: Ints, value: Floats) -> None:
        """Takes a whole placement in layers where it is better, best gain per copy first.

        A layer's steps are given back, and their copies with them.
        """
        cost = self.cost(target)
        gain, extra = self.value - value, cost - self.copies
        for row in np.argsort(-gain / np.maximum(extra, 1), kind="stable"):
            if gain[row] > 0 and self.copies.sum() + extra[row] <= self.budget:
                self._jump(int(row), name, target[row], float(value[row]), int(cost[row]))

    def take_if_better_in_all(self, name: str, target: Ints, value: Floats) -> None:
        """Takes it, or stays, wherever that is better or cheaper, if all layers gain by it in sum.

        Layer by layer too little of the budget may be left where this placement gains most.
        """
        cost, stays = self.cost(target), self.before <= value
        value, cost = np.where(stays, self.before, value), np.where(stays, 0, cost)
        taken = (value < self.value) | (cost < self.copies)
        total = np.where(taken, cost, self.copies).sum()
        if total > self.budget or (value - self.value)[taken].sum() >= 0:
            return
        for row in np.flatnonzero(taken):
            if stays[row]:
                self._jump(int(row), None, self.base[row], float(value[row]), 0)
            else:
                self._jump(int(row), name, target[row], float(value[row]), int(cost[row]))

    def _jump(self, row: int, name: str | None, table: Ints, value: float, copies: int) -> None:
        self.table[row], self.value[row], self.copies[row] = table, value, copies
        self.steps[row], self.jumps[row] = [], name
