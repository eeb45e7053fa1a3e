"""Which copy of each chosen expert serves a token: the copies that touch fewest nodes, or by turns.

This is the per-token answer to cross-node traffic, as ``shares.py`` is the per-batch answer to
balance: a token takes copies on nodes that it visits anyway, and of those the least loaded.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from moeserve_placement.placement import PlacementError
from moeserve_placement.slot_table import Floats, Ints, holds
from moeserve_placement.topology import Topology

_CHUNK = 64  # tokens that see the same rank loads when they choose between equal copies


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class CopyChoice:
    """Who serves what.

    ranks: int64 [num_tokens, num_layers, top_k]. node_loads, rank_loads: choices served, float64
    [num_layers, num_nodes] and [num_layers, num_ranks]. nodes_per_token: distinct nodes, mean over
    tokens, float64 [num_layers].
    """

    ranks: Ints
    rank_loads: Floats
    node_loads: Floats
    nodes_per_token: Floats


def choose_copies(
    topk_ids: NDArray[np.integer], table: Ints, *, topology: Topology, policy: str = "nodes"
) -> CopyChoice:
    """The copy that serves each choice.

    topk_ids: [num_tokens, num_layers, top_k] logical experts. table: [num_layers, ranks, slots].
    policy: 'nodes': greedy set cover per token (nodes that it can not avoid, then the node that
    serves most of the rest), then the least loaded copy on those nodes; 'turns': copies take tokens
    by turns, as engines do.

    Raises:
        PlacementError: an unknown policy, or an expert that no rank holds.
    """
    if policy not in ("nodes", "turns"):
        raise PlacementError(f"policy = {policy!r}: must be nodes or turns")
    tokens, layers, _ = topk_ids.shape
    num_experts = int(topk_ids.max(initial=0)) + 1
    held = holds(np.where(table < num_experts, table, -1), num_experts)
    ranks = np.empty(topk_ids.shape, dtype=np.int64)
    nodes_per_token = np.ones(layers)
    loads = np.zeros((layers, topology.num_ranks))
    for layer in range(layers):
        ids = topk_ids[:, layer].astype(np.int64)
        if not held[layer].any(-1)[ids].all():
            raise PlacementError(f"row {layer} of the table: an expert of topk_ids is nowhere")
        if policy == "nodes":
            chosen = _fewest_nodes(ids, held[layer], topology)
        else:
            chosen = _by_turns(ids, held[layer])
        ranks[:, layer] = chosen
        loads[layer] = np.bincount(chosen.ravel(), minlength=topology.num_ranks)
        touched = np.zeros((tokens, topology.num_nodes), dtype=np.bool_)
        touched[np.arange(tokens)[:, None], topology.nodes[chosen]] = True
        nodes_per_token[layer] = touched.sum(1).mean() if tokens else 1.0
    by_node = (topology.nodes[:, None] == np.arange(topology.num_nodes)).astype(np.float64)
    return CopyChoice(
        ranks=ranks, rank_loads=loads, node_loads=loads @ by_node, nodes_per_token=nodes_per_token
    )


def _by_turns(ids: Ints, held: NDArray[np.bool_]) -> Ints:
    """Copy number (token index modulo copies) of each choice: [num_tokens, top_k]."""
    order = np.argsort(~held, axis=1, kind="stable")  # an expert's ranks first
    turn = np.arange(len(ids))[:, None] % held.sum(1)[ids]
    chosen: Ints = order[ids, turn]
    return chosen


def _fewest_nodes(ids: Ints, held: NDArray[np.bool_], topology: Topology) -> Ints:
    touched = _cover(_on_nodes(held, topology)[ids])
    loads = np.zeros(topology.num_ranks)
    result = np.empty(ids.shape, dtype=np.int64)
    allowed_rank = touched[:, topology.nodes]  # [num_tokens, num_ranks]
    divisors = topology.divisors
    for start in range(0, len(ids), _CHUNK):
        part = slice(start, start + _CHUNK)
        usable = held[ids[part]] & allowed_rank[part][:, None]
        result[part] = np.where(usable, loads / divisors, np.inf).argmin(-1)
        loads += np.bincount(result[part].ravel(), minlength=len(loads))
    return result


def _on_nodes(held: NDArray[np.bool_], topology: Topology) -> NDArray[np.bool_]:
    """Whether a node has an expert: [num_experts, num_nodes]."""
    nodes = [held[:, topology.nodes == node].any(1) for node in range(topology.num_nodes)]
    return np.stack(nodes, axis=1)


def _cover(options: NDArray[np.bool_]) -> NDArray[np.bool_]:
    """Nodes that serve each token, few of them: [num_tokens, num_nodes] from [tokens, k, nodes]."""
    alone = options.sum(-1) == 1
    touched: NDArray[np.bool_] = (options & alone[..., None]).any(1)
    turn = (np.arange(len(options))[:, None] + np.arange(options.shape[2])) % options.shape[2]
    while True:
        met: NDArray[np.bool_] = options & touched[:, None]
        open_choices = np.logical_not(met.any(-1))
        waiting = open_choices.any(1)
        if not waiting.any():
            return touched
        served = (options & open_choices[..., None]).sum(1) * options.shape[2] + turn
        best = served.argmax(1)  # ties by turns, so that no node is preferred
        touched[waiting, best[waiting]] = True
