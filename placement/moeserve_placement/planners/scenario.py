"""The scenario planner: smooth maximum of rank load over scenarios, nodes per token, bytes moved.

From nothing it places copies by their worst scenarios and improves them by local search. With
something in place it looks for the steps with the best gain per copy in every layer and spends one
budget over all layers where it buys most. "Stay" and the EPLB plan are always among the candidates,
so by its own objective a plan is never worse than either (than EPLB where the budget allows that).
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from moeserve_placement.checks import check_choice
from moeserve_placement.load import LoadHistory, Scenarios
from moeserve_placement.moves import copy_costs, num_copies
from moeserve_placement.objective import Objective
from moeserve_placement.placement import Placement
from moeserve_placement.plan import Plan
from moeserve_placement.planners.base import (
    UNLIMITED,
    Budget,
    current_table,
    finished_plan,
    keep_idle_layers,
    register,
)
from moeserve_placement.planners.candidates import (
    apply_steps,
    balance_problem,
    cold_candidates,
    incremental,
)
from moeserve_placement.planners.draft import Draft
from moeserve_placement.planners.eplb import (
    eplb_table,
    least_copies,
    least_new_copies,
    relabelled,
)
from moeserve_placement.planners.outcome import cold_plan, moving_plan
from moeserve_placement.planners.problem import Step
from moeserve_placement.planners.repair import repaired
from moeserve_placement.planners.spending import affordable_steps
from moeserve_placement.slot_table import (
    Floats,
    Ints,
    aligned,
    even_shares,
    is_complete,
    slot_table,
    surviving,
)
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
        check_choice("power", self.power, (2, 4, 8, 16, 32, 64))
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
            return self._without_load(history, topology, current, budget)
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

    def _without_load(
        self, history: LoadHistory, topology: Topology, current: Placement | None, budget: Budget
    ) -> Plan:
        """Linear on a cold start, else what is in place; lost experts come back as by EPLB."""
        target = eplb_table(history.mean, topology)
        plan = finished_plan(
            self.name,
            keep_idle_layers(target, history, topology, current=current),
            history,
            topology,
            current=current,
            budget=budget,
            reason=f"{self.name}: no load observed yet",
        )
        shares = None
        if self.split == "planned":
            table = slot_table(plan.placement, history.layer_ids, topology=topology)
            shares = even_shares(table, history.num_experts)
        return replace(plan, split=self.split, shares=shares)


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
        scores = np.stack([self.score(table) for table in tables.values()])
        best = np.where(np.isfinite(scores), scores, np.inf).argmin(0)
        table = np.stack([tables[names[index]][row] for row, index in enumerate(best)])
        table = keep_idle_layers(table, self.history, self.topology, current=None)
        return table, [names[index] for index in best]

    def choose(self, here: Ints, copies: float) -> Draft:
        """What to do with each layer for a number of copies in all.

        Lost experts come back first, outside the budget. Then steps are taken where they gain most;
        a layer whose steps do not pay for its change stays. What is left of the budget, and what a
        layer's steps would give back, may buy a whole new placement where that is better still.
        """
        draft = self._with_steps(here, copies)
        for name, target in self._jumps(draft).items():
            value = np.where(self.history.busy_layers, self.score(target, here), np.inf)
            draft.take_where_better(name, target, value)
            if not np.isinf(copies):
                draft.take_if_better_in_all(name, target, value)
        return draft

    def _with_steps(self, here: Ints, copies: float) -> Draft:
        """Affordable steps of each layer, none where they do not pay."""
        base = here
        if not is_complete(here, self.history.num_experts):
            base = repaired(here, self.scenarios.mean, self.topology)
        before = self.score(base, here)
        found = incremental(
            balance_problem(self.objective, self.scenarios, self.history, self.topology),
            base,
            self.topology,
            copies=copies,
            copy_price=self.objective.move_weight / self.topology.num_slots,
        )
        found = [s if busy else [] for s, busy in zip(found, self.history.busy_layers, strict=True)]
        steps = [s[:n] for s, n in zip(found, affordable_steps(found, copies), strict=True)]
        table, after = self._after_steps(base, steps, here)
        pays = after < before
        is_bound = False
        if steps != found and not pays.any():
            is_bound = bool((self._after_steps(base, found, here)[1] < before).any())
        return Draft(
            here=here,
            base=base,
            before=before,
            budget=copies,
            table=np.where(pays[:, None, None], table, base),
            value=np.where(pays, after, before),
            steps=[s if good else [] for s, good in zip(steps, pays, strict=True)],
            is_bound=is_bound,
        )

    def _after_steps(self, base: Ints, steps: list[list[Step]], here: Ints) -> tuple[Ints, Floats]:
        """The tables after these steps, and their value."""
        table = np.stack([apply_steps(b, s) for b, s in zip(base, steps, strict=True)])
        return table, self.score(table, here)

    def _jumps(self, draft: Draft) -> dict[str, Ints]:
        """Whole placements to consider, with names and slots chosen so that most stays.

        EPLB wherever it fits; our own from nothing only without a budget, they never fit a small
        one. Layers where a candidate can not fit are as in ``base``.
        """
        rows = np.arange(len(draft.here))
        if np.isinf(draft.budget):
            found = self.candidates()
        else:
            table, rows = self._affordable_eplb(draft)
            found = {"eplb": table} if len(rows) else {}
        for target in found.values():
            target[rows] = self._fitted(target[rows], draft.here[rows])
        return found

    def _affordable_eplb(self, draft: Draft) -> tuple[Ints, Ints]:
        """EPLB's tables in the rows where the budget may allow them, ``base`` elsewhere; the rows.

        The bounds save time: with a small budget EPLB hardly ever fits.
        """
        table, load, busy = draft.base.copy(), self.history.mean, self.history.busy_layers
        repairs = num_copies(draft.here, draft.base)
        least = np.where(busy, least_new_copies(load, draft.here, self.topology) - repairs, 0)
        rows = np.flatnonzero(busy & draft.may_afford(least))
        if not len(rows):
            return table, rows
        eplb = eplb_table(load[rows], self.topology)
        least[rows] = least_copies(eplb, draft.here[rows], self.topology) - repairs[rows]
        fits = draft.may_afford(least)[rows]
        table[rows[fits]] = eplb[fits]
        return table, rows[fits]

    def _fitted(self, target: Ints, here: Ints) -> Ints:
        """``target`` with ranks renamed where that saves copies, and slots as in ``here``."""
        pairs = zip(target, here, strict=True)
        renamed = np.stack([relabelled(layer, now, self.topology) for layer, now in pairs])
        best = np.where(self._saves(renamed, target, here)[:, None, None], renamed, target)
        return aligned(best, here, topology=self.topology)

    def _saves(self, renamed: Ints, target: Ints, here: Ints) -> NDArray[np.bool_]:
        """Layers where the renamed target is no dearer to reach; renaming is greedy."""
        experts = self.history.num_experts
        first, second = (
            copy_costs(here, table, topology=self.topology, num_experts=experts)
            for table in (renamed, target)
        )
        cheap: NDArray[np.bool_] = first <= second
        return cheap
