"""The manager decides, and whatever it is told it leaves a valid placement and a reason."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from typing import Any

import msgspec
import numpy as np
import pytest
from helpers_moves import LAYERS, LocalRanks, random_layers

from moeserve.control import news
from moeserve.control.judge import CostModel
from moeserve.control.manager import Manager, Policy
from moeserve.control.proposals import Ask, Machine, PlannerSession, Proposal, Window
from moeserve.control.report import LoadReport
from moeserve.engine.placement_control import commands, history
from moeserve.experts.load import PHASES
from moeserve_placement import Placement


class DirectPlanner:
    """Plans at once, in this process; or answers what it was told to."""

    def __init__(self, ranks: LocalRanks) -> None:
        placement = ranks.placement
        machine = Machine(list(LAYERS), placement.num_experts, ranks.expert_bytes)
        self.session = PlannerSession(machine)
        self.asked: list[Ask] = []
        self.answer: Proposal | None = None
        self.is_free = True

    def observe(self, counts: np.ndarray) -> None:
        self.session.observe(Window(counts.astype(np.int64).tobytes()))

    def ask(self, ask: Ask) -> None:
        self.asked.append(ask)

    def poll(self) -> Proposal | None:
        ask = self.asked[-1]
        if self.answer is not None:
            return msgspec.structs.replace(self.answer, ask_id=ask.ask_id)
        return self.session.propose(ask)


class Bench:
    """A manager, the ranks it commands, and a clock."""

    def __init__(self, **policy: Any) -> None:
        layers = dict.fromkeys(LAYERS, ((0, 1, 2, 3, None), (4, 5, 6, 7, None)))
        self.ranks = LocalRanks(Placement(num_experts=8, layers=layers))
        self.planner = DirectPlanner(self.ranks)
        self.now = 100.0
        settings: dict[str, Any] = {
            "is_active": True,
            "planner": "scenario",
            "window_tokens": 10,
            "interval_s": 5.0,
            "min_balancedness": 0.95,
            "minute_bytes": None,
            "is_dry_run": False,
            "split": "local",
            "top_k": 2,
            "costs": CostModel(horizon_s=1000.0),
        }
        self.manager = Manager(
            Policy(**{**settings, **policy}),
            self.ranks.stores[0],
            self.planner,
            clock=lambda: self.now,
        )
        self.total = np.zeros((2, len(PHASES), len(LAYERS), 8), dtype=np.int64)

    def load(self, by_expert: list[int], *, share: float = 0.5) -> None:
        """A window of ten seconds with these tokens per expert in every layer."""
        self.now += 10.0
        self.total[0, 0] += np.array(by_expert)
        pairs = np.zeros((2, len(LAYERS)), dtype=np.int64)
        counts = self.total.sum((0, 1))
        for row, layer in enumerate(LAYERS):
            for rank, slots in enumerate(self.ranks.stores[0].slot_map.layers[layer]):
                pairs[rank, row] = sum(counts[row, e] for e in slots if e is not None)
        seconds = np.array([self.now - 100.0, 0.0]) * share
        self.manager.took_load(LoadReport(counts=self.total.copy(), pairs=pairs, compute_s=seconds))

    def say(self) -> news.News | None:
        """What the manager has to say, after a few steps."""
        for _ in range(3):
            if (message := self.manager.next_news()) is not None:
                return message
        return None

    def obey(self, message: news.News | None) -> None:
        """The ranks carry out an order."""
        assert isinstance(message, news.Begin)
        self.ranks.carry_out(message.order, 10**6)
        self.manager.flipped(len(message.order.groups), True)

    @property
    def newest(self) -> Any:
        return next(iter(self.manager.log))


HOT = [90, 80, 70, 60, 1, 1, 1, 1]
EVEN = [50] * 8


def test_a_hot_rank_is_relieved_and_what_came_true_is_noted() -> None:
    bench = Bench()
    bench.load(HOT)
    assert bench.manager.window is not None
    assert bench.manager.window.imbalance > 1.5
    bench.obey(bench.say())
    entry = bench.newest
    assert entry.state == "done"
    assert entry.num_groups_done == entry.num_groups > 0
    assert entry.seconds_saved > entry.seconds_spent
    assert entry.moves and entry.reason
    assert entry.imbalance_predicted < entry.imbalance_before
    bench.load(HOT)
    assert entry.imbalance_measured is not None
    bench.ranks.check()


@pytest.mark.parametrize(
    ("policy", "load", "share", "state"),
    [
        ({}, EVEN, 0.5, None),  # balanced: nobody is asked
        ({"is_active": False}, HOT, 0.5, None),
        ({"costs": CostModel(horizon_s=1e-6)}, HOT, 0.5, "declined"),
        ({}, HOT, 0.0, "declined"),  # experts take no time: nothing to win
        ({"is_dry_run": True}, HOT, 0.5, "dry run"),
        ({"minute_bytes": 0}, HOT, 0.5, "declined"),
    ],
)
def test_nothing_moves_that_is_not_worth_it(
    policy: dict[str, Any], load: list[int], share: float, state: str | None
) -> None:
    bench = Bench(**policy)
    before = bench.ranks.stores[0].slot_map.layers
    bench.load(load, share=share)
    assert bench.say() is None
    assert bench.ranks.stores[0].slot_map.layers == before
    entries = list(bench.manager.log)
    assert ([e.state for e in entries] or [None])[0] == state
    assert all(entry.reason for entry in entries)


def test_frozen_it_does_nothing_of_its_own_accord() -> None:
    bench = Bench()
    bench.manager.is_frozen = True
    bench.load(HOT)
    assert bench.say() is None
    bench.manager.rebalance()
    bench.obey(bench.say())  # but does what it is asked for
    bench.manager.is_frozen = False
    bench.load(HOT)


def test_the_interval_is_kept() -> None:
    bench = Bench(interval_s=1000.0, is_dry_run=True)
    bench.load(HOT)
    bench.say()
    assert len(bench.planner.asked) == 1
    bench.load(HOT)
    bench.say()
    assert len(bench.planner.asked) == 1


@pytest.mark.parametrize(
    "answer",
    [
        Proposal(0, error="ZeroDivisionError: division by zero"),
        Proposal(0, error="the planner process ended"),
    ],
)
def test_a_planner_that_fails_is_noted_and_nothing_moves(answer: Proposal) -> None:
    bench = Bench()
    bench.planner.answer = answer
    bench.load(HOT)
    assert bench.say() is None
    assert bench.newest.state == "failed"
    assert bench.newest.reason == answer.error
    assert bench.manager.log.counts == {"failed": 1}
    bench.planner.answer = None
    bench.load(HOT)
    bench.obey(bench.say())  # the next one goes through


def test_moves_that_do_not_fit_are_refused_whole() -> None:
    bench = Bench()
    bench.load(HOT)
    good = bench.planner.session.propose(
        Ask(1, "eplb", dict(bench.ranks.stores[0].slot_map.layers))
    )
    wrong = [msgspec.convert(msgspec.to_builtins(m), type(m)) for m in good.moves]
    writes = tuple(
        type(w)(**{**msgspec.to_builtins(w), "replaces": 7 if w.replaces != 7 else 6})
        for w in wrong[0].writes
    )
    bench.planner.answer = msgspec.structs.replace(
        good, moves=[type(wrong[0])(layer=wrong[0].layer, writes=writes)]
    )
    assert bench.say() is None
    assert bench.newest.state == "failed"
    assert "does not hold" in bench.newest.reason


def test_a_move_that_fails_on_a_rank_ends_the_order() -> None:
    bench = Bench()
    bench.load(HOT)
    assert isinstance(bench.say(), news.Begin)
    bench.manager.failed("layer 1, expert 2: what came from rank 0 is not what ...")
    assert bench.newest.state == "failed"
    bench.load(HOT)
    assert isinstance(bench.say(), news.Begin)  # tried again


def test_windows_that_can_not_be_are_dropped() -> None:
    """Counters that fell, windows of zeros: the old placement stays, the reason is counted."""
    bench = Bench()
    bench.load([0] * 8)
    assert bench.manager.window is None
    bench.load(HOT)
    bench.manager.policy.costs.judge(
        before=math.nan, after=1.0, window=bench.manager.window, num_bytes=1, num_groups=1
    )
    bench.total -= 5
    bench.load([0] * 8)
    assert bench.manager.num_bad_windows == 1


def test_rollback_goes_back_and_can_be_rolled_back() -> None:
    bench = Bench()
    first = bench.ranks.stores[0].slot_map.layers
    bench.load(HOT)
    bench.obey(bench.say())
    second = bench.ranks.stores[0].slot_map.layers
    bench.manager.is_frozen = True
    bench.manager.rollback()
    bench.obey(bench.say())
    assert held(bench) == sets(first)
    bench.manager.rollback(bench.newest.id)
    bench.obey(bench.say())
    assert held(bench) == sets(second)
    with pytest.raises(ValueError, match="no placement before"):
        bench.manager.rollback(99)


def sets(layers: Any) -> dict[int, list[set[int | None]]]:
    """Experts by layer and rank, whatever their slots."""
    return {layer: [set(slots) - {None} for slots in ranks] for layer, ranks in layers.items()}


def held(bench: Bench) -> dict[int, list[set[int | None]]]:
    return sets(bench.ranks.stores[0].slot_map.layers)


def test_pinned_experts_stay_where_they_are() -> None:
    rng = random.Random(4)
    for _ in range(50):
        bench = Bench()
        bench.manager.is_frozen = True
        pins = {(rng.choice(LAYERS), rng.randrange(8)) for _ in range(3)}
        for pin in pins:
            bench.manager.pin(*pin)
        before = bench.ranks.stores[0].slot_map
        bench.load([rng.randrange(100) for _ in range(8)])
        bench.manager.place(random_layers(rng, 2, {layer: [5, 5] for layer in LAYERS}, 8))
        message = bench.say()
        if message is not None:
            bench.obey(message)
        after = bench.ranks.stores[0].slot_map
        for layer, expert in pins:
            assert after.copies(layer)[expert] == before.copies(layer)[expert]
        bench.ranks.check()


def test_cancelling_stops_where_it_is() -> None:
    bench = Bench()
    bench.load(HOT)
    assert isinstance(bench.say(), news.Begin)
    bench.manager.cancel()
    assert isinstance(bench.say(), news.Cancel)
    bench.manager.failed("cancelled")
    assert bench.newest.state == "failed"


@pytest.mark.parametrize(
    ("name", "body", "text"),
    [
        ("rebalance", b'{"planner": 3}', "planner"),
        ("rebalance", b'{"plan": "eplb"}', "plan"),
        ("pin", b'{"layer": 99, "expert": 0}', "layer = 99"),
        ("pin", b'{"layer": 1, "expert": 8}', "expert = 8"),
        ("place", b'{"num_experts": 8, "layers": {}}', "no layers"),
        ("place", b'{"num_experts": 8, "layers": {"1": [[0]]}}', "no rank holds"),
        ("rollback", b'{"id": 5}', "id = 5"),
    ],
)
def test_wrong_commands_say_what_is_wrong(name: str, body: bytes, text: str) -> None:
    act: Callable[[bytes], object] = commands(Bench().manager)[name]
    with pytest.raises((ValueError, msgspec.MsgspecError), match=text):
        act(body)


def test_one_plan_at_a_time_and_history_is_json() -> None:
    bench = Bench()
    bench.load(HOT)
    bench.say()
    with pytest.raises(ValueError, match="in progress"):
        bench.manager.rebalance()
    assert b'"state":"moving"' in msgspec.json.encode(history(bench.manager)())
