"""Over how many programs a sequence is split, so that few requests still fill a chip."""

from __future__ import annotations

_WAVES = 2  # programs a processor: one loads while another multiplies
_MIN_TOKENS = 256  # of a split: with fewer, writing and merging costs more than it gains


def num_splits(
    num_sms: int, num_requests: int, num_head_blocks: int, longest: int, window: int | None = None
) -> int:
    """How many splits a sequence gets; all requests of a batch get as many.

    It takes the processors, the batch and the length together: by the batch alone, long sequences
    of a dozen requests would run on a fraction of the chip. A sequence shorter than the longest
    leaves its last splits empty.

    num_head_blocks: programs of one request and split: kv heads, times blocks of their query heads.
    longest: tokens of the longest sequence; window: of the sliding window.
    """
    seen = longest if window is None else min(longest, window)
    wanted = -(-_WAVES * num_sms // max(num_requests * num_head_blocks, 1))
    return max(1, min(wanted, -(-seen // _MIN_TOKENS)))
