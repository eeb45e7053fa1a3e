"""The expert weights of one rank: stacked slots per layer, each holding one expert or free."""

from __future__ import annotations

import torch
import xxhash

from moeserve_placement import Placement


class ExpertStore:
    """Physical slots of this rank and what is in them.

    Per MoE layer (by model layer index): ``w13`` [S, 2I, H] (gate rows, then up rows) and ``w2``
    [S, H, I]. S differs by rank and layer and may be 0; a free slot holds zeros.
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
        if not 0 <= rank < placement.num_ranks:
            raise ValueError(f"rank = {rank}: the placement is for {placement.num_ranks} ranks")
        self._logical = {layer: ranks[rank] for layer, ranks in placement.layers.items()}
        self._digests: dict[tuple[int, int], int] = {}
        self._w13 = {
            layer: torch.zeros(len(slots), 2 * intermediate_size, hidden_size, dtype=dtype)
            for layer, slots in self._logical.items()
        }
        self._w2 = {
            layer: torch.zeros(len(slots), hidden_size, intermediate_size, dtype=dtype)
            for layer, slots in self._logical.items()
        }

    @property
    def layers(self) -> tuple[int, ...]:
        """Model layer indices of the MoE layers."""
        return tuple(self._logical)

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
        return len(self._logical[layer])

    def logical(self, layer: int) -> tuple[int | None, ...]:
        """By slot: the logical expert it is for, or None when free."""
        return self._logical[layer]

    def load(self, layer: int, slot: int, w13: torch.Tensor, w2: torch.Tensor) -> None:
        """Copies one expert's weights into its slot, converts them to the store's dtype if needed.

        Args:
            w13: [2I, H]; w2: [H, I].

        Raises:
            ValueError: the slot is free or already loaded, or a shape is wrong.
        """
        expert = self._logical[layer][slot]
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
        self._digests[layer, slot] = self._digest(layer, slot)

    def check(self) -> None:
        """The accounting identity: every expert that the placement gives to this rank is loaded,
        once, in its slot, and nothing else is.

        Raises:
            RuntimeError: it does not hold; the text names layer, slot and expert.
        """
        for layer, slots in self._logical.items():
            for slot, expert in enumerate(slots):
                if (expert is not None) != ((layer, slot) in self._digests):
                    state = "is not loaded" if expert is not None else "is free, yet loaded"
                    raise RuntimeError(f"layer {layer}, slot {slot}: expert {expert} {state}")

    def verify(self, layer: int) -> None:
        """Compares the bytes of every loaded slot with the digest taken when it was loaded.

        Raises:
            RuntimeError: a slot has changed; the text names it.
        """
        for slot, expert in enumerate(self._logical[layer]):
            if expert is not None and self._digests.get((layer, slot)) != self._digest(layer, slot):
                raise RuntimeError(
                    f"layer {layer}, slot {slot}: weights of expert {expert} are not those loaded"
                )

    def _digest(self, layer: int, slot: int) -> int:
        digest = xxhash.xxh3_64()
        for weights in (self._w13[layer][slot], self._w2[layer][slot]):
            digest.update(weights.view(torch.uint8).numpy().data)
        return digest.intdigest()
