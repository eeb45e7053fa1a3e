"""One budget over all layers: which steps of which layers to take."""

from __future__ import annotations

import heapq
from collections.abc import Sequence

from moeserve_placement.planners.problem import Step


def affordable_steps(steps: Sequence[Sequence[Step]], budget: float) -> list[int]:
    """How many of its steps each layer takes so that the objective drops most for the budget.

    budget: copies over all layers, may be infinite. Steps of a layer come in order, so a layer
    offers the stretch of next steps with the best gain per copy, and the best offer of all layers
    is taken (greedy on the concave hull, the classic approximation of the knapsack).
    """
    taken = [0] * len(steps)
    offers: list[tuple[float, int, int, int]] = []
    left = budget
    for layer in range(len(steps)):
        _offer(offers, layer, steps[layer], 0, left)
    while offers:
        _, layer, stop, copies = heapq.heappop(offers)
        if copies <= left:
            taken[layer] = stop
            left -= copies
        _offer(offers, layer, steps[layer], taken[layer], left)  # what is left may pay for less
    return taken


def _offer(
    offers: list[tuple[float, int, int, int]],
    layer: int,
    steps: Sequence[Step],
    start: int,
    left: float,
) -> None:
    """The layer's best affordable stretch goes on the heap: (-gain per copy, layer, stop,)."""
    gain, copies = 0.0, 0
    best: tuple[float, int, int, int] | None = None
    for index in range(start, len(steps)):
        gain += steps[index].gain
        copies += steps[index].copies
        offer = (-gain / max(copies, 1), layer, index + 1, copies)
        if copies <= left and (best is None or offer < best):
            best = offer
    if best is not None and best[0] < 0:
        heapq.heappush(offers, best)
