"""What a placement is worth: one number per layer, in units of imbalance, smaller is better.

    J = (sum_k w_k mean_g (L_kg / mean)^p)^(1/p) + a * remote nodes per token
        + b * copies / slots + c * (1 if there are copies else 0)

L_kg is the load of rank g in scenario k divided by the rank's speed. The first term is a smooth
maximum over ranks and scenarios: 1 is perfect balance everywhere, and unlike the plain maximum it
still falls when the second-fullest rank gets better. The second comes from co-activation, the third
is the price of moving, weighted by the kind of link; the last keeps noise from moving anything.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from moeserve_placement.checks import check_choice, check_number
from moeserve_placement.fanout import nodes_per_token
from moeserve_placement.load import LoadHistory, Scenarios
from moeserve_placement.moves import copy_costs
from moeserve_placement.plan import Forecast
from moeserve_placement.shares import ShareSolver, balanced_shares
from moeserve_placement.slot_table import Floats, Ints, even_shares, is_complete, rank_loads
from moeserve_placement.topology import Topology

SPLITS = ("even", "planned", "batch")
_HEAVIEST = 1e6  # of the weights; a term with this weight already decides alone


@dataclass(frozen=True, slots=True, kw_only=True)
class Objective:
    """Weights of the objective.

    power: the p of the smooth maximum. remote_weight: a, imbalance that one more remote node per
    token is worth; it counts only where the history has co-activation and there are several nodes.
    move_weight: b, the cost of copying every slot once inside a node; ``link_costs`` of the
    topology scale it.
    change_weight: c, the fixed price of changing a layer at all: noise is not worth it.
    split: how an expert's tokens are split over its copies: 'even'; 'planned' (fixed shares, solved
    for the mean of the scenarios); 'batch' (solved for each scenario, as at run time).

    Raises:
        PlacementError: a value is out of range.
    """

    power: float = 32.0
    remote_weight: float = 0.0
    move_weight: float = 0.0
    change_weight: float = 0.0
    split: str = "even"

    def __post_init__(self) -> None:
        check_number("power", self.power, low=1, high=64)
        for name in ("remote_weight", "move_weight", "change_weight"):
            check_number(name, getattr(self, name), low=0, high=_HEAVIEST)
        check_choice("split", self.split, SPLITS)

    def shares(self, table: Ints, scenarios: Scenarios, topology: Topology) -> Floats:
        """Shares of each slot: float64 [num_layers, num_ranks, max_slots].

        Solved for the mean scenario, or even with an even split.
        """
        if self.split == "even":
            return even_shares(table, scenarios.loads.shape[-1])
        return balanced_shares(scenarios.mean, table, speeds=topology.divisors).shares

    def relative_loads(self, table: Ints, scenarios: Scenarios, topology: Topology) -> Floats:
        """Rank load over mean: float64 [num_scenarios, num_layers, alive ranks], mean 1."""
        alive = np.flatnonzero(topology.alive)
        if self.split == "batch":
            solver = ShareSolver(
                table,
                scenarios.loads.shape[-1],
                speeds=topology.divisors,
                nominal=scenarios.mean,
            )
            loads = np.stack([solver.solve(load).rank_loads for load in scenarios.loads])
        else:
            shares = self.shares(table, scenarios, topology)
            loads = rank_loads(scenarios.loads, table, shares=shares)
        result: Floats = loads[..., alive] * len(alive) / topology.speeds[alive]
        return result

    def balance(self, table: Ints, scenarios: Scenarios, topology: Topology) -> Floats:
        """The first term: float64 [num_layers]."""
        relative = self.relative_loads(table, scenarios, topology)
        return smooth_max(relative, scenarios.weights, self.power)

    def score(
        self,
        table: Ints,
        scenarios: Scenarios,
        topology: Topology,
        *,
        history: LoadHistory,
        current: Ints | None = None,
    ) -> Floats:
        """The objective: float64 [num_layers].

        current: what is in place, without ranks that are gone; None: copies cost nothing.
        """
        total = self.balance(table, scenarios, topology)
        if self.counts_nodes(history, topology):
            total = total + self.remote_weight * (nodes_per_token(table, history, topology) - 1)
        if current is not None:
            experts = history.num_experts
            costs = copy_costs(current, table, topology=topology, num_experts=experts)
            total = total + self.move_weight * costs / topology.num_slots
            total = total + self.change_weight * (costs > 0)
        return total

    def counts_nodes(self, history: LoadHistory, topology: Topology) -> bool:
        """Whether the second term is in force."""
        several = topology.num_nodes > 1 and self.remote_weight > 0
        return several and history.has_coactivation

    def forecast(
        self, table: Ints, scenarios: Scenarios | None, history: LoadHistory, topology: Topology
    ) -> Forecast | None:
        """What to expect of a table; None without any observed load or with an expert nowhere."""
        if scenarios is None or not is_complete(table, history.num_experts):
            return None
        relative = self.relative_loads(table, scenarios, topology)
        mean = np.tensordot(scenarios.weights, relative, axes=1)

        def by_layer(values: Floats) -> Mapping[int, float]:
            return dict(zip(history.layer_ids, values.tolist(), strict=True))

        value = smooth_max(relative, scenarios.weights, self.power)
        nodes = None
        if history.has_coactivation and topology.num_nodes > 1:
            touched = nodes_per_token(table, history, topology)
            nodes = by_layer(touched)
            value = value + self.remote_weight * (touched - 1)
        return Forecast(
            mean_imbalance=by_layer(mean.max(-1)),
            worst_imbalance=by_layer(relative.max((0, -1))),
            objective=by_layer(value),
            nodes_per_token=nodes,
        )


def smooth_max(relative: Floats, weights: Floats, power: float) -> Floats:
    """(sum_k w_k mean_g x_kg^p)^(1/p) of [num_scenarios, num_layers, num_ranks]: [num_layers]."""
    top = np.maximum(relative.max((0, 2)), 1e-300)  # the powers of 64 would overflow at p = 200
    powers = ((relative / top[:, None]) ** power).mean(-1)
    result: Floats = top * np.tensordot(weights, powers, axes=1) ** (1.0 / power)
    return result
