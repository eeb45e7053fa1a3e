"""Experts in a cache: eviction policies, prediction and prefetch, stalls, Belady's bound."""

from moeserve_placement.paging.belady import Belady
from moeserve_placement.paging.policies import EvictionPolicy
from moeserve_placement.paging.predictors import Predictor
from moeserve_placement.paging.prefetch import PrefetchRule
from moeserve_placement.paging.results import PagingResult
from moeserve_placement.paging.simulate import simulate
from moeserve_placement.paging.stall import StallModel
from moeserve_placement.paging.steps import DecodeSteps, decode_steps, split_sequences
from moeserve_placement.paging.study import StudyOptions, StudyRow, run_study

__all__ = [
    "Belady",
    "DecodeSteps",
    "EvictionPolicy",
    "PagingResult",
    "Predictor",
    "PrefetchRule",
    "StallModel",
    "StudyOptions",
    "StudyRow",
    "decode_steps",
    "run_study",
    "simulate",
    "split_sequences",
]
