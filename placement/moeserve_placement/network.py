"""The linear solve behind ``shares``: levels of ranks as potentials of a resistor network.

A proximal step minimises  sum_g s_g level_g^2 / 2  +  (stiffness / 2) sum_edges (x - x_old)^2 / c
under fixed tokens per expert; c is an edge's conductance. Its levels solve one symmetric positive
definite system per layer, whatever the components of the graph are.
"""

from __future__ import annotations

import numpy as np

from moeserve_placement.share_graph import ShareGraph
from moeserve_placement.slot_table import Floats, Ints

STIFFNESS = 1e-4
"""Two steps leave level errors of about its square, relative."""
_NOTHING = 1e-280  # of an expert's tokens: scaling less up would overflow


def network_inverse(graph: ShareGraph, conductance: Floats, speeds: Floats) -> Floats:
    """Levels from loads, as a matrix per layer: float64 [num_layers, num_ranks, num_ranks].

    conductance: per edge, 0 where the copy is not used; positive for some copy of each expert.
    """
    layers, ranks, _ = graph.shape
    local = graph.group - np.searchsorted(graph.group_layer, graph.group_layer)[graph.group]
    width = int(local.max(initial=0)) + 1
    joint = np.zeros((layers, width, ranks))
    joint[graph.group_layer[graph.group], local, graph.edge_rank % ranks] = conductance
    total = joint.sum(2, keepdims=True)
    system = -np.swapaxes(joint, 1, 2) @ (joint / np.where(total > 0, total, 1.0))
    diagonal = np.arange(ranks)
    system[:, diagonal, diagonal] += joint.sum(1)
    system /= STIFFNESS
    system[:, diagonal, diagonal] += speeds
    result: Floats = np.linalg.inv(system).astype(np.float64, copy=False)
    return result


def equalised(
    graph: ShareGraph, tokens: Floats, base: Floats, *, inverse: Floats, conductance: Floats
) -> Floats:
    """Tokens per edge after two proximal steps; some may be below zero.

    base: load of the other experts, raveled by rank. The sum over each expert's edges stays.
    """
    layers, ranks, _ = graph.shape
    whole = graph.by_group(conductance)
    for _ in range(2):
        loads = (base + graph.edge_loads(tokens)).reshape(layers, ranks, 1)
        level = (inverse @ loads).ravel()[graph.edge_rank]
        offer = graph.by_group(conductance * level) / whole
        tokens = tokens + conductance * (offer[graph.group] - level) / STIFFNESS
    return tokens


def feasible(graph: ShareGraph, tokens: Floats, demand: Floats) -> Floats:
    """Tokens cut at zero and scaled back to each expert's demand.

    Where nothing is left to scale (beside counts 1e20 times as large all of an expert's tokens are
    rounding errors) the split is even: an expert whose shares were all 0 would not be served.
    """
    cut = np.maximum(tokens, 0.0)
    total = graph.by_group(cut)
    some = total > _NOTHING * demand
    scale = np.divide(demand, total, out=np.zeros_like(demand), where=some)
    result = cut * scale[graph.group]
    lost = (demand > 0) & ~some
    if lost.any():
        even = demand / graph.by_group(np.ones(len(cut)))
        result = np.where(lost[graph.group], even[graph.group], result)
    return result


def components(graph: ShareGraph) -> Ints:
    """Ranks that copies connect: a label per rank, raveled, numbered in order of the layers."""
    layers, ranks, _ = graph.shape
    label = np.arange(layers * ranks)
    while len(graph.starts):
        least = np.minimum.reduceat(label[graph.edge_rank], graph.starts)
        lower = label.copy()
        np.minimum.at(lower, graph.edge_rank, least[graph.group])
        if (lower == label).all():
            break
        label = lower
    numbers: Ints = np.unique(label, return_inverse=True)[1]
    return numbers
