"""The planner as a process: it answers, and whatever becomes of it the engine goes on."""

from __future__ import annotations

import os
import signal
import time

import numpy as np
import psutil
import pytest

from moeserve.control.planner_client import PlannerClient
from moeserve.control.proposals import Ask, Machine, Proposal

LAYERS = {0: ((0, 1, None), (2, 3, None))}
MACHINE = Machine([0], 4, 100)


def wait(client: PlannerClient, seconds: float = 30.0) -> Proposal:
    deadline = time.monotonic() + seconds
    while (answer := client.poll()) is None:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    return answer


def planner_pids() -> list[int]:
    children = psutil.Process().children()
    return [child.pid for child in children if "planner" in " ".join(child.cmdline())]


def test_it_plans_for_the_windows_it_was_told_and_survives_its_death() -> None:
    client = PlannerClient(MACHINE)
    try:
        client.observe(np.array([[90, 80, 1, 1]]))
        client.ask(Ask(1, "scenario", LAYERS))
        answer = wait(client)
        assert answer.error is None
        assert answer.moves and answer.after < answer.before

        [pid] = planner_pids()
        client.ask(Ask(2, "scenario", LAYERS))
        os.kill(pid, signal.SIGKILL)
        killed = wait(client)
        if killed.error is None:  # it was quicker
            client.ask(Ask(3, "scenario", LAYERS))
            killed = wait(client)
        assert killed.error == "the planner process ended"
        assert not client.is_free  # not at once again

        client._not_before = 0.0
        client.ask(Ask(4, "scenario", LAYERS))
        again = wait(client)
        assert again.moves == answer.moves  # it knows the windows
    finally:
        client.close()
    assert not planner_pids()


def test_one_that_hangs_is_given_up() -> None:
    client = PlannerClient(MACHINE, timeout_s=1.0)
    try:
        client.ask(Ask(1, "scenario", LAYERS))
        wait(client)
        [pid] = planner_pids()
        os.kill(pid, signal.SIGSTOP)
        client.ask(Ask(2, "scenario", LAYERS))
        assert wait(client).error == "the planner did not answer in 1 s"
        assert client.num_failures == 1
    finally:
        client.close()


@pytest.mark.parametrize("planner", ["nonsense", "exchange"])
def test_an_error_of_the_planner_is_an_answer(planner: str) -> None:
    client = PlannerClient(MACHINE)
    try:
        layers = LAYERS if planner == "nonsense" else {0: ((0, 1), (2,))}  # expert 3 is nowhere
        client.ask(Ask(1, planner, layers))
        assert wait(client).error
    finally:
        client.close()
