"""Placement over HTTP: what people see and command while requests stream."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from helpers_server import Server, serving

ADMIN = {"Authorization": "Bearer move"}


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    """Two ranks with spare slots; experts move only when told to."""
    flags = ("--num-redundant-experts", "4", "--step-bytes", "100K", "--admin-key", "move")
    with serving("--ep", "2", *flags) as running:
        yield running


def post(server: Server, action: str, status: int = 200, **body: Any) -> Any:
    answer = httpx.post(f"{server.url}/experts/{action}", json=body, headers=ADMIN, timeout=30)
    assert answer.status_code == status, answer.text
    return answer.json()


def history(server: Server) -> Any:
    return httpx.get(f"{server.url}/experts/history", timeout=30).json()


def finished(server: Server) -> Any:
    """The newest decision, once it is over."""
    deadline = time.monotonic() + 60
    while (entry := history(server)["entries"][0])["state"] in ("planning", "moving"):
        assert time.monotonic() < deadline, entry
        time.sleep(0.05)
    return entry


def complete(server: Server) -> str:
    body = {"prompt": "The fox", "max_tokens": 24, "temperature": 0, "ignore_eos": True}
    answer = httpx.post(f"{server.url}/v1/completions", json=body, timeout=60)
    assert answer.status_code == 200, answer.text
    text: str = answer.json()["choices"][0]["text"]
    return text


def test_experts_are_moved_and_brought_back_while_requests_run(server: Server) -> None:
    complete(server)
    before = httpx.get(f"{server.url}/experts/placement").json()
    ranks = [list(reversed(range(8, 16))), list(reversed(range(8)))]
    target = {layer: [[*slots, None, None] for slots in ranks] for layer in before["layers"]}
    entry = post(server, "place", num_experts=16, layers=target)
    assert entry["state"] == "planning"
    complete(server)
    done = finished(server)
    assert done["state"] == "done"
    assert done["num_groups_done"] == done["num_groups"] > 0
    after = httpx.get(f"{server.url}/experts/placement").json()
    for slots in after["layers"].values():
        assert set(slots[0]) - {None} == set(range(8, 16))
    post(server, "rollback")
    assert finished(server)["state"] == "done"
    back = httpx.get(f"{server.url}/experts/placement").json()
    for layer, slots in back["layers"].items():
        assert [set(s) for s in slots] == [set(s) for s in before["layers"][layer]]


def test_a_plan_can_be_asked_for_tried_and_refused(server: Server) -> None:
    complete(server)
    post(server, "rebalance", planner="eplb", dry_run=True)
    entry = finished(server)
    assert entry["state"] in ("dry run", "declined")
    assert entry["reason"]
    assert post(server, "freeze")["is_frozen"]
    assert not post(server, "unfreeze")["is_frozen"]
    assert post(server, "pin", layer=0, expert=3)["pins"] == [{"layer": 0, "expert": 3}]
    assert post(server, "unpin", layer=0, expert=3)["pins"] == []


@pytest.mark.parametrize(
    ("action", "body", "text"),
    [
        ("pin", {"layer": 99, "expert": 0}, "layer = 99"),
        ("pin", {"layer": 0}, "expert"),
        ("place", {"num_experts": 16, "layers": {"0": [[0]]}}, "no rank holds"),
        ("rollback", {"id": 12345}, "id = 12345"),
        ("rebalance", {"plan": 1}, "plan"),
        ("rebalance", {"planner": "best"}, "must be one of eplb"),
    ],
)
def test_what_is_wrong_is_said(
    server: Server, action: str, body: dict[str, Any], text: str
) -> None:
    assert text in post(server, action, status=400, **body)["error"]["message"]


def test_moving_experts_needs_the_admin_key(server: Server) -> None:
    for headers in ({}, {"Authorization": "Bearer wrong"}):
        url = f"{server.url}/experts/freeze"
        assert httpx.post(url, json={}, headers=headers).status_code == 401
    assert httpx.get(f"{server.url}/experts/history").status_code == 200


def test_all_load_is_counted_exactly(server: Server) -> None:
    load = httpx.get(f"{server.url}/experts/load").json()
    sums = {sum(counts) for counts in load["layers"].values()}
    assert len(sums) == 1 and sums.pop() > 0
