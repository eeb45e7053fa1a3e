"""Cases in parallel, in processes of their own: a compiler that crashes takes one case along.

Workers are forked, so launches need not be sent to them and torch is not imported again.
"""

from __future__ import annotations

import multiprocessing
import os
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from typing import IO, Any, Generic, TypeVar

Item = TypeVar("Item")
Result = TypeVar("Result")
_CASES_PER_WORKER = 16  # a fork costs 50 ms, and the compilers keep what they allocate


@dataclass
class _Worker:
    process: Any
    connection: Connection
    stderr: IO[str]
    current: int | None = None
    since: float = 0.0
    done: int = 0

    def start(self, index: int) -> None:
        self.current, self.since = index, time.monotonic()
        self.connection.send(index)


class Pool(Generic[Item, Result]):
    """Runs ``work`` on items; ``failed(item, why)`` is the result where a worker died or hung."""

    def __init__(
        self,
        work: Callable[[Item], Result],
        failed: Callable[[Item, str], Result],
        num_jobs: int,
        timeout_s: float = 180.0,
    ) -> None:
        self._work = work
        self._failed = failed
        self._num_jobs = num_jobs
        self._timeout_s = timeout_s
        self._workers: list[_Worker] = []

    def run(self, items: Sequence[Item], progress: Callable[[Result], None]) -> list[Result]:
        """The results, in the order of ``items``; ``progress`` is told each as it comes."""
        results: dict[int, Result] = {}
        waiting = list(range(len(items)))[::-1]
        try:
            while len(results) < len(items):
                while waiting and len(self._workers) < self._num_jobs:
                    self._fork(items).start(waiting.pop())
                for index, result in self._collect(items):
                    results[index] = result
                    progress(result)
                self._feed(waiting)
        finally:
            while self._workers:
                self._end(self._workers[0])
        return [results[index] for index in range(len(items))]

    def _fork(self, items: Sequence[Item]) -> _Worker:
        ours, theirs = multiprocessing.Pipe()
        # Closed in _end.
        stderr = tempfile.TemporaryFile("w+", errors="replace")  # noqa: SIM115
        context = multiprocessing.get_context("fork")
        process = context.Process(target=self._serve, args=(items, theirs, stderr), daemon=True)
        process.start()
        theirs.close()
        self._workers.append(_Worker(process, ours, stderr))
        return self._workers[-1]

    def _serve(self, items: Sequence[Item], connection: Connection, stderr: IO[str]) -> None:
        """The life of a worker: compilers print whole programs when they fail, into a file here."""
        os.dup2(stderr.fileno(), sys.stderr.fileno())
        while (index := connection.recv()) is not None:
            connection.send(self._work(items[index]))

    def _collect(self, items: Sequence[Item]) -> list[tuple[int, Result]]:
        """What has come in, waiting a second for it; dead and late workers count as failed."""
        found = []
        ready = wait([worker.connection for worker in self._workers], timeout=1.0)
        for worker in list(self._workers):
            if worker.current is None:
                continue
            index, why = worker.current, ""
            if worker.connection in ready:
                try:
                    found.append((index, worker.connection.recv()))
                    worker.current, worker.done = None, worker.done + 1
                    continue
                except EOFError:
                    why = f"the compiler crashed: {_last_line(worker.stderr)}"
            elif time.monotonic() - worker.since > self._timeout_s:
                why = f"not done after {self._timeout_s:.0f} s"
            if why:
                found.append((index, self._failed(items[index], why)))
                self._end(worker)
        return found

    def _feed(self, waiting: list[int]) -> None:
        for worker in list(self._workers):
            if worker.current is not None:
                continue
            if not waiting or worker.done >= _CASES_PER_WORKER:
                self._end(worker)
            else:
                worker.start(waiting.pop())

    def _end(self, worker: _Worker) -> None:
        self._workers.remove(worker)
        worker.process.kill()
        worker.process.join()
        worker.connection.close()
        worker.stderr.close()


def _last_line(file: IO[str]) -> str:
    file.seek(0)
    lines = [line.strip() for line in file.read().splitlines() if line.strip()]
    return lines[-1][:200] if lines else "no message"
