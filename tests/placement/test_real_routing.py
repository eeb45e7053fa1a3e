"""The scenario planner on real routing, where ``../shared/data/routing`` is there."""

from __future__ import annotations

import pytest

from benchmarks.placement_data import ESFT_DOMAINS, Routing, esft, observed
from benchmarks.placement_planning import by_domain
from moeserve_placement.planners import get_planner
from moeserve_placement.topology import Topology


@pytest.fixture(scope="module")
def routing() -> Routing:
    found = esft()
    if found is None:
        pytest.skip("no real routing at ../shared/data/routing")
    return found


def test_later_tokens_of_seen_domains_stay_balanced(routing: Routing) -> None:
    history = observed(routing, ESFT_DOMAINS)
    topology = Topology.uniform(8, 9)
    ours = by_domain(get_planner("scenario").plan(history, topology), routing, ESFT_DOMAINS)
    assert max(even for even, _ in ours.values()) <= 1.12
    assert max(batch for _, batch in ours.values()) <= 1.05


@pytest.mark.parametrize("unseen", ESFT_DOMAINS)
def test_an_unseen_domain_is_not_much_worse_than_with_eplb(routing: Routing, unseen: str) -> None:
    history = observed(routing, [domain for domain in ESFT_DOMAINS if domain != unseen])
    topology = Topology.uniform(8, 9)
    even = {
        name: by_domain(get_planner(name).plan(history, topology), routing, [unseen])[unseen][0]
        for name in ("scenario", "eplb")
    }
    assert even["scenario"] <= even["eplb"] + 0.05
