"""What the engine and the planner process say to each other, and the planner's side of it.

The planner keeps the load history, so that windows travel once; it knows nothing of ranks that
step, and everything it is told it checks, so that the worst answer is an error with a reason.
"""

from __future__ import annotations

import math

import msgspec
import numpy as np

from moeserve_placement import Budget, LoadHistory, Move, Placement, Topology, get_planner
from moeserve_placement.placement import Slots
from moeserve_placement.plan import Forecast


class Machine(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Said first: what is planned for. bytes_per_expert: of one layer."""

    layers: list[int]
    num_experts: int
    bytes_per_expert: int


class Window(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Tokens by layer and expert since the last one, int64 in native order."""

    counts: bytes


class Ask(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Asks for a plan from where experts are now. max_bytes: what may be copied, None: any."""

    ask_id: int
    planner: str
    layers: dict[int, tuple[Slots, ...]]
    max_bytes: int | None = None


ToPlanner = Machine | Window | Ask


class Proposal(msgspec.Struct, frozen=True, array_like=True):
    """The answer to ``Ask``.

    before, after: predicted imbalance (largest over mean rank load), mean over the layers; NaN
    where nothing is known. error: why there is no plan; then there are no moves.
    """

    ask_id: int
    moves: list[Move] = []
    reason: str = ""
    before: float = math.nan
    after: float = math.nan
    error: str | None = None


encode = msgspec.msgpack.Encoder().encode
decode_to_planner = msgspec.msgpack.Decoder(ToPlanner).decode
decode_proposal = msgspec.msgpack.Decoder(Proposal).decode


class PlannerSession:
    """The planner's state: what is planned for, and the load seen so far."""

    def __init__(self, machine: Machine) -> None:
        self._machine = machine
        self._history = LoadHistory(machine.layers, machine.num_experts)

    def observe(self, window: Window) -> None:
        """Takes a window of counts.

        Raises:
            ValueError: it has another shape, or a negative count.
        """
        shape = (len(self._machine.layers), self._machine.num_experts)
        counts = np.frombuffer(window.counts, dtype=np.int64)
        if counts.size != shape[0] * shape[1]:
            raise ValueError(f"window: has {counts.size} counts, must have {shape[0]} x {shape[1]}")
        self._history.observe(counts.reshape(shape))

    def propose(self, ask: Ask) -> Proposal:
        """A plan, or the reason why there is none. Never raises."""
        try:
            return self._plan(ask)
        except Exception as error:  # whatever a planner does, serving goes on
            return Proposal(ask.ask_id, error=f"{type(error).__name__}: {error}")

    def _plan(self, ask: Ask) -> Proposal:
        current = Placement(num_experts=self._machine.num_experts, layers=ask.layers)
        topology = Topology(
            slots_per_rank=_slots_per_rank(current),
            bytes_per_expert=self._machine.bytes_per_expert,
        )
        plan = get_planner(ask.planner).plan(
            self._history, topology, current=current, budget=Budget(max_bytes=ask.max_bytes)
        )
        return Proposal(
            ask.ask_id,
            moves=list(plan.moves),
            reason=plan.reason,
            before=_imbalance(plan.before),
            after=_imbalance(plan.after),
        )


def _slots_per_rank(placement: Placement) -> tuple[int, ...]:
    sizes = {tuple(len(slots) for slots in ranks) for ranks in placement.layers.values()}
    if len(sizes) > 1:
        raise ValueError("placement: layers have different numbers of slots, no planner takes that")
    return next(iter(sizes))


def _imbalance(forecast: Forecast | None) -> float:
    return math.nan if forecast is None else forecast.mean
