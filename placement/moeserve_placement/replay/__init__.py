"""Replay: play a trace against planners, plan on the past, score on what comes next."""

from moeserve_placement.replay.play import compare, replay
from moeserve_placement.replay.results import Comparison, Run
from moeserve_placement.replay.results_json import save_json, to_dict
from moeserve_placement.replay.schedule import Schedule, Window, make_schedule
from moeserve_placement.replay.settings import BudgetSpec, PlannerSpec, ReplaySettings

__all__ = [
    "BudgetSpec",
    "Comparison",
    "PlannerSpec",
    "ReplaySettings",
    "Run",
    "Schedule",
    "Window",
    "compare",
    "make_schedule",
    "replay",
    "save_json",
    "to_dict",
]
