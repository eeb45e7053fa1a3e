"""Where tokens go: nodes and ranks per token, and the bytes that each rank sends to each.

A sequence lives on one rank (data-parallel attention), sequences are dealt to the alive ranks in
turn. A token is sent once to each rank that serves one of its experts, except its own; what comes
back after the experts is the transpose.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from moeserve_placement.nodes import choose_copies
from moeserve_placement.slot_table import Floats, Ints
from moeserve_placement.topology import Topology


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Traffic:
    """Traffic of some tokens in every layer.

    num_tokens: tokens. nodes: nodes that serve a token, where copies take turns; nodes_fewest:
    where the copy is chosen that touches fewest nodes; ranks: ranks that serve a token; all float64
    [num_layers], means over tokens. node_imbalance, node_imbalance_fewest: fullest over mean node
    load, likewise. sent: tokens sent from rank to rank, summed over layers, float64 [num_ranks,
    num_ranks]; its diagonal are tokens that a rank serves itself.
    """

    num_tokens: int
    nodes: Floats
    nodes_fewest: Floats
    ranks: Floats
    node_imbalance: Floats
    node_imbalance_fewest: Floats
    sent: Floats

    @classmethod
    def joined(cls, parts: list[Traffic]) -> Traffic:
        """Means over all tokens, sums of what was sent."""
        weights = np.array([part.num_tokens for part in parts], dtype=np.float64)
        weights /= weights.sum()

        def mean(name: str) -> Floats:
            values: Floats = np.tensordot(weights, [getattr(p, name) for p in parts], axes=1)
            return values

        return cls(
            num_tokens=sum(part.num_tokens for part in parts),
            nodes=mean("nodes"),
            nodes_fewest=mean("nodes_fewest"),
            ranks=mean("ranks"),
            node_imbalance=mean("node_imbalance"),
            node_imbalance_fewest=mean("node_imbalance_fewest"),
            sent=np.sum([part.sent for part in parts], axis=0),
        )


def measure_traffic(
    topk_ids: NDArray[np.integer], table: Ints, *, sequences: Ints, topology: Topology
) -> Traffic:
    """The traffic of these tokens under a placement.

    topk_ids: [num_tokens, num_layers, top_k]. sequences: the sequence of each token [num_tokens].
    table: [num_layers, num_ranks, max_slots].
    """
    turns = choose_copies(topk_ids, table, topology=topology, policy="turns")
    fewest = turns
    if topology.num_nodes > 1:
        fewest = choose_copies(topk_ids, table, topology=topology, policy="nodes")
    alive = np.flatnonzero(topology.alive)
    home = alive[sequences % len(alive)]
    sent, ranks = _sent(turns.ranks, home, topology.num_ranks)
    return Traffic(
        num_tokens=len(topk_ids),
        nodes=turns.nodes_per_token,
        nodes_fewest=fewest.nodes_per_token,
        ranks=ranks,
        node_imbalance=_node_imbalance(turns.node_loads, topology),
        node_imbalance_fewest=_node_imbalance(fewest.node_loads, topology),
        sent=sent,
    )


def _sent(served_by: Ints, home: Ints, num_ranks: int) -> tuple[Floats, Floats]:
    """Tokens sent, home to serving rank [num_ranks, num_ranks]; ranks per token [num_layers]."""
    tokens, layers, _ = served_by.shape
    at_home = np.zeros((num_ranks, tokens), dtype=np.float32)
    at_home[home, np.arange(tokens)] = 1.0
    sent = np.zeros((num_ranks, num_ranks))
    ranks = np.zeros(layers)
    for layer in range(layers):
        touched = np.zeros((tokens, num_ranks), dtype=np.float32)
        touched[np.arange(tokens)[:, None], served_by[:, layer]] = 1.0
        sent += at_home @ touched  # exact: whole numbers below 2^24
        ranks[layer] = touched.sum(dtype=np.float64) / tokens
    return sent, ranks


def _node_imbalance(node_loads: Floats, topology: Topology) -> Floats:
    """Fullest node over mean, by the speed of the node's alive ranks: [num_layers]."""
    speed = np.bincount(topology.nodes, topology.speeds, minlength=topology.num_nodes)
    level = node_loads[:, speed > 0] / speed[speed > 0]
    mean = node_loads.sum(1) / speed.sum()
    result: Floats = np.where(mean > 0, level.max(1) / np.where(mean > 0, mean, 1.0), 1.0)
    return result
