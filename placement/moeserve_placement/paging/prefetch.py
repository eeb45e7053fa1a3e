"""When a prefetch pays: expected stall saved against expected stall caused."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]

_NUM_BINS = 32
_PSEUDO_COUNT = 8.0
"""Observations that the predictor's own word counts for in each bin."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefetchRule:
    """Issue a prefetch only where the stall it saves, on average, exceeds what it costs.

    pollution: chance that the expert thrown out for a prefetch that proves wrong is missed later,
        beyond the layer step that the prefetch aims at (which is predicted). Higher: fewer
        prefetches. Between 0.02 and 0.1 it hardly matters (benchmarks/bench_paging.py tells on
        which sequences it was tried).

    Raises:
        ValueError: ``pollution`` is negative or not finite.
    """

    pollution: float = 0.05

    def __post_init__(self) -> None:
        if not (math.isfinite(self.pollution) and self.pollution >= 0):
            raise ValueError(f"pollution = {self.pollution}: must be 0 or more, and finite")

    def gain_us(
        self,
        *,
        chance: float,
        victim_chance: float,
        lateness_us: float,
        link_delay_us: float,
        transfer_us: float,
    ) -> float:
        """Expected stall that the prefetch saves; not above 0: leave it.

        chance, victim_chance: of use in the layer step aimed at, of the expert and of the one
            that would be evicted for it.
        lateness_us: how long after it is needed the expert would arrive (negative: in time). On
            demand it would be ``transfer_us`` late.
        link_delay_us: expected delay of experts that the next layer waits for meanwhile.
        """
        saved = chance * (transfer_us - max(0.0, lateness_us))
        lost = (victim_chance + (1.0 - chance) * self.pollution) * transfer_us
        return saved - lost - link_delay_us


class Calibration:
    """How often experts that are not in the cache were used when a chance was given for them.

    Being absent is evidence against an expert, and the likeliest of many is likely overrated: both
    make a predictor's word too high just where prefetch asks. Counted per distance and bin of the
    chance, from what has happened so far.
    """

    __slots__ = ("_seen", "_used")

    def __init__(self, horizon: int) -> None:
        self._seen = [[0.0] * (_NUM_BINS + 1) for _ in range(horizon)]
        self._used = [[0.0] * (_NUM_BINS + 1) for _ in range(horizon)]

    def chance(self, ahead: int, place: int, said: float) -> float:
        """The share of such experts that were used, near ``said`` while little was seen.

        place: the bin of ``said`` (see bins).
        """
        used, seen = self._used[ahead - 1][place], self._seen[ahead - 1][place]
        return (used + _PSEUDO_COUNT * said) / (seen + _PSEUDO_COUNT)

    def observe(self, ahead: int, place: int, was_used: bool) -> None:
        """Take in what became of one expert."""
        self._seen[ahead - 1][place] += 1.0
        self._used[ahead - 1][place] += was_used


def bins(chances: Array) -> Array:
    """Where chances are counted: narrow near 0, where most of the decisions are. int64."""
    return np.asarray(_NUM_BINS * np.sqrt(chances), dtype=np.int64)
