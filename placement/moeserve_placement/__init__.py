"""Where experts live: placements of experts on ranks. Needs numpy only and nothing of moeserve."""

from moeserve_placement.placement import STRATEGIES, Placement, PlacementError

__all__ = ["STRATEGIES", "Placement", "PlacementError"]
