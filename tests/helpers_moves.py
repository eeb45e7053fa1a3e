"""Ranks without processes: expert stores and movers in one, stepped together."""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import cache

import torch

from moeserve.experts.mover import ExpertMover
from moeserve.experts.orders import Order
from moeserve.experts.store import ExpertStore
from moeserve_placement import Placement

LAYERS = (1, 4)
HIDDEN, INTERMEDIATE = 6, 5


@cache
def weights(layer: int, expert: int) -> tuple[torch.Tensor, torch.Tensor]:
    """w13 [2I, H] and w2 [H, I] of one expert, different for each."""
    generator = torch.Generator().manual_seed(1000 * layer + expert)
    return (
        torch.randn(2 * INTERMEDIATE, HIDDEN, generator=generator),
        torch.randn(HIDDEN, INTERMEDIATE, generator=generator),
    )


def random_layers(
    rng: random.Random, num_ranks: int, sizes: dict[int, list[int]] | None = None, experts: int = 0
) -> Placement:
    """A valid placement: every expert somewhere, never twice on a rank, any slot may be free."""
    experts = experts or rng.randint(1, 8)
    layers = {}
    for layer in LAYERS:
        while True:
            slots = sizes[layer] if sizes else [rng.randint(1, 6) for _ in range(num_ranks)]
            dealt = _deal(rng, slots, experts)
            if dealt is not None:
                break
            assert sizes is None or experts <= sum(slots)
        layers[layer] = dealt
    return Placement(num_experts=experts, layers=layers)


def _deal(
    rng: random.Random, slots: list[int], experts: int
) -> tuple[tuple[int | None, ...], ...] | None:
    """One layer's slots, filled at random; None where that did not come out."""
    if sum(slots) < experts:
        return None
    held: list[list[int | None]] = [[] for _ in slots]
    for expert in rng.sample(range(experts), experts):
        open_ranks = [rank for rank, have in enumerate(held) if len(have) < slots[rank]]
        held[rng.choice(open_ranks)].append(expert)
    for rank, have in enumerate(held):
        for expert in rng.sample(range(experts), experts):
            if len(have) < slots[rank] and expert not in have and rng.random() < 0.6:
                have.append(expert)
        have += [None] * (slots[rank] - len(have))
        rng.shuffle(have)
    return tuple(tuple(have) for have in held)


class LocalRanks:
    """All ranks of a placement, with weights loaded."""

    def __init__(self, placement: Placement) -> None:
        self.placement = placement
        self.num_ranks = placement.num_ranks
        self.corrupt_next = False
        self.num_flips = 0
        self.stores = [self._store(rank) for rank in range(self.num_ranks)]
        self.digests = {
            (layer, expert): store.digest(layer, slot)
            for store in self.stores
            for layer in LAYERS
            for slot, expert in enumerate(store.logical(layer))
            if expert is not None
        }
        self.expert_bytes = self.stores[0].expert_bytes
        self.movers = [
            ExpertMover(store, _no_exchange, self.num_ranks, self.digests) for store in self.stores
        ]

    def _store(self, rank: int) -> ExpertStore:
        store = ExpertStore(
            self.placement,
            rank,
            hidden_size=HIDDEN,
            intermediate_size=INTERMEDIATE,
            dtype=torch.float32,
        )
        for layer in LAYERS:
            for slot, expert in enumerate(store.logical(layer)):
                if expert is not None:
                    store.load(layer, slot, *weights(layer, expert))
        return store

    def random_target(self, rng: random.Random) -> Placement:
        """Another placement for the same slots."""
        sizes = {layer: [len(s) for s in self.placement.layers[layer]] for layer in LAYERS}
        return random_layers(rng, self.num_ranks, sizes, self.placement.num_experts)

    def carry_out(
        self, order: Order, budget: int, after_flip: Callable[[], None] | None = None
    ) -> list[str]:
        """Steps until the order is over; returns what stopped it, if anything did."""
        for mover in self.movers:
            mover.begin(order)
        while self.movers[0].is_busy:
            reasons = [mover.failure for mover in self.movers if mover.failure]
            ready = min(mover.num_ready for mover in self.movers)
            for mover in self.movers:
                mover.cancel() if reasons else mover.flip(ready)
            self.num_flips += ready if not reasons else 0
            if reasons:
                return reasons
            if after_flip is not None and ready:
                after_flip()
            self._advance(budget)
        return []

    def _advance(self, budget: int) -> None:
        """All ranks' ``advance``, with the exchange between them done by hand."""
        parcels = [mover.pack(budget) for mover in self.movers]
        assert len({parcel.num_bytes for parcel in parcels}) == 1
        sent = [torch.split(parcel.rows, parcel.send) for parcel in parcels]
        for rank, (mover, parcel) in enumerate(zip(self.movers, parcels, strict=True)):
            parts = [sent[source][rank] for source in range(self.num_ranks)]
            assert [len(part) for part in parts] == parcel.receive
            arrived = torch.cat(parts)
            if self.corrupt_next and len(arrived):
                arrived[0] ^= 1
                self.corrupt_next = False
            mover.unpack(parcel, arrived)

    def check(self) -> None:
        """Every rank's slots hold what the map says, bit for bit, and all maps agree."""
        for store in self.stores:
            store.check()
            assert store.slot_map.layers == self.stores[0].slot_map.layers
            for layer in LAYERS:
                store.verify(layer)
                for slot, expert in enumerate(store.logical(layer)):
                    if expert is not None:
                        assert store.digest(layer, slot) == self.digests[layer, expert]
                        w13, w2 = weights(layer, expert)
                        assert torch.equal(store.w13(layer)[slot], w13)
                        assert torch.equal(store.w2(layer)[slot], w2)


def _no_exchange(rows: torch.Tensor, send: list[int], receive: list[int]) -> torch.Tensor:
    raise AssertionError("ranks are stepped by hand here")
