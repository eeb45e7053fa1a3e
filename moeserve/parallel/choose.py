"""Which transport a step takes: a cost model whose answer is the same on every rank.

It must be: two ranks with different answers would wait for each other in different collectives. So
it is a pure function of what the ranks have agreed on, and knows nothing of the routing.
"""

from __future__ import annotations

from dataclasses import dataclass

from moeserve.parallel.all_gather import AllGatherDispatcher
from moeserve.parallel.all_to_all import AllToAllDispatcher
from moeserve.parallel.dispatcher import StepSizes, TokenDispatcher
from moeserve.parallel.groups import ParallelGroups
from moeserve.parallel.local import LocalDispatcher
from moeserve_kernels.ops import Ops


@dataclass(frozen=True, kw_only=True, slots=True)
class LinkCost:
    """What it costs to meet and to send.

    The defaults are gloo's on the loopback of one host: a collective takes about 0.1 ms between two
    processes, 0.25 ms among three and 0.45 ms among four, and a large one moves 3 GB/s.

    message_s: seconds per collective and peer; bytes_per_s: of one rank, sent plus received.
    """

    message_s: float = 1e-4
    bytes_per_s: float = 3e9


@dataclass(frozen=True, kw_only=True, slots=True)
class TokenShape:
    """What a token weighs: hidden_size values of element_size bytes, top_k choices."""

    hidden_size: int
    top_k: int
    element_size: int

    @property
    def dispatch_bytes(self) -> int:
        """Bytes of a token on its way out: hidden values, slots and weights."""
        return self.combine_bytes + 8 * self.top_k

    @property
    def combine_bytes(self) -> int:
        """Bytes of a partial sum on its way home."""
        return self.hidden_size * self.element_size


def all_to_all_seconds(sizes: StepSizes, shape: TokenShape, link: LinkCost) -> float:
    """Estimated seconds of dispatch and combine by ``AllToAllDispatcher``."""
    routed = _travelling_tokens(sizes, _reach(sizes, shape))
    return _seconds(3, routed * (shape.dispatch_bytes + shape.combine_bytes), sizes, link)


def all_gather_seconds(sizes: StepSizes, shape: TokenShape, link: LinkCost) -> float:
    """Estimated seconds of dispatch and combine by ``AllGatherDispatcher``."""
    gathered = _travelling_tokens(sizes, 1.0)
    routed = _travelling_tokens(sizes, _reach(sizes, shape))
    num_bytes = gathered * shape.dispatch_bytes + routed * shape.combine_bytes
    return _seconds(2, num_bytes, sizes, link)


def _reach(sizes: StepSizes, shape: TokenShape) -> float:
    """Share of the tokens that need a given rank when all ranks are equally likely choices."""
    return 1.0 - (1.0 - 1.0 / len(sizes.num_tokens)) ** shape.top_k


def _travelling_tokens(sizes: StepSizes, reach: float) -> float:
    """Tokens that the busiest rank sends to others, plus those that it receives from them."""
    peers = len(sizes.num_tokens) - 1
    return max(reach * (peers * own + sizes.total - own) for own in sizes.num_tokens)


def _seconds(collectives: int, num_bytes: float, sizes: StepSizes, link: LinkCost) -> float:
    messages = collectives * (len(sizes.num_tokens) - 1)
    return messages * link.message_s + num_bytes / link.bytes_per_s


def choose(sizes: StepSizes, shape: TokenShape, link: LinkCost) -> str:
    """The name of the transport that this step is estimated to be quickest with.

    ``local`` for a world of one; a tie goes to ``all_to_all``.
    """
    if len(sizes.num_tokens) == 1:
        return LocalDispatcher.name
    gather = all_gather_seconds(sizes, shape, link)
    if gather < all_to_all_seconds(sizes, shape, link):
        return AllGatherDispatcher.name
    return AllToAllDispatcher.name


class DispatcherChooser:
    """All transports, made once, and the choice among them."""

    def __init__(
        self,
        groups: ParallelGroups,
        *,
        slots_per_rank: int,
        shape: TokenShape,
        ops: Ops,
        dispatcher: str = "auto",
        link: LinkCost | None = None,
    ) -> None:
        """Makes the transports.

        Args:
            slots_per_rank: of the ``SlotMap`` that makes the physical ids.
            dispatcher: the setting: "auto", or the one to take whatever the cost (a world of one
                is local in any case).

        Raises:
            ValueError: no such dispatcher.
        """
        remote: tuple[TokenDispatcher, ...] = (
            AllToAllDispatcher(groups, slots_per_rank, ops),
            AllGatherDispatcher(groups, slots_per_rank, ops),
        )
        names = ["auto", *(transport.name for transport in remote)]
        if dispatcher not in names:
            raise ValueError(f"dispatcher = {dispatcher!r}: must be one of {', '.join(names)}")
        local = LocalDispatcher(ops)
        self._transports = {transport.name: transport for transport in (*remote, local)}
        self._forced = local.name if groups.world_size == 1 else dispatcher
        self._shape = shape
        self._link = link or LinkCost()

    def __call__(self, sizes: StepSizes) -> TokenDispatcher:
        """The transport for this step; equal on all ranks."""
        name = self._forced
        if name == "auto":
            name = choose(sizes, self._shape, self._link)
        return self._transports[name]
