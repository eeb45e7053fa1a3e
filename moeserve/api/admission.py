"""Who is let in. A place is taken before any work is done on a request, and always given back.

Counting first and tokenising later is the point: a burst beyond the limits is refused in
microseconds, and no more than the limits can ever be inside.
"""

from __future__ import annotations

from moeserve.api.errors import ApiError
from moeserve.config import SchedulerConfig

_RETRY_AFTER_S = 1


class Reservation:
    """Places for the sequences of one request. Release it exactly when the request is over."""

    def __init__(self, admission: Admission, num_sequences: int, num_tokens: int) -> None:
        self._admission = admission
        self._num_sequences = num_sequences
        self._num_waiting_tokens = num_tokens

    def resize(self, num_tokens: int) -> None:
        """Replaces the estimate of the prompt's tokens by their number.

        Raises:
            ApiError: 503, the queue has no room for so many.
        """
        self._admission.num_waiting_tokens -= self._num_waiting_tokens
        self._num_waiting_tokens = 0
        self._admission.check_tokens(num_tokens)
        self._admission.num_waiting_tokens += num_tokens
        self._num_waiting_tokens = num_tokens

    def start(self, num_tokens: int) -> None:
        """A sequence has its first token: that part of the prompt tokens waits no longer."""
        num_tokens = min(num_tokens, self._num_waiting_tokens)
        self._num_waiting_tokens -= num_tokens
        self._admission.num_waiting_tokens -= num_tokens

    def finish(self) -> None:
        """One of the sequences is over."""
        if self._num_sequences:
            self._num_sequences -= 1
            self._admission.num_sequences -= 1

    def release(self) -> None:
        """Gives back what is left; a second call does nothing."""
        self.start(self._num_waiting_tokens)
        self._admission.num_sequences -= self._num_sequences
        self._num_sequences = 0


class Admission:
    """The limits of ``SchedulerConfig`` over all ranks, as seen by one HTTP process.

    A sequence waits when all ``num_seats`` of the ranks are taken, or when the ranks say so (KV
    memory may run out before seats do).

    Args:
        num_seats: sequences that all ranks run at once; this process's share of them.
    """

    def __init__(self, config: SchedulerConfig, num_seats: int) -> None:
        self._max_reqs = config.max_num_queued_reqs
        self._max_tokens = config.max_num_queued_tokens
        self._num_seats = num_seats
        self.num_sequences = 0  # admitted and not over
        self.num_waiting_tokens = 0  # of prompts without a first token
        self.num_reported_waiting = 0  # by the ranks, after their last step

    def reserve(self, num_sequences: int, num_tokens: int) -> Reservation:
        """Places for a request.

        Args:
            num_tokens: prompt tokens, estimated.

        Raises:
            ApiError: 503 with Retry-After, the queue is full.
        """
        if self._max_reqs is not None:
            queued = self.num_sequences + num_sequences - self._num_seats
            if self.num_reported_waiting:
                queued = max(queued, self.num_reported_waiting + num_sequences)
            if queued > self._max_reqs:
                raise _full(f"{self._max_reqs} requests")
        self.check_tokens(num_tokens)
        self.num_sequences += num_sequences
        self.num_waiting_tokens += num_tokens
        return Reservation(self, num_sequences, num_tokens)

    def check_tokens(self, num_tokens: int) -> None:
        """Raises ``ApiError`` 503 if so many more would exceed the limit; a lone prompt never."""
        if self._max_tokens is None or self.num_waiting_tokens == 0:
            return
        if self.num_waiting_tokens + num_tokens > self._max_tokens:
            raise _full(f"{self._max_tokens} prompt tokens")


def _full(limit: str) -> ApiError:
    text = f"the queue is full: more than {limit} would be waiting"
    return ApiError(503, text, retry_after=_RETRY_AFTER_S)
