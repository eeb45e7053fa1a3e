"""Where experts live: plan, replay, compare and explain placements of experts on ranks.

Needs numpy only and nothing of moeserve; click and rich for the command line, more in extras for
pictures, exact optima and other engines' files. What a caller needs first:

- ``Topology``: ranks, their nodes, slots and speeds; ``LoadHistory``: the load of past windows;
- ``get_planner(name).plan(history, topology, current=...)`` gives a ``Plan``: the new ``Placement``
  and the ordered moves that lead there;
- ``ShareSolver``: the best split of a batch over the copies of a placement;
- ``moeserve_placement.traces``: routing traces; ``replay``: traces against planners; ``paging``:
  traces against expert caches.
"""

from moeserve_placement.bounds import lower_bound
from moeserve_placement.load import LoadHistory
from moeserve_placement.placement import STRATEGIES, Placement, PlacementError
from moeserve_placement.plan import Move, Plan
from moeserve_placement.planners import PLANNERS, Budget, get_planner
from moeserve_placement.shares import ShareSolver, balanced_shares
from moeserve_placement.topology import Topology

__all__ = [
    "PLANNERS",
    "STRATEGIES",
    "Budget",
    "LoadHistory",
    "Move",
    "Placement",
    "PlacementError",
    "Plan",
    "ShareSolver",
    "Topology",
    "balanced_shares",
    "get_planner",
    "lower_bound",
]
