"""What a paging run counts, and the figures made of it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class Tally:
    """Running counts of one run; see PagingResult for their meaning."""

    hits: int = 0
    late: int = 0
    misses: int = 0
    prefetches: int = 0
    useful: int = 0
    stalls: int = 0
    stall_us: float = 0.0
    choosing_s: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class PagingResult:
    """One policy, predictor or none, capacity and batch size.

    requests: experts that layer steps needed, each once per layer step; the sum of the next three.
    hits: there when needed. late: prefetched and under way. misses: fetched on demand.
    prefetches: issued. useful_prefetches: needed at the layer step they aimed at, and not evicted.
    stalls: layer steps that waited; stall_us: for how long in all.
    total_us: simulated time of the whole run.
    policy_s: processor time of scoring, predicting and choosing, on this machine.
    """

    policy: str
    predictor: str | None
    capacity: int
    batch: int
    num_steps: int
    num_layers: int
    num_tokens: int
    requests: int
    hits: int
    late: int
    misses: int
    prefetches: int
    useful_prefetches: int
    stalls: int
    stall_us: float
    total_us: float
    policy_s: float

    @property
    def name(self) -> str:
        """The policy, and the predictor where prefetch is on top."""
        return self.policy if self.predictor is None else f"{self.policy} + {self.predictor}"

    @property
    def hit_rate(self) -> float:
        """Share of requests found in the cache in time."""
        return self.hits / self.requests

    @property
    def requests_per_layer_step(self) -> float:
        """Distinct experts that a layer step needs, on average."""
        return self.requests / (self.num_steps * self.num_layers)

    @property
    def precision(self) -> float | None:
        """Share of prefetches that were needed where they aimed; None: there were none."""
        return self.useful_prefetches / self.prefetches if self.prefetches else None

    @property
    def coverage(self) -> float | None:
        """Share of would-be misses that a prefetch was sent for; None without prefetch."""
        wanted = self.useful_prefetches + self.misses
        return self.useful_prefetches / wanted if self.predictor and wanted else None

    @property
    def stalls_per_token(self) -> float:
        """Layer steps that waited, per token."""
        return self.stalls / self.num_tokens

    @property
    def stall_us_per_token(self) -> float:
        """Microseconds waited per token."""
        return self.stall_us / self.num_tokens

    @property
    def fetches_per_token(self) -> float:
        """Experts that crossed the link per token, on demand or ahead."""
        return (self.misses + self.prefetches) / self.num_tokens

    @property
    def policy_us_per_token(self) -> float:
        """The policy's own time per token, microseconds of this machine."""
        return self.policy_s * 1e6 / self.num_tokens
