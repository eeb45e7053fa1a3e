"""How many nodes a token touches, estimated from co-activation alone.

With X the number of a token's experts on a node, loads and pair counts give E[X] and E[X (X - 1)].
A beta-binomial X with these two moments (choices are exchangeable and correlated) gives P(X = 0),
and so how often the node is touched. The exact figure for a trace is counted by ``nodes.py``.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from moeserve_placement.load import LoadHistory
from moeserve_placement.placement import PlacementError
from moeserve_placement.slot_table import Floats, Ints
from moeserve_placement.topology import Topology


def copies_on_nodes(table: Ints, num_experts: int, nodes: Ints) -> Floats:
    """Copies of each expert on each node: float64 [num_layers, num_experts + 1, num_nodes].

    nodes: the node of each rank. The last expert row counts free slots.
    """
    layers = len(table)
    copies = np.zeros((layers, num_experts + 1, int(nodes.max()) + 1))
    layer = np.arange(layers)[:, None, None]
    np.add.at(copies, (layer, table, nodes[None, :, None]), 1.0)
    return copies


def pair_statistics(history: LoadHistory) -> tuple[Floats, Floats, Floats, Floats]:
    """Load [layers, experts], pairs [layers, experts, experts], tokens and top_k [layers].

    Raises:
        PlacementError: the history has no co-activation.
    """
    pairs, load = history.coactivation, history.coactivation_load
    if pairs is None or load is None:
        raise PlacementError("load history: has no co-activation, give it to observe()")
    total = np.maximum(load.sum(-1), 1e-300)
    top_k = np.maximum(1.0 + pairs.sum((1, 2)) / total, 1.0)
    return load, pairs, total / top_k, top_k


def touch_probability(mean: Floats, ordered_pairs: Floats, top_k: Floats) -> Floats:
    """P(X >= 1) of a beta-binomial X out of ``top_k`` with E[X] and E[X (X - 1)] as given."""
    part = np.clip(mean / top_k, 1e-12, 1 - 1e-12)
    spread = part * (1 - part)
    pairs = np.maximum(top_k * (top_k - 1), 1e-12)
    correlation = np.where(top_k > 1, (ordered_pairs / pairs - part**2) / spread, 0.0)
    correlation = np.clip(correlation, -0.5 / np.maximum(top_k, 1.0), 1 - 1e-9)
    theta = correlation / (1 - correlation)
    none = np.ones_like(part)
    for draw in range(int(np.ceil(top_k.max()))):
        chance = np.clip((1 - part + draw * theta) / (1 + draw * theta), 0.0, 1.0)
        none *= chance ** np.clip(top_k - draw, 0.0, 1.0)
    result: Floats = 1.0 - none
    return result


def nodes_per_token(table: Ints, history: LoadHistory, topology: Topology) -> Floats:
    """Estimate of the distinct nodes a token touches: float64 [num_layers], at least 1.

    Where an expert has copies on several nodes, a pair that can meet on some node is taken to do
    so, which the choice of copies at run time only approaches.
    """
    load, pairs, tokens, top_k = pair_statistics(history)
    copies = copies_on_nodes(table, history.num_experts, topology.nodes)[:, :-1]
    first = np.einsum("le,len->ln", load, copies / np.maximum(copies.sum(-1, keepdims=True), 1.0))
    there = (copies > 0).astype(np.float64)
    common = there @ np.swapaxes(there, 1, 2)
    second = (((pairs / np.maximum(common, 1.0)) @ there) * there).sum(1)
    tokens = np.maximum(tokens, 1e-300)[:, None]
    touched = touch_probability(
        first / tokens, second / tokens, np.broadcast_to(top_k[:, None], first.shape)
    )
    estimate: Floats = np.maximum(touched.sum(-1), 1.0)
    return estimate


def pair_gains(history: LoadHistory, topology: Topology) -> Floats:
    """Fewer nodes per token if a pair of experts shares a node: [num_layers, experts, experts].

    The slope of the estimate where the nodes have equal loads and pairs meet by chance.
    """
    _, pairs, tokens, top_k = pair_statistics(history)
    nodes = topology.num_nodes
    mean = top_k / nodes
    chance = pairs.sum((1, 2)) / np.maximum(tokens, 1e-300) / nodes**2
    step = 1e-4 * chance + 1e-12
    slope = touch_probability(mean, chance, top_k) - touch_probability(mean, chance + step, top_k)
    scale = slope / step / np.maximum(tokens, 1e-300)
    result: Floats = 2.0 * scale[:, None, None] * pairs  # a pair counts in both orders
    return result


def meeting_gains(pair_gain: Floats, there: NDArray[np.bool_]) -> tuple[Floats, Floats]:
    """What one more copy on a node brings, and what losing the only one there costs.

    pair_gain: [num_layers, experts, experts]. there: bool [num_layers, experts, num_nodes]. Both
    results are [num_layers, experts, num_nodes]: pairs that meet nowhere yet, and pairs that meet
    only there.
    """
    on = there.astype(np.float64)
    common = on @ np.swapaxes(on, 1, 2)
    new = np.where(common < 0.5, pair_gain, 0.0) @ on
    lost = np.where(np.abs(common - 1) < 0.5, pair_gain, 0.0) @ on
    return new, lost
