"""After ranks are gone: experts that lost their last copy come back, whatever the budget."""

from __future__ import annotations

import numpy as np

from moeserve_placement.slot_table import Floats, Ints, copy_counts
from moeserve_placement.topology import Topology


def repaired(here: Ints, load: Floats, topology: Topology) -> Ints:
    """The table [num_layers, num_ranks, max_slots] with every expert back on some rank.

    Heaviest lost expert first, to the least loaded rank that has a free slot or an expert with
    another copy (of those the lightest leaves). Layers that lost nothing are untouched.
    load: [num_layers, num_experts], any scale.
    """
    result = here.copy()
    counts = copy_counts(here, load.shape[1])
    for row in np.flatnonzero((counts == 0).any(1)):
        _repair_layer(result[row], load[row], counts[row], topology)
    return result


def _repair_layer(table: Ints, load: Floats, counts: Ints, topology: Topology) -> None:
    usable = np.arange(table.shape[1]) < topology.usable_slots[:, None]
    lost = np.flatnonzero(counts == 0)
    for expert in lost[np.argsort(-load[lost], kind="stable")]:
        unit = np.append(load / np.maximum(counts, 1), 0.0)  # expert -1 is the last, without load
        spare = usable & ((table < 0) | (np.append(counts, 2)[table] > 1))
        levels = unit[table].sum(1) / np.maximum(topology.speeds, 1e-300)
        cost = np.where(spare, levels[:, None] + 1e-6 * unit[table], np.inf)
        rank, slot = np.unravel_index(int(cost.argmin()), cost.shape)
        old = table[rank, slot]
        if old >= 0:
            counts[old] -= 1
        counts[expert] = 1
        table[rank, slot] = expert
