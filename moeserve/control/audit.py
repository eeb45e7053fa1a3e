"""What the placement manager did and why, what it expected and what came true."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping, Sequence

import msgspec

from moeserve_placement import Move
from moeserve_placement.placement import Slots

MAX_ENTRIES = 256
MAX_SENTENCES = 200  # of one entry

Layers = Mapping[int, tuple[Slots, ...]]


class Entry(msgspec.Struct, kw_only=True):
    """One decision. Only ``state`` and what was measured afterwards change.

    trigger: "load" (the manager itself), "request" or "rollback". state: "planning", "moving",
    "done", "declined", "dry run", "failed". reason: one sentence, of the planner or of what refused
    it. moves: one sentence each, at most ``MAX_SENTENCES``. num_copies, num_bytes: of the plan.
    num_groups_done: how many of ``num_groups`` moves took effect.
    imbalance_before, imbalance_predicted, imbalance_measured: largest over mean rank load, mean
    over layers: of the window before, by the planner, of the first whole window afterwards.
    seconds_saved, seconds_spent: what the cost model expected. placement_id: what was in force
    before it, to which a rollback may lead.
    """

    id: int
    time: float
    trigger: str
    planner: str
    state: str = "planning"
    reason: str = ""
    moves: list[str] = []
    num_copies: int = 0
    num_bytes: int = 0
    num_groups: int = 0
    num_groups_done: int = 0
    imbalance_before: float | None = None
    imbalance_predicted: float | None = None
    imbalance_measured: float | None = None
    seconds_saved: float | None = None
    seconds_spent: float | None = None
    placement_id: int = 0


class AuditLog:
    """The newest decisions, and the placements that were in force before them."""

    def __init__(self) -> None:
        self._entries: deque[Entry] = deque(maxlen=MAX_ENTRIES)
        self._placements: dict[int, Layers] = {}
        self._next_id = 1
        self.counts: dict[str, int] = {}
        """Decisions by final state, since start."""

    def open(self, *, time: float, trigger: str, planner: str, layers: Layers) -> Entry:
        """A new entry; ``layers`` is what is in force now."""
        entry = Entry(
            id=self._next_id,
            time=time,
            trigger=trigger,
            planner=planner,
            placement_id=self._next_id,
        )
        self._next_id += 1
        self._entries.append(entry)
        self._placements[entry.placement_id] = layers
        oldest = self._entries[0].placement_id
        for placement_id in [known for known in self._placements if known < oldest]:
            del self._placements[placement_id]
        return entry

    def close(self, entry: Entry, state: str, reason: str = "") -> None:
        """Ends an entry."""
        entry.state = state
        if reason:
            entry.reason = reason
        self.counts[state] = self.counts.get(state, 0) + 1

    def placement(self, placement_id: int) -> Layers | None:
        """The placement in force before the entry of that id; None if it is not remembered."""
        return self._placements.get(placement_id)

    def __iter__(self) -> Iterator[Entry]:
        """Newest first."""
        return reversed(self._entries)


def sentences(moves: Sequence[Move]) -> list[str]:
    """What the moves do, in words; of many only the first."""
    shown = [move.sentence() for move in moves[:MAX_SENTENCES]]
    if len(moves) > MAX_SENTENCES:
        shown.append(f"and {len(moves) - MAX_SENTENCES} more")
    return shown
