"""The machine that a placement is for: ranks, their slots, speeds and nodes, and the links."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from moeserve_placement.checks import check_integer, check_number
from moeserve_placement.placement import PlacementError

_MOST_UNEQUAL = 1e4  # fastest over slowest rank: far beyond real machines, safe in float64 powers
_DEAREST = 1e6  # a copy at this price is never worth it; sums of such prices stay exact enough


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkCosts:
    """What a byte costs on each kind of link, relative to a byte inside a node.

    node: between ranks of one node. fabric: between nodes. host: from host memory or disk, where
    no rank holds a copy.
    """

    node: float = 1.0
    fabric: float = 4.0
    host: float = 8.0

    def __post_init__(self) -> None:
        for name in ("node", "fabric", "host"):
            check_number(f"link_costs.{name}", getattr(self, name), low=0, high=_DEAREST)


@dataclass(frozen=True, slots=True, kw_only=True)
class Topology:
    """Ranks and what they can hold.

    slots_per_rank: expert slots of each rank in every layer; ranks may differ.
    node_of_rank: the node of each rank, numbered from 0; default: all ranks on node 0.
    speed_of_rank: relative speed, load is divided by it; default: 1 for every rank. The fastest
    rank may be 10,000 times as fast as the slowest.
    alive: False for a rank that is gone: it holds nothing and gets nothing; default: all alive.
    bytes_per_expert: bytes of one expert of one layer, the cost of one copy.
    link_costs: relative cost of a copied byte by kind of link.

    Raises:
        PlacementError: lengths differ, a value is out of range or no rank is alive.
    """

    slots_per_rank: tuple[int, ...]
    node_of_rank: tuple[int, ...] = ()
    speed_of_rank: tuple[float, ...] = ()
    alive: tuple[bool, ...] = ()
    bytes_per_expert: int = 1
    link_costs: LinkCosts = field(default_factory=LinkCosts)

    def __post_init__(self) -> None:
        ranks = len(self.slots_per_rank)
        for name, default in (("node_of_rank", 0), ("speed_of_rank", 1.0), ("alive", True)):
            given = tuple(getattr(self, name))
            if given and len(given) != ranks:
                raise PlacementError(
                    f"{name}: has {len(given)} entries, must have {ranks}, one per rank"
                )
            object.__setattr__(self, name, given or (default,) * ranks)
        for name in ("slots_per_rank", "node_of_rank"):
            checked = tuple(
                check_integer(f"{name}[{rank}]", value, low=0)
                for rank, value in enumerate(getattr(self, name))
            )
            object.__setattr__(self, name, checked)
        self._check_values()

    def _check_values(self) -> None:
        if not self.slots_per_rank:
            raise PlacementError("slots_per_rank = (): must name a rank")
        nodes = sorted(set(self.node_of_rank))
        if nodes != list(range(len(nodes))):
            raise PlacementError(f"node_of_rank: nodes {nodes} must be numbered 0, 1, 2, ...")
        for rank, speed in enumerate(self.speed_of_rank):
            check_number(f"speed_of_rank[{rank}]", speed, low=1e-100, high=1e100)
        slowest, fastest = min(self.speed_of_rank), max(self.speed_of_rank)
        if fastest / _MOST_UNEQUAL > slowest:
            raise PlacementError(
                f"speed_of_rank: goes from {slowest:g} to {fastest:g}, the fastest rank must be at "
                f"most {_MOST_UNEQUAL:,.0f} times as fast as the slowest"
            )
        if not any(self.alive):
            raise PlacementError("alive: at least one rank must be alive")
        check_integer("bytes_per_expert", self.bytes_per_expert, low=1)

    @classmethod
    def uniform(
        cls,
        num_ranks: int,
        slots: int,
        *,
        num_nodes: int = 1,
        bytes_per_expert: int = 1,
        link_costs: LinkCosts | None = None,
    ) -> Topology:
        """Equal ranks, spread over the nodes in blocks as evenly as it goes.

        Raises:
            PlacementError: a count is below 1, or more nodes than ranks.
        """
        for name, value in (("num_ranks", num_ranks), ("slots", slots), ("num_nodes", num_nodes)):
            check_integer(name, value, low=1)
        if num_nodes > num_ranks:
            raise PlacementError(f"num_nodes = {num_nodes}: must be at most {num_ranks}, the ranks")
        return cls(
            slots_per_rank=(slots,) * num_ranks,
            node_of_rank=tuple(rank * num_nodes // num_ranks for rank in range(num_ranks)),
            bytes_per_expert=bytes_per_expert,
            link_costs=link_costs or LinkCosts(),
        )

    @property
    def num_ranks(self) -> int:
        """All ranks, also those that are gone."""
        return len(self.slots_per_rank)

    @property
    def num_nodes(self) -> int:
        """Nodes, also those with no rank alive."""
        return max(self.node_of_rank) + 1

    @property
    def usable_slots(self) -> NDArray[np.int64]:
        """Slots that can hold an expert, by rank: int64 [num_ranks]; 0 where the rank is gone."""
        return np.where(self.alive, self.slots_per_rank, 0).astype(np.int64)

    @property
    def num_slots(self) -> int:
        """Usable slots in all."""
        return int(self.usable_slots.sum())

    @property
    def max_slots(self) -> int:
        """Slots of the rank that has most, gone or not."""
        return max(self.slots_per_rank)

    @property
    def speeds(self) -> NDArray[np.float64]:
        """Relative speeds, mean 1 over the alive ranks: float64 [num_ranks], 0 if gone."""
        speeds = np.where(self.alive, self.speed_of_rank, 0.0)
        scaled: NDArray[np.float64] = speeds * (sum(self.alive) / speeds.sum())
        return scaled

    @property
    def divisors(self) -> NDArray[np.float64]:
        """What turns the load of a rank into its level: its speed, 1 where it is gone."""
        return np.where(self.alive, self.speeds, 1.0)

    @property
    def nodes(self) -> NDArray[np.int64]:
        """The node of each rank: int64 [num_ranks]."""
        return np.asarray(self.node_of_rank, dtype=np.int64)

    def ranks_of_node(self, node: int) -> tuple[int, ...]:
        """The alive ranks of a node."""
        return tuple(
            rank
            for rank, (at, alive) in enumerate(zip(self.node_of_rank, self.alive, strict=True))
            if at == node and alive
        )

    def without(self, ranks: Sequence[int]) -> Topology:
        """The same machine with these ranks gone.

        Raises:
            PlacementError: no such rank, or no rank would be left.
        """
        last = self.num_ranks - 1
        gone = {check_integer("ranks gone", rank, low=0, high=last) for rank in ranks}
        return Topology(
            slots_per_rank=self.slots_per_rank,
            node_of_rank=self.node_of_rank,
            speed_of_rank=self.speed_of_rank,
            alive=tuple(alive and rank not in gone for rank, alive in enumerate(self.alive)),
            bytes_per_expert=self.bytes_per_expert,
            link_costs=self.link_costs,
        )

    def link(self, source: int | None, rank: int) -> str:
        """The kind of link a copy takes: 'node', 'fabric', or 'host' where ``source`` is None."""
        if source is None:
            return "host"
        return "node" if self.node_of_rank[source] == self.node_of_rank[rank] else "fabric"

    def check_fits(self, num_experts: int) -> None:
        """Raises PlacementError when the usable slots can not hold every expert once."""
        if self.num_slots < num_experts:
            raise PlacementError(
                f"slots: {self.num_slots} usable slots on {sum(self.alive)} ranks can not hold "
                f"{num_experts} experts; raise slots_per_rank or the number of ranks"
            )
