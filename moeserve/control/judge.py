"""Whether a plan is worth carrying out: the time it saves against the time it takes."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True, slots=True, kw_only=True)
class Window:
    """What the last window of load looked like.

    counts: tokens by layer and expert. imbalance: largest over mean rank load as computed, mean
    over layers. expert_share: share of the time that the slowest rank's experts computed, 0 to 1.
    """

    counts: np.ndarray
    imbalance: float
    expert_share: float

    @property
    def balancedness(self) -> float:
        """Mean over largest rank load, 1.0 is even."""
        return 1.0 / self.imbalance


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """seconds_saved over the horizon, seconds_spent on moving; reason when it is not worth it."""

    seconds_saved: float
    seconds_spent: float
    reason: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class CostModel:
    """What moving costs and how long the load is believed to stay as it is.

    horizon_s: seconds that a plan serves before the next. bytes_per_s: at which experts move while
    all ranks wait. group_s: seconds per group that takes effect.
    """

    horizon_s: float
    bytes_per_s: float = 1e9
    group_s: float = 1e-3

    def judge(
        self, *, before: float, after: float, window: Window, num_bytes: int, num_groups: int
    ) -> Verdict:
        """Weighs a plan that takes the imbalance from ``before`` to ``after``.

        A step waits for its slowest rank, so of the time that the experts of that rank compute the
        plan saves the share ``1 - after / before``.
        """
        spent = num_bytes / self.bytes_per_s + num_groups * self.group_s
        if not (math.isfinite(before) and math.isfinite(after)):
            return Verdict(seconds_saved=0.0, seconds_spent=spent, reason="nothing is predicted")
        saved = self.horizon_s * window.expert_share * max(0.0, 1.0 - after / before)
        reason = None
        if saved <= spent:
            reason = (
                f"saves {saved:.3f} s over {self.horizon_s:g} s and takes {spent:.3f} s to move"
            )
        return Verdict(seconds_saved=saved, seconds_spent=spent, reason=reason)
