"""The queue of requests that hold no blocks."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterator

from moeserve.engine.request import Request


class WaitingQueue:
    """Requests in the order in which they are admitted: by ``Request.order``, lowest first.

    A preempted request keeps its order, so it comes back in front of all that arrived after it.
    """

    def __init__(self) -> None:
        self._requests: list[Request] = []
        self.num_tokens = 0  # known tokens of all that wait

    def __len__(self) -> int:
        return len(self._requests)

    def __iter__(self) -> Iterator[Request]:
        return iter(self._requests)

    @property
    def head(self) -> Request:
        """The request that is next; the queue must not be empty."""
        return self._requests[0]

    def push(self, request: Request) -> None:
        """Adds a request at its place."""
        insort(self._requests, request, key=_order)
        self.num_tokens += len(request.token_ids)

    def remove(self, request: Request) -> None:
        """Takes a request out, wherever it stands."""
        index = bisect_left(self._requests, request.order, key=_order)
        assert self._requests[index] is request, "orders are unique"
        del self._requests[index]
        self.num_tokens -= len(request.token_ids)


def _order(request: Request) -> tuple[int, int]:
    return request.order
