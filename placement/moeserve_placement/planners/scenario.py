"""The scenario planner: smooth maximum of rank load over scenarios, nodes per token, bytes moved.

From nothing it places copies by their worst scenarios and improves them by local search. With
something in place it looks for the steps with the best gain per copy in every layer and spends one
budget over all layers where it buys most. "Stay" and the EPLB plan are always among the candidates,
so by its own objective a plan is never worse than either (than EPLB where the budget allows that).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from moeserve_placement.load import LoadHistory, Scenarios
from moeserve_placement.moves import num_copies
from moeserve_placement.objective import Objective
from moeserve_placement.placement import Placement, PlacementError
from moeserve_placement.plan import Plan
from moeserve_placement.planners.base import (
    UNLIMITED,
    Budget,
    current_table,
    keep_idle_layers,
    register,
)
from moeserve_placement.planners.candidates import (
    apply_steps,
    balance_problem,
    cold_candidates,
    incremental,
)
from moeserve_placement.planners.eplb import (
    EplbPlanner,
    eplb_table,
    least_copies,
    relabelled,
    replica_counts,
)
from moeserve_placement.planners.outcome import Choice, cold_plan, moving_plan
from moeserve_placement.planners.problem import Step
from moeserve_placement.planners.repair import repaired
from moeserve_placement.planners.spending import affordable_steps
from moeserve_placement.slot_table import Floats, Ints, aligned, copy_counts, is_complete, surviving
from moeserve_placement.topology import Topology


@register("scenario")
@dataclass(frozen=True, slots=True, kw_only=True)
class ScenarioPlanner:
    """Plans for the set of scenarios that the history knows.

    split: the split of tokens over copies that is planned for: 'even', 'planned' (fixed shares that
    come with the plan) or 'batch' (solved at run time).
    remote_weight: imbalance that one remote node per token is worth, see ``Objective``; used where
    the history has co-activation and the topology several nodes.
    move_weight: imbalance that copying every slot once must bring, see ``Objective``.
    change_weight: what a layer's plan must gain, in units of imbalance after the price of its
    copies; below that the layer stays as it is, so that noise moves nothing.
    power: of the smooth maximum: 2, 4, 8, 16, 32 or 64.

    Raises:
        PlacementError: an option is out of range.
    """

    split: str = "even"
    remote_weight: float = 0.2
    move_weight: float = 0.02
    change_weight: float = 0.003
    power: int = 32

    def __post_init__(self) -> None:
        if self.power not in (2, 4, 8, 16, 32, 64):
            raise PlacementError(f"power = {self.power}: must be 2, 4, 8, 16, 32 or 64")
        _ = self.objective

    @property
    def name(self) -> str:
        """The name it is registered under."""
        return "scenario"

    @property
    def objective(self) -> Objective:
        """What it minimises."""
        return Objective(
            power=float(self.power),
            remote_weight=self.remote_weight,
            move_weight=self.move_weight,
            change_weight=self.change_weight,
            split=self.split,
        )

    def plan(
        self,
        history: LoadHistory,
        topology: Topology,
        *,
        current: Placement | None = None,
        budget: Budget = UNLIMITED,
    ) -> Plan:
        """A plan; see ``Planner``. Layers without any load stay as they are."""
        topology.check_fits(history.num_experts)
        if history.is_empty:
            return EplbPlanner().plan(history, topology, current=current, budget=budget)
        now = current_table(current, history, topology)
        case = _Case(self.objective, history.scenarios(), history, topology)
        if now is None:
            table, sources = case.cold()
            return cold_plan(
                self.name,
                table,
                sources,
                objective=case.objective,
                scenarios=case.scenarios,
                history=history,
                topology=topology,
            )
        return moving_plan(
            self.name,
            current,
            now,
            case.choose(surviving(now, topology), budget.copies(topology)),
            objective=case.objective,
            scenarios=case.scenarios,
            history=history,
            topology=topology,
        )


class _Case:
    """One call of the planner: the objective on one history and topology."""

    def __init__(
        self, objective: Objective, scenarios: Scenarios, history: LoadHistory, topology: Topology
    ) -> None:
        self.objective = objective
        self.scenarios = scenarios
        self.history = history
        self.topology = topology

    def score(self, table: Ints, current: Ints | None = None) -> Floats:
        """The objective by layer, with the price of coming from ``current``."""
        return self.objective.score(
            table, self.scenarios, self.topology, history=self.history, current=current
        )

    def candidates(self) -> dict[str, Ints]:
        return cold_candidates(self.objective, self.scenarios, self.history, self.topology)

    def cold(self) -> tuple[Ints, list[str]]:
        """The best candidate of each layer, and its name; idle layers take the linear placement."""
        tables = self.candidates()
        names = list(tables)
        best = np.stack([self.score(table) for table in tables.values()]).argmin(0)
        table = np.stack([tables[names[index]][row] for row, index in enumerate(best)])
        table = keep_idle_layers(table, self.history, self.topology, current=None)
        return table, [names[index] for index in best]

    def choose(self, here: Ints, copies: float) -> Choice:
        """What to do with each layer for a number of copies in all.

        Lost experts come back first, outside the budget. Then steps are taken where they gain most;
        a layer whose steps do not pay for its change stays. What is left of the budget may buy a
        whole new placement for a layer where that is better still.
        """
        base = here
        if not is_complete(here, self.history.num_experts):
            base = repaired(here, self.scenarios, self.topology)
        before = self.score(base, here)
        steps, table, after = self._steps(base, here, before, copies)
        jumps: list[str | None] = [None] * len(here)
        left = copies - sum(step.copies for layer in steps for step in layer)
        for name, target in self._jumps(here, base, left).items():
            value = self.score(target, here)
            extra = num_copies(here, target) - num_copies(here, table)
            gain = np.where(self.history.busy_layers, after - value, 0.0)
            for row in np.argsort(-gain / np.maximum(extra, 1), kind="stable"):
                if gain[row] > 0 and extra[row] <= left:
                    left -= int(extra[row])
                    table[row], after[row], jumps[row], steps[row] = (
                        target[row],
                        value[row],
                        name,
                        [],
                    )
        return Choice(base=base, steps=steps, table=table, jumps=jumps, before=before, after=after)

    def _steps(
        self, base: Ints, here: Ints, before: Floats, copies: float
    ) -> tuple[list[list[Step]], Ints, Floats]:
        """Affordable steps by layer, none where they do not pay; the tables then, their value."""
        found = incremental(
            balance_problem(self.objective, self.scenarios, self.history, self.topology),
            base,
            self.topology,
            copies=copies,
            copy_price=self.objective.move_weight / self.topology.num_slots,
        )
        found = [s if busy else [] for s, busy in zip(found, self.history.busy_layers, strict=True)]
        steps = [s[:n] for s, n in zip(found, affordable_steps(found, copies), strict=True)]
        table = np.stack([apply_steps(b, s) for b, s in zip(base, steps, strict=True)])
        after = self.score(table, here)
        pays = after < before
        steps = [s if good else [] for s, good in zip(steps, pays, strict=True)]
        return (
            steps,
            np.where(pays[:, None, None], table, base),
            np.where(pays, after, before),
        )

    def _new_copies(self, load: Floats, here: Ints) -> Ints:
        """Copies of an expert that EPLB wants and that are nowhere yet, summed by layer."""
        ranks = int((self.topology.usable_slots > 0).sum())
        wanted = replica_counts(load, self.topology.num_slots, most=ranks)
        missing: Ints = (wanted - copy_counts(here, load.shape[1])).clip(min=0).sum(1)
        return missing

    def _jumps(self, here: Ints, base: Ints, copies: float) -> dict[str, Ints]:
        """Whole placements to consider, with names and slots chosen so that most stays.

        EPLB wherever it fits; our own from nothing only without a budget, they never fit a small
        one. Layers where a candidate can not fit are as in ``base``.
        """
        if np.isinf(copies):
            found = self.candidates()
            rows = np.arange(len(here))
        else:
            load = self.history.mean
            # wherever EPLB puts them, its additional copies alone may be too many
            rows = np.flatnonzero(self._new_copies(load, here) <= copies)
            if not len(rows):
                return {}
            found = {"eplb": base.copy()}
            found["eplb"][rows] = eplb_table(load[rows], self.topology)
            least = least_copies(found["eplb"][rows], here[rows], self.topology)
            found["eplb"][rows[least > copies]] = base[rows[least > copies]]
            rows = rows[least <= copies]
        for target in found.values():
            for row in rows:
                target[row] = relabelled(target[row], here[row], self.topology)
            target[rows] = aligned(target[rows], here[rows], topology=self.topology)
        return found
