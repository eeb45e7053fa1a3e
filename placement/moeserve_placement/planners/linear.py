"""Linear: consecutive experts per rank, no copies, whatever the load. What engines start with."""

from __future__ import annotations

import numpy as np

from moeserve_placement.load import LoadHistory
from moeserve_placement.placement import Placement
from moeserve_placement.plan import Plan
from moeserve_placement.planners.base import (
    UNLIMITED,
    Budget,
    finished_plan,
    linear_table,
    register,
)
from moeserve_placement.topology import Topology


@register("linear")
class LinearPlanner:
    """Consecutive experts, spread over the ranks as evenly as slots allow; spare ones are free."""

    name = "linear"

    def plan(
        self,
        history: LoadHistory,
        topology: Topology,
        *,
        current: Placement | None = None,
        budget: Budget = UNLIMITED,
    ) -> Plan:
        """The linear placement, the same for every layer and every load."""
        target = np.repeat(linear_table(history.num_experts, topology)[None], history.shape[0], 0)
        return finished_plan(
            self.name,
            target,
            history,
            topology,
            current=current,
            budget=budget,
            reason="linear: consecutive experts per rank, the load is not looked at",
        )
