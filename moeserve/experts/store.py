"""The expert weights of one rank: stacked slots per layer, each holding one expert or free."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import xxhash

from moeserve.experts.mapping import SlotMap
from moeserve_placement import Placement


@dataclass(frozen=True, slots=True, kw_only=True)
class SlotChange:
    """Another content of one slot of any rank.

    expert: what it holds from now on, None: nothing. data: the expert's bytes, uint8 as ``read``
    gives them; only where the slot is this rank's and not to be free.
    """

    rank: int
    slot: int
    expert: int | None
    data: torch.Tensor | None = None


class ExpertStore:
    """Physical slots of this rank, what is in them, and where all ranks have which expert.

    Per MoE layer (by model layer index): ``w13`` [S, 2I, H] (gate rows, then up rows) and ``w2``
    [S, H, I]. S differs by rank and layer, may be 0 and never changes; what a free slot holds is
    never read. Contents change by ``flip``, on all ranks alike and between two steps.
    """

    def __init__(
        self,
        placement: Placement,
        rank: int,
        *,
        hidden_size: int,
        intermediate_size: int,
        dtype: torch.dtype,
    ) -> None:
        """Allocates the slots that ``placement`` gives to ``rank``; ``load`` fills them."""
        self._slot_map = SlotMap(placement, rank)
        self._rank = rank
        self._digests: dict[tuple[int, int], int] = {}
        sizes = {layer: len(ranks[rank]) for layer, ranks in placement.layers.items()}
        self._w13 = {
            layer: torch.zeros(size, 2 * intermediate_size, hidden_size, dtype=dtype)
            for layer, size in sizes.items()
        }
        self._w2 = {
            layer: torch.zeros(size, hidden_size, intermediate_size, dtype=dtype)
            for layer, size in sizes.items()
        }
        self.expert_bytes = 3 * hidden_size * intermediate_size * dtype.itemsize
        """Bytes of one expert of one layer."""

    @property
    def layers(self) -> tuple[int, ...]:
        """Model layer indices of the MoE layers."""
        return tuple(self._w13)

    @property
    def slot_map(self) -> SlotMap:
        """Where every expert is now; a new object after each ``flip``."""
        return self._slot_map

    @property
    def num_bytes(self) -> int:
        """Bytes of all slots, free ones included."""
        return sum(w.nbytes for w in (*self._w13.values(), *self._w2.values()))

    def w13(self, layer: int) -> torch.Tensor:
        """[S, 2I, H]: gate and up projection of every slot."""
        return self._w13[layer]

    def w2(self, layer: int) -> torch.Tensor:
        """[S, H, I]: down projection of every slot."""
        return self._w2[layer]

    def num_slots(self, layer: int) -> int:
        """Slots of this rank in ``layer``, free ones included."""
        return self._w13[layer].shape[0]

    def logical(self, layer: int) -> tuple[int | None, ...]:
        """By slot: the logical expert it is for, or None when free."""
        return self._slot_map.layers[layer][self._rank]

    def load(self, layer: int, slot: int, w13: torch.Tensor, w2: torch.Tensor) -> None:
        """Copies one expert's weights into its slot, converts them to the store's dtype if needed.

        Args:
            w13: [2I, H]; w2: [H, I].

        Raises:
            ValueError: the slot is free or already loaded, or a shape is wrong.
        """
        expert = self.logical(layer)[slot]
        if expert is None:
            raise ValueError(f"layer {layer}, slot {slot}: is free, no expert belongs there")
        if (layer, slot) in self._digests:
            raise ValueError(f"layer {layer}, slot {slot}: expert {expert} is already loaded")
        for name, target, source in (
            ("w13", self._w13[layer][slot], w13),
            ("w2", self._w2[layer][slot], w2),
        ):
            if source.shape != target.shape:
                raise ValueError(
                    f"layer {layer}, expert {expert}: {name} has shape {list(source.shape)}, "
                    f"must be {list(target.shape)}"
                )
            target.copy_(source)
        self._digests[layer, slot] = self.measured_digest(layer, slot)

    def read(self, layer: int, slot: int, start: int, stop: int) -> torch.Tensor:
        """Bytes ``start`` to ``stop`` of a slot's expert, w13 then w2: a copy, uint8 [stop-start].

        Raises:
            ValueError: the range is not within the expert.
        """
        if not 0 <= start <= stop <= self.expert_bytes:
            raise ValueError(f"bytes {start} to {stop}: an expert has {self.expert_bytes}")
        first, second = self._bytes(layer, slot)
        cut = len(first)
        return torch.cat((first[start:stop], second[max(start - cut, 0) : max(stop - cut, 0)]))

    def flip(self, layer: int, changes: Sequence[SlotChange]) -> None:
        """Changes slots of one layer, of any ranks, at once; the bytes of own slots come along.

        Nothing changes where this raises.

        Raises:
            ValueError: an expert would have no copy or two on one rank, a slot does not exist, or
                an own slot's bytes are missing or of the wrong size.
        """
        ranks = [list(slots) for slots in self._slot_map.layers[layer]]
        for change in changes:
            if not (0 <= change.rank < len(ranks) and 0 <= change.slot < len(ranks[change.rank])):
                raise ValueError(f"layer {layer}: rank {change.rank} has no slot {change.slot}")
            ranks[change.rank][change.slot] = change.expert
            self._check_data(layer, change)
        for rank, slots in enumerate(ranks):
            held = [expert for expert in slots if expert is not None]
            if len(set(held)) < len(held):
                raise ValueError(f"layer {layer}: rank {rank} would hold an expert twice")
        slot_map = self._slot_map.changed(layer, tuple(tuple(slots) for slots in ranks))
        for change in changes:
            if change.rank == self._rank:
                self._write(layer, change)
        self._slot_map = slot_map

    def digest(self, layer: int, slot: int) -> int:
        """xxh3 of the expert that was put into the slot, taken when it came."""
        return self._digests[layer, slot]

    def check(self) -> None:
        """The accounting identity: every expert that the placement gives to this rank is loaded,
        once, in its slot, and nothing else is.

        Raises:
            RuntimeError: it does not hold; the text names layer, slot and expert.
        """
        for layer in self.layers:
            for slot, expert in enumerate(self.logical(layer)):
                if (expert is not None) != ((layer, slot) in self._digests):
                    state = "is not loaded" if expert is not None else "is free, yet loaded"
                    raise RuntimeError(f"layer {layer}, slot {slot}: expert {expert} {state}")

    def verify(self, layer: int) -> None:
        """Compares the bytes of every loaded slot with the digest taken when it was loaded.

        Raises:
            RuntimeError: a slot has changed; the text names it.
        """
        for slot, expert in enumerate(self.logical(layer)):
            known = self._digests.get((layer, slot))
            if expert is not None and known != self.measured_digest(layer, slot):
                raise RuntimeError(
                    f"layer {layer}, slot {slot}: weights of expert {expert} are not those loaded"
                )

    def measured_digest(self, layer: int, slot: int) -> int:
        """xxh3 of the bytes that are in the slot now."""
        digest = xxhash.xxh3_64()
        for part in self._bytes(layer, slot):
            digest.update(part.numpy().data)
        return digest.intdigest()

    def _bytes(self, layer: int, slot: int) -> tuple[torch.Tensor, torch.Tensor]:
        """The slot's memory, uint8: w13 and w2."""
        first, second = self._w13[layer][slot], self._w2[layer][slot]
        return first.view(torch.uint8).flatten(), second.view(torch.uint8).flatten()

    def _check_data(self, layer: int, change: SlotChange) -> None:
        if change.rank != self._rank or change.expert is None:
            return
        size = 0 if change.data is None else change.data.numel()
        if size != self.expert_bytes:
            raise ValueError(
                f"layer {layer}, slot {change.slot}: {size} bytes of expert {change.expert}, "
                f"must be {self.expert_bytes}"
            )

    def _write(self, layer: int, change: SlotChange) -> None:
        self._digests.pop((layer, change.slot), None)
        if change.expert is None or change.data is None:
            return
        first, second = self._bytes(layer, change.slot)
        first.copy_(change.data[: len(first)])
        second.copy_(change.data[len(first) :])
        self._digests[layer, change.slot] = self.measured_digest(layer, change.slot)


def digest_of(data: torch.Tensor) -> int:
    """xxh3 of an expert's bytes, uint8, equal to ``ExpertStore.digest`` of a slot with them."""
    return xxhash.xxh3_64(data.numpy().data).intdigest()
