"""Planners by name: each turns a load history into a plan. See ``base`` for the protocol."""

from moeserve_placement.planners import eplb, exchange, flashlb, linear, scenario
from moeserve_placement.planners.base import PLANNERS, UNLIMITED, Budget, Planner, get_planner

__all__ = [
    "PLANNERS",
    "UNLIMITED",
    "Budget",
    "Planner",
    "eplb",
    "exchange",
    "flashlb",
    "get_planner",
    "linear",
    "scenario",
]
