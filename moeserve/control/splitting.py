"""From which batch size on it pays that the ranks split each batch over the copies together."""

from __future__ import annotations

import math

import numpy as np

from moeserve.control.report import LoadReport
from moeserve.experts.mapping import SlotMap
from moeserve_placement import balanced_shares
from moeserve_placement.slot_table import slot_table

# A layer's split: one small all-gather (0.1 ms between two processes of one host, gloo) and the
# solution (0.1 to 0.4 ms for up to 128 experts).
SPLIT_S = 4e-4
_LEAST_GAIN = 0.02  # of the mean rank load; less is noise


def split_from(window: LoadReport, slot_map: SlotMap, top_k: int) -> int | None:
    """Tokens of a step, over all ranks, from which splitting it saves time; None: never.

    A layer waits for its fullest rank. Where each rank uses its own copies first (or takes turns),
    that rank has ``local`` times the mean load; a min-max split brings it to ``split`` times. The
    difference, in seconds of expert computation, grows with the batch; the price of a split does
    not. Both are means over the layers for the loads of the window.
    """
    num_pairs = window.pairs.sum(1)
    slowest = int(window.compute_s.argmax())
    if not num_pairs[slowest]:
        return None
    pair_s = float(window.compute_s[slowest] / num_pairs[slowest])
    gain = local_imbalance(window, slot_map) - split_imbalance(window, slot_map)
    if gain < _LEAST_GAIN or pair_s <= 0:
        return None
    pairs = SPLIT_S * len(window.pairs) / (pair_s * gain)
    return max(1, math.ceil(pairs / top_k))


def local_imbalance(window: LoadReport, slot_map: SlotMap) -> float:
    """Largest over mean rank load, mean over layers, where ranks use their own copies first."""
    by_home = window.counts.sum(1)  # [num_ranks, num_layers, num_experts]
    loads = np.zeros((by_home.shape[1], by_home.shape[0]))
    for row, layer in enumerate(slot_map.layers):
        holds = np.zeros((by_home.shape[0], by_home.shape[2]))
        for expert, places in enumerate(slot_map.copies(layer)):
            holds[[rank for rank, _ in places], expert] = 1
        own = by_home[:, row] * holds
        remote = (by_home[:, row] - own).sum(0) / holds.sum(0)
        loads[row] = own.sum(1) + holds @ remote
    return _mean_imbalance(loads)


def split_imbalance(window: LoadReport, slot_map: SlotMap) -> float:
    """The same under the min-max split."""
    table = slot_table(slot_map.placement, list(slot_map.layers))
    return _mean_imbalance(balanced_shares(window.by_expert, table).rank_loads)


def _mean_imbalance(loads: np.ndarray) -> float:
    """Of loads [num_layers, num_ranks]; 1.0 where there is no load at all."""
    means = loads.mean(1)
    busy = means > 0
    return float((loads[busy].max(1) / means[busy]).mean()) if busy.any() else 1.0
