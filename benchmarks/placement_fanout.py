"""Nodes per token on later tokens, at four nodes, ours against EPLB."""

from __future__ import annotations

import numpy as np

from benchmarks.placement_data import ESFT_DOMAINS, Routing, esft, gpt_oss, observed
from benchmarks.placement_lines import Line
from moeserve_placement.nodes import choose_copies
from moeserve_placement.plan import Plan
from moeserve_placement.planners import get_planner
from moeserve_placement.slot_table import imbalance, slot_table
from moeserve_placement.topology import Topology

_REMOTE_WEIGHT = 0.2  # a remote node per token is worth this much imbalance
_NODES = 4


def run() -> list[Line]:
    """The fan-out lines, where the data is."""
    lines: list[Line] = []
    routing = esft()
    if routing is not None:
        for slots in (8, 9):
            lines += compare("ESFT", routing, ESFT_DOMAINS, slots, judged=True)
    routing = gpt_oss()
    if routing is not None:
        for slots in (4, 5):
            lines += compare("gpt-oss", routing, ("all",), slots, judged=False)
    return lines


def compare(
    name: str, routing: Routing, domains: tuple[str, ...], slots: int, *, judged: bool
) -> list[Line]:
    """Planned for the mixture of the domains, as it is scored on the mixture."""
    topology = Topology.uniform(8, slots, num_nodes=_NODES)
    history = observed(routing, domains, pairs=True, reservoir_size=0)
    ours = measured(
        get_planner("scenario", remote_weight=_REMOTE_WEIGHT).plan(history, topology),
        routing,
        topology,
    )
    plan = get_planner("eplb").plan(history, topology)
    theirs = measured(plan, routing, topology)
    by_turns = measured(plan, routing, topology, policy="turns")
    setting = f"{name}, 8 x {slots}, {_NODES} nodes"
    return [
        Line(
            section="fanout",
            what="nodes per token, fewest-nodes choice for both",
            setting=setting,
            split="token",
            value=ours[0],
            limit=0.8 * theirs[0] if judged else None,
            eplb=theirs[0],
            details={"eplb_by_turns": by_turns[0], "saved": 1 - ours[0] / theirs[0]},
        ),
        Line(
            section="fanout",
            what="node imbalance on the mixture",
            setting=setting,
            split="token",
            value=ours[1],
            limit=1.05 if judged else None,
            eplb=theirs[1],
            details={"rank_imbalance": ours[2], "eplb_rank_imbalance": theirs[2]},
        ),
    ]


def measured(
    plan: Plan, routing: Routing, topology: Topology, *, policy: str = "nodes"
) -> tuple[float, float, float]:
    """Nodes per token, node imbalance, rank imbalance on the second halves, mean over layers."""
    ids = np.concatenate(list(routing.second.values()))
    table = slot_table(plan.placement, routing.layer_ids)
    choice = choose_copies(ids, table, topology=topology, policy=policy)
    return (
        float(choice.nodes_per_token.mean()),
        float(imbalance(choice.node_loads).mean()),
        float(imbalance(choice.rank_loads).mean()),
    )
