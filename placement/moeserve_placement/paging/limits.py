"""Which predictors can run on a trace: reasons against it, estimated before any memory is taken."""

from __future__ import annotations

from moeserve_placement.paging.neighbours import MEMORY

MAX_BYTES = 4 << 30
"""Memory that one predictor may take."""


def reason_against(
    predictor: str, *, num_layers: int, num_experts: int, horizon: int, lanes: int
) -> str | None:
    """Why a predictor can not run, in words; None: it can.

    horizon: layer steps to look ahead, fewer where the model has fewer layers. lanes: tokens that a
    step has at most.
    """
    if predictor == "none":
        return None
    if num_layers < 2:
        return "it needs a next layer, the trace has one"
    ahead = min(horizon, num_layers - 1)
    # Chances of one step, as an array and as the lists that the simulation reads.
    num_bytes = 100 * ahead * num_layers * num_experts
    if predictor == "count-tables":
        # Counts and log ratios by layer and by token; evidence of a step with its temporaries.
        num_bytes += 16 * (ahead + 2) * num_layers * num_experts**2
        num_bytes += 64 * ahead * lanes * num_layers * num_experts
    if predictor == "neighbours":
        paths = 2 + num_layers + ahead
        num_bytes += MEMORY * num_experts * (paths + 4 * (5 + ahead))
        num_bytes += 12 * lanes * paths * num_experts
    if num_bytes <= MAX_BYTES:
        return None
    return (
        f"with horizon = {ahead}, {num_layers} layers and {num_experts} experts it needs "
        f"{num_bytes / 2**30:.1f} GiB, must be at most {MAX_BYTES / 2**30:.0f}; choose a smaller "
        "horizon"
    )
