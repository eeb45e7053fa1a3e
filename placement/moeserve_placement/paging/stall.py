"""What a miss costs: one link that carries experts one after the other, and compute that waits.

Time is in microseconds. A layer starts, learns which experts it needs, waits until all of them are
there, and computes for a fixed time. An expert travels in a few copies, say one per matrix. What a
layer waits for goes first: a prefetch under way is paused after the copy that is being made. So
also a useless prefetch delays what is needed, but by no more than one copy.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

_MAX_PARTS = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class StallModel:
    """Sizes and speeds.

    The defaults are gpt-oss-20b on one consumer card: an expert is 3 x 2880 x 2880 weights at
    4.25 bits (MXFP4), one copy per matrix; PCIe 5.0 x16 carries about 50 GB/s; 24 layers of 200 us
    are 208 tokens/s.

    bytes_per_expert: bytes that a transfer moves.
    bandwidth_gb_per_s: link speed, in 1e9 bytes per second.
    parts_per_expert: equal copies that a transfer consists of; 1: nothing can be paused.
    compute_us_per_layer: time of a layer when nothing waits, attention included, whatever the
        batch.

    Raises:
        ValueError: a number is not positive and finite (compute time may be 0).
    """

    bytes_per_expert: float = 13.2e6
    bandwidth_gb_per_s: float = 50.0
    parts_per_expert: int = 3
    compute_us_per_layer: float = 200.0

    def __post_init__(self) -> None:
        for name in ("bytes_per_expert", "bandwidth_gb_per_s", "parts_per_expert"):
            value = getattr(self, name)
            if not 0 < value < math.inf:
                raise ValueError(f"{name} = {value}: must be a positive, finite number")
        if self.parts_per_expert > _MAX_PARTS:
            raise ValueError(
                f"parts_per_expert = {self.parts_per_expert}: must be at most {_MAX_PARTS}"
            )
        if not (math.isfinite(self.compute_us_per_layer) and self.compute_us_per_layer >= 0):
            raise ValueError(
                f"compute_us_per_layer = {self.compute_us_per_layer}: must be 0 or more, and finite"
            )

    @property
    def transfer_us(self) -> float:
        """Time of one expert on the link, microseconds."""
        return self.bytes_per_expert / self.bandwidth_gb_per_s / 1e3


class Link:
    """One transfer after the other; at most one prefetch is under way or paused at any time."""

    __slots__ = ("free_at_us", "part_us", "transfer_us")

    def __init__(self, stall: StallModel) -> None:
        self.transfer_us = stall.transfer_us
        self.part_us = stall.transfer_us / stall.parts_per_expert
        self.free_at_us = 0.0

    def arrival_if_asked(self, now_us: float) -> float:
        """When an expert would arrive that is asked for at ``now_us``."""
        return max(now_us, self.free_at_us) + self.transfer_us

    def prefetch(self, now_us: float) -> float:
        """Send one expert; returns when it arrives if no demand comes in between."""
        self.free_at_us = self.arrival_if_asked(now_us)
        return self.free_at_us

    def demand(self, now_us: float, count: int, *, overtake: bool) -> float:
        """Send ``count`` experts that a layer waits for; returns when the last of them arrives.

        overtake: pause a prefetch under way at the end of its part, not of the whole expert; it
            then arrives at ``free_at_us``.
        """
        left_us = max(0.0, self.free_at_us - now_us)
        # The small number forgives rounding where a part ends just now.
        paused_us = int(left_us / self.part_us + 1e-9) * self.part_us if overtake else 0.0
        arrival = now_us + left_us - paused_us + count * self.transfer_us
        self.free_at_us = arrival + paused_us
        return arrival
