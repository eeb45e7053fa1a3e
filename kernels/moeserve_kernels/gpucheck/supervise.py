"""Workers as processes: started again behind an item that crashed or hung."""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from moeserve_kernels.gpucheck.plan import Item
from moeserve_kernels.gpucheck.report import Report
from moeserve_kernels.gpucheck.worker import BROKEN, Job

_ITEM_LIMIT_S = 100.0
Command = Callable[[Job], list[str]]


@dataclass
class _Running:
    job: Job
    process: subprocess.Popen[bytes]


def command_of(job: Job) -> list[str]:
    """The worker's command line; a dry one runs Triton's kernels in the interpreter."""
    prefix = ["env", "TRITON_INTERPRET=1"] if job.dry else []
    options = [
        f"--{name}={getattr(job, name)}"
        for name in ("part", "parts", "start", "deadline", "output", "progress", "seed", "commit")
    ]
    module = "moeserve_kernels.gpucheck"
    worker = [sys.executable, "-m", module, f"--stage={job.stage}", *options]
    return [*prefix, *worker, *(["--dry"] if job.dry else [])]


def run_stage(
    job: Job,
    todo: Sequence[Item],
    report: Report,
    *,
    parts: int = 1,
    command: Command = command_of,
    item_limit_s: float = _ITEM_LIMIT_S,
) -> None:
    """Runs all of a stage in ``parts`` processes at a time; returns when the last has ended.

    todo: the stage's items, to name those that took a worker along.
    """
    with tempfile.TemporaryDirectory() as folder:
        running = [
            _start(replace(job, part=part, parts=parts, progress=Path(folder) / str(part)), command)
            for part in range(min(parts, len(todo)))
        ]
        try:
            while running:
                time.sleep(0.05)
                for one in list(running):
                    why = _end_of(one, item_limit_s, job.deadline)
                    if why is None:
                        continue
                    running.remove(one)
                    index = _begun(one.job)
                    if why:
                        report.add("error", _name(todo, index, job), error=why)
                    if why != "" or one.process.returncode == BROKEN:
                        running += _again(one.job, index, len(todo), command)
        finally:
            for one in running:
                one.process.kill()
                one.process.wait()


def _start(job: Job, command: Command) -> _Running:
    job.progress.write_text("-1")
    return _Running(job, subprocess.Popen(command(job)))


def _again(job: Job, index: int, count: int, command: Command) -> list[_Running]:
    """A worker for what comes behind item ``index``; none when the first item was not reached."""
    if index < 0 or index + 1 >= count or time.time() > job.deadline:
        return []
    return [_start(replace(job, start=index + 1), command)]


def _end_of(one: _Running, item_limit_s: float, deadline: float) -> str | None:
    """None while it works; why it ended badly, "" when it ended as it should."""
    code = one.process.poll()
    if code is None:
        waited = time.time() - one.job.progress.stat().st_mtime
        if waited < item_limit_s and time.time() < deadline + 20:
            return None
        one.process.kill()
        one.process.wait()
        return f"not done after {waited:.0f} s"
    if code in (0, BROKEN):
        return ""
    return f"the process ended with code {code}"


def _name(todo: Sequence[Item], index: int, job: Job) -> str:
    return f"{todo[index].kind}: {todo[index].name}" if index >= 0 else job.stage


def _begun(job: Job) -> int:
    """The item that the worker began last, -1: none."""
    return int(job.progress.read_text() or -1)
