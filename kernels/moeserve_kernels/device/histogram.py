"""The share of pairs that each slot gets, averaged over steps, without waiting for the device."""

from __future__ import annotations

import torch


class HistogramTracker:
    """Averages the ``counts`` of alignments; each is known a step or more after it was made.

    Counts are copied to the host beside the running step and looked at when the copy is done; while
    one is under way, further ones are left out. For use from one thread, outside graph capture
    (within it ``observe`` does nothing).
    """

    def __init__(self, num_slots: int, *, decay: float = 0.9) -> None:
        """decay: weight of the past against a new step, 0 <= decay < 1.

        Raises ValueError when it is not.
        """
        if not 0 <= decay < 1:
            raise ValueError(f"decay = {decay}: must be at least 0 and less than 1")
        self._decay = decay
        self._shares: list[float] | None = None
        self._buffer = torch.zeros(num_slots, dtype=torch.int32)
        self._pending_pairs = 0  # pairs of the step whose counts are on their way; 0: none are
        self._copied: torch.cuda.Event | None = None

    def observe(self, counts: torch.Tensor, num_pairs: int) -> None:
        """Starts to copy ``counts`` (int32 [num_slots]) of a step with ``num_pairs`` pairs.

        ``num_pairs`` includes pairs that are not here, so that shares sum to what this rank gets.
        """
        on_device = counts.device.type == "cuda"
        if on_device and torch.cuda.is_current_stream_capturing():
            return
        self._collect()
        if self._pending_pairs > 0 or num_pairs == 0:
            return
        if on_device:
            if not self._buffer.is_pinned():
                self._buffer = self._buffer.pin_memory()
            self._buffer.copy_(counts, non_blocking=True)
            self._copied = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._copied.record()
        else:
            self._buffer.copy_(counts)
        self._pending_pairs = num_pairs

    def expected(self, num_pairs: int) -> list[float] | None:
        """Pairs of each slot to expect among ``num_pairs``; None before anything is known."""
        self._collect()
        if self._shares is None:
            return None
        return [share * num_pairs for share in self._shares]

    def _collect(self) -> None:
        """Takes in the copied counts if they have arrived."""
        if self._pending_pairs == 0 or not self._has_arrived():
            return
        new = [count / self._pending_pairs for count in self._buffer.tolist()]
        old = self._shares
        if old is None:
            self._shares = new
        else:
            keep = self._decay
            self._shares = [
                keep * past + (1 - keep) * now for past, now in zip(old, new, strict=True)
            ]
        self._pending_pairs, self._copied = 0, None

    def _has_arrived(self) -> bool:
        if self._copied is None:
            return True
        if torch.cuda.is_current_stream_capturing():
            return False
        return bool(self._copied.query())  # type: ignore[no-untyped-call]
