"""The parent's end of an engine process (engines.py): start, run a task, stop."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
from asyncio.subprocess import PIPE, Process
from collections.abc import AsyncIterator
from pathlib import Path

import msgspec
import psutil

from benchmarks.engines import EngineSpec, Outcome, Task
from benchmarks.server_process import STOP_TIMEOUT_S, cpu_seconds

LINE_LIMIT = 64 << 20


class EngineFailedError(RuntimeError):
    """An engine process ended or was silent too long; the text names it. Its stderr says more."""


class Ready(msgspec.Struct, frozen=True, kw_only=True):
    """The first line of an engine process."""

    load_s: float
    versions: dict[str, str]


class EngineProcess:
    """A running engine process with its model loaded."""

    def __init__(self, spec: EngineSpec, process: Process, timeout_s: float) -> None:
        self.spec = spec
        self.load_s = 0.0
        self._process = process
        self._timeout_s = timeout_s

    @classmethod
    @contextlib.asynccontextmanager
    async def start(cls, spec: EngineSpec, timeout_s: float) -> AsyncIterator[EngineProcess]:
        """Yields the engine once its model is loaded; ends its process group at the end.

        timeout_s: how long loading, and then each task, may take.

        Raises:
            EngineFailedError: it ended or was silent for longer.
        """
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "benchmarks.engines", msgspec.json.encode(spec).decode()),
            stdin=PIPE,
            stdout=PIPE,
            limit=LINE_LIMIT,
            start_new_session=True,
            cwd=Path(__file__).parent.parent,
            env={**os.environ, "OMP_NUM_THREADS": str(max(1, spec.threads // spec.ep))},
        )
        engine = cls(spec, process, timeout_s)
        try:
            engine.load_s = msgspec.json.decode(await engine._line(), type=Ready).load_s
            yield engine
        finally:
            await engine._stop()

    async def run(self, task: Task) -> Outcome:
        """Runs ``task`` there.

        Raises:
            EngineFailedError: the process ended or was silent for longer than its timeout.
        """
        assert self._process.stdin is not None
        self._process.stdin.write(msgspec.json.encode(task) + b"\n")
        with contextlib.suppress(ConnectionError):  # the read below tells that it ended
            await self._process.stdin.drain()
        return msgspec.json.decode(await self._line(), type=Outcome)

    async def _line(self) -> bytes:
        assert self._process.stdout is not None
        try:
            line = await asyncio.wait_for(self._process.stdout.readline(), self._timeout_s)
        except TimeoutError as error:
            raise EngineFailedError(f"{self.spec.name}: silent for {self._timeout_s} s") from error
        if not line:
            raise await self._ended()
        return line

    async def _ended(self) -> EngineFailedError:
        code = await self._process.wait()
        return EngineFailedError(f"{self.spec.name}: the engine process ended with {code}")

    def cpu_seconds(self) -> float:
        """CPU seconds that the engine and its children have used so far; 0 once it has ended."""
        try:
            return cpu_seconds(psutil.Process(self._process.pid))
        except psutil.NoSuchProcess:  # the next task will say so
            return 0.0

    def peak_memory_mb(self) -> int:
        """Summed peak resident memory of the engine and its children, in MB (Linux)."""
        process = psutil.Process(self._process.pid)
        total_kb = 0
        for member in [process, *process.children(recursive=True)]:
            with contextlib.suppress(OSError):
                for line in Path(f"/proc/{member.pid}/status").read_text().splitlines():
                    if line.startswith("VmHWM:"):
                        total_kb += int(line.split()[1])
        return total_kb // 1024

    async def _stop(self) -> None:
        """End of input, which ends a healthy engine; then SIGKILL to what is left of the group."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._process.wait(), STOP_TIMEOUT_S)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        await self._process.wait()
