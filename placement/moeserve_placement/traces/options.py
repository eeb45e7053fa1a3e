"""What a reader may have to be told: facts that a foreign file does not hold."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from moeserve_placement.traces.files import MAX_BYTES
from moeserve_placement.traces.trace import MAX_EXPERTS, MAX_LAYER, MAX_TOP_K, Array, TraceError

_MAX_RANKS = 1 << 20
_MAX_MAX_BYTES = 1 << 50


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadOptions:
    """Facts that complete a foreign file. None: taken from the file where that is possible.

    num_experts: logical experts of a layer. Files of ids do not hold it: highest id plus one.
    top_k: experts per token; ESFT text files do not hold it.
    num_ranks: ranks of a placement; TensorRT-LLM and SGLang files do not hold it.
    select: only the arrays of a raw npz whose name starts so.
    first_layer: model layer index of the first layer, for formats that only number MoE layers.
    max_bytes: limit on one array in memory.

    Raises:
        TraceError: a number is out of range.
    """

    num_experts: int | None = None
    top_k: int | None = None
    num_ranks: int | None = None
    select: str | None = None
    first_layer: int = 0
    max_bytes: int = MAX_BYTES

    def __post_init__(self) -> None:
        for name, low, high in (
            ("num_experts", 1, MAX_EXPERTS),
            ("top_k", 1, MAX_TOP_K),
            ("num_ranks", 1, _MAX_RANKS),
            ("first_layer", 0, MAX_LAYER),
            ("max_bytes", 1, _MAX_MAX_BYTES),
        ):
            value = getattr(self, name)
            if value is not None and not low <= value <= high:
                raise TraceError(f"{name} = {value}: must be in [{low}, {high}]")

    def layer_ids(self, num_layers: int) -> tuple[int, ...]:
        """Consecutive layer ids from first_layer on."""
        return tuple(range(self.first_layer, self.first_layer + num_layers))

    def experts_of(self, highest_id: int) -> int:
        """num_experts as given, else the highest id seen plus one."""
        return self.num_experts if self.num_experts is not None else highest_id + 1


def to_logical(counts: Array, physical_to_logical: Array, *, num_experts: int | None) -> Array:
    """Counts of physical experts summed into their logical experts.

    counts: integer [num_windows, num_layers, num_physical_experts].
    physical_to_logical: integer [num_layers, num_physical_experts]; -1: the slot is unused.
    Returns int64 [num_windows, num_layers, num_logical_experts].

    Raises:
        TraceError: shapes do not agree, an id is outside [-1, num_experts), or a slot that is not
            used has tokens.
    """
    if counts.ndim != 3 or counts.dtype.kind not in "iu":
        raise TraceError(f"counts: must be integers [windows, layers, experts], not {counts.shape}")
    if min(counts.shape) < 1:
        raise TraceError(f"counts: shape {counts.shape} has an empty dimension")
    if physical_to_logical.shape != counts.shape[1:] or physical_to_logical.dtype.kind not in "iu":
        raise TraceError(
            f"physical_to_logical_map: must be integers of shape {counts.shape[1:]}, as the counts,"
            f" not {physical_to_logical.dtype} {physical_to_logical.shape}"
        )
    highest = int(physical_to_logical.max())
    experts = num_experts if num_experts is not None else highest + 1
    if int(physical_to_logical.min()) < -1 or highest >= experts or not 0 < experts <= MAX_EXPERTS:
        raise TraceError(
            f"physical_to_logical_map: expert ids must be in [0, {experts}) (-1: unused slot)"
        )
    if (counts[:, physical_to_logical < 0] != 0).any():
        raise TraceError("physical_to_logical_map: an unused slot (-1) has tokens")
    logical = np.zeros((*counts.shape[:2], experts), dtype=np.int64)
    for layer, slots in enumerate(physical_to_logical.astype(np.int64)):
        used = np.flatnonzero(slots >= 0)
        # add.at also adds where one logical expert has several slots.
        np.add.at(logical[:, layer].T, slots[used], counts[:, layer, used].T)
    return logical
