"""A plan: the new placement and the moves that lead there, each of which can be the last.

A move writes one slot, or, where a last copy would be overwritten, a cycle of slots at once: the
new weights arrive in a spare buffer and the routing table flips when all of them are there. So
every expert has a copy after every move, and a plan can be stopped, checked or reverted between any
two.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from moeserve_placement.placement import Placement, PlacementError, Slots
from moeserve_placement.slot_table import Floats


@dataclass(frozen=True, slots=True, kw_only=True)
class SlotWrite:
    """One slot gets another expert.

    expert: what it holds afterwards; None: it becomes free. replaces: what it held, None if free.
    source_rank: the rank the copy comes from; None where no rank alive holds it (host memory).
    link: 'node', 'fabric' or 'host'; 'none' where nothing is copied. num_bytes: bytes copied.
    """

    rank: int
    slot: int
    expert: int | None
    replaces: int | None
    source_rank: int | None
    link: str
    num_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Move:
    """Slot writes of one layer that take effect together: one of them, or a cycle.

    layer: model layer index. gain: how much the layer's objective drops by it, in units of
    imbalance; below 0 where a planner without an objective made it worse; None if not computed.
    """

    layer: int
    writes: tuple[SlotWrite, ...]
    gain: float | None = None

    @property
    def num_bytes(self) -> int:
        """Bytes copied."""
        return sum(write.num_bytes for write in self.writes)

    @property
    def num_copies(self) -> int:
        """Experts copied to a rank that did not hold them."""
        return sum(write.expert is not None for write in self.writes)

    def sentence(self) -> str:
        """What the move does, in words."""
        parts = [_write_words(write) for write in self.writes]
        gain = "" if self.gain is None else f"; imbalance {-self.gain:+.4f}"
        return f"layer {self.layer}: {' and '.join(parts)}{gain}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Forecast:
    """Predicted quality of a placement, by layer index; imbalance is largest over mean rank load.

    mean_imbalance: under the weighted mean of the scenarios. worst_imbalance: in the worst one.
    objective: what the planner minimises. nodes_per_token: estimated from co-activation, or None.
    """

    mean_imbalance: Mapping[int, float]
    worst_imbalance: Mapping[int, float]
    objective: Mapping[int, float]
    nodes_per_token: Mapping[int, float] | None = None

    @property
    def mean(self) -> float:
        """``mean_imbalance``, mean over the layers."""
        return _mean(self.mean_imbalance)

    @property
    def worst(self) -> float:
        """``worst_imbalance``, mean over the layers."""
        return _mean(self.worst_imbalance)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Plan:
    """What a planner proposes.

    planner: its name. current: the placement it started from, None for a cold start.
    placement: the result. moves: ordered over all layers, the most useful per byte first; empty for
    a cold start, where there is nothing to move yet.
    split: the split of an expert over its copies that the forecasts assume: 'even', 'planned' (the
    ``shares`` below) or 'batch' (solved for the counts of every batch, see ``shares.py``).
    shares: fraction of its expert that a slot takes, float64 [num_layers, num_ranks, max_slots] in
    the order of ``layer_ids``; None unless ``split`` is 'planned'.
    before, after: forecasts for ``current`` and ``placement``; ``before`` is None for a cold start.
    reason: one sentence that says what was decided and why.
    """

    planner: str
    layer_ids: tuple[int, ...]
    placement: Placement
    reason: str
    current: Placement | None = None
    moves: tuple[Move, ...] = ()
    split: str = "even"
    shares: Floats | None = None
    before: Forecast | None = None
    after: Forecast | None = None

    @property
    def num_bytes(self) -> int:
        """Bytes that all moves copy."""
        return sum(move.num_bytes for move in self.moves)

    @property
    def num_copies(self) -> int:
        """Experts that all moves copy."""
        return sum(move.num_copies for move in self.moves)

    @property
    def is_stay(self) -> bool:
        """Whether nothing changes."""
        return self.current is not None and not self.moves

    def placement_after(self, num_moves: int) -> Placement:
        """The placement once the first ``num_moves`` moves are done.

        Raises:
            PlacementError: the plan is a cold start, or has fewer moves.
        """
        if self.current is None:
            raise PlacementError("plan: is a cold start, there is no placement to move from")
        if not 0 <= num_moves <= len(self.moves):
            raise PlacementError(f"num_moves = {num_moves}: must be 0 to {len(self.moves)}")
        return apply_moves(self.current, self.moves[:num_moves])

    def explain(self) -> tuple[str, ...]:
        """The reason, then one sentence per move."""
        return (self.reason, *(move.sentence() for move in self.moves))


def apply_moves(placement: Placement, moves: Sequence[Move]) -> Placement:
    """The placement after these moves.

    Raises:
        PlacementError: a move does not find what it replaces, or the result is not valid.
    """
    by_layer: dict[int, list[Move]] = defaultdict(list)
    for move in moves:
        by_layer[move.layer].append(move)
    layers = dict(placement.layers)
    for layer, layer_moves in by_layer.items():
        if layer not in layers:
            raise PlacementError(f"move: the placement has no layer {layer}")
        layers[layer] = _apply_layer(layer, layers[layer], layer_moves)
    return Placement(num_experts=placement.num_experts, layers=layers)


def _apply_layer(layer: int, ranks: tuple[Slots, ...], moves: Sequence[Move]) -> tuple[Slots, ...]:
    table = [list(slots) for slots in ranks]
    for move in moves:
        for write in move.writes:
            row = table[write.rank] if 0 <= write.rank < len(table) else []
            row.extend([None] * (write.slot + 1 - len(row)))  # a rank may have got more slots
            if not row or row[write.slot] != write.replaces:
                raise PlacementError(
                    f"move: layer {layer}, rank {write.rank}, slot {write.slot} does not hold "
                    f"{write.replaces}"
                )
            row[write.slot] = write.expert
    return tuple(tuple(slots) for slots in table)


def _write_words(write: SlotWrite) -> str:
    place = f"rank {write.rank} slot {write.slot}"
    if write.expert is None:
        return f"free {place} of expert {write.replaces}"
    source = "host memory" if write.source_rank is None else f"rank {write.source_rank}"
    instead = "a free slot" if write.replaces is None else f"expert {write.replaces}"
    return f"copy expert {write.expert} from {source} to {place} in place of {instead}"


def _mean(values: Mapping[int, float]) -> float:
    return sum(values.values()) / len(values) if values else 1.0
