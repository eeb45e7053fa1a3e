"""The engine's side of the planner process: starts it, asks it, and outlives it."""

from __future__ import annotations

import contextlib
import logging
import os
import queue
import subprocess
import sys
import threading
import time
from collections import deque
from typing import IO

import msgspec
import numpy as np

from moeserve import config
from moeserve.control import proposals
from moeserve.control.planner_process import read_frame, write_frame
from moeserve.control.proposals import Ask, Machine, Proposal, Window

logger = logging.getLogger(__name__)

TIMEOUT_S = 60.0
_FIRST_BACKOFF_S = 1.0
_LONGEST_BACKOFF_S = 300.0
_REMEMBERED = 32  # windows that a planner which was started again is told


class PlannerClient:
    """One question at a time to a planner in another process. Nothing here waits or raises.

    A planner that dies, or does not answer for ``timeout_s``, is ended and started again at the
    next question, later each time; the question is answered with an error.
    """

    def __init__(self, machine: Machine, *, timeout_s: float = TIMEOUT_S) -> None:
        self._machine = machine
        self._timeout_s = timeout_s
        self._windows: deque[Window] = deque(maxlen=_REMEMBERED)
        self._num_told = 0  # of these windows, by the process that runs now
        self._talk: _Talk | None = None
        self._asked: tuple[int, float] | None = None  # which question is open, and since when
        self._backoff_s = _FIRST_BACKOFF_S
        self._not_before = 0.0
        self.num_failures = 0

    @property
    def is_free(self) -> bool:
        """Whether a question may be asked now."""
        return self._asked is None and time.monotonic() >= self._not_before

    def observe(self, counts: np.ndarray) -> None:
        """Takes a window of counts, int64 [num_layers, num_experts], for the next question."""
        if len(self._windows) == self._windows.maxlen:
            self._num_told = max(self._num_told - 1, 0)
        self._windows.append(Window(np.ascontiguousarray(counts, dtype=np.int64).tobytes()))

    def ask(self, ask: Ask) -> None:
        """Asks; ``poll`` has the answer in time."""
        self._asked = ask.ask_id, time.monotonic()
        news: list[Machine | Window | Ask] = []
        if self._talk is None:
            self._talk = _Talk()
            self._num_told = 0
            news.append(self._machine)
        news += list(self._windows)[self._num_told :]
        self._num_told = len(self._windows)
        self._talk.say([*news, ask])

    def poll(self) -> Proposal | None:
        """The answer to the open question, once: a plan, or an error. None: not yet."""
        if self._asked is None or self._talk is None:
            return None
        ask_id, since = self._asked
        try:
            answer = self._talk.answers.get_nowait()
        except queue.Empty:
            if time.monotonic() - since < self._timeout_s:
                return None
            return self._give_up(ask_id, f"the planner did not answer in {self._timeout_s:g} s")
        if answer is None:
            return self._give_up(ask_id, "the planner process ended")
        self._asked = None
        self._backoff_s = _FIRST_BACKOFF_S
        return answer

    def close(self) -> None:
        """Ends the process."""
        if self._talk is not None:
            self._talk.close()
            self._talk = None

    def _give_up(self, ask_id: int, reason: str) -> Proposal:
        self.close()
        self.num_failures += 1
        self._asked = None
        self._not_before = time.monotonic() + self._backoff_s
        self._backoff_s = min(2 * self._backoff_s, _LONGEST_BACKOFF_S)
        return Proposal(ask_id, error=reason)


class _Talk:
    """A planner process and the thread that writes to it and reads from it.

    A pipe holds few windows, and a process that starts or plans does not read: whoever writes may
    have to wait, so it is not the rank's own thread.
    """

    def __init__(self) -> None:
        self.answers: queue.SimpleQueue[Proposal | None] = queue.SimpleQueue()
        """Answers in order, then None when there will be no more."""
        self._outbox: queue.SimpleQueue[list[Machine | Window | Ask] | None] = queue.SimpleQueue()
        self._process = subprocess.Popen(
            [sys.executable, "-m", "moeserve.control.planner_process", str(os.getpid())],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=config.child_environment(OMP_NUM_THREADS="1", OPENBLAS_NUM_THREADS="1"),
        )
        threading.Thread(target=self._run, daemon=True).start()

    def say(self, messages: list[Machine | Window | Ask]) -> None:
        """Queues messages, a question last."""
        self._outbox.put(messages)

    def close(self) -> None:
        """Ends the process, and with it the thread."""
        self._process.kill()
        self._process.wait()
        self._outbox.put(None)

    def _run(self) -> None:
        source, sink = self._process.stdout, self._process.stdin
        assert source is not None and sink is not None
        with contextlib.suppress(OSError), source, sink:
            while (messages := self._outbox.get()) is not None:
                for message in messages:
                    write_frame(sink, proposals.encode(message))
                if (answer := _read(source)) is None:
                    break
                self.answers.put(answer)
        self.answers.put(None)


def _read(source: IO[bytes]) -> Proposal | None:
    """The next answer; None when there is none or it can not be read."""
    frame = read_frame(source)
    if frame is None:
        return None
    try:
        return proposals.decode_proposal(frame)
    except (msgspec.DecodeError, ValueError) as error:
        logger.warning("the planner's answer can not be read: %s", error)
        return None
