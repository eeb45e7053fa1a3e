"""What rank 0 says to all ranks at the top of a step; each acts on it in that same step."""

from __future__ import annotations

import msgspec

from moeserve.experts.orders import Order


class CollectLoad(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """All ranks send their load counters to rank 0."""


class Begin(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """All ranks take up an order."""

    order: Order


class Cancel(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """All ranks drop what is left of the order in progress."""


class SplitFrom(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Steps of at least so many tokens are split over copies by all ranks together; None: none."""

    num_tokens: int | None


News = CollectLoad | Begin | Cancel | SplitFrom

encode = msgspec.msgpack.Encoder().encode
decode = msgspec.msgpack.Decoder(News).decode
