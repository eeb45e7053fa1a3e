"""Starts a server command, waits until it is ready, and stops it with all its children."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shlex
import signal
import subprocess
import time
from collections.abc import AsyncIterator, Sequence
from pathlib import Path

import psutil

from benchmarks.sse_client import Address, ClientError, Connection

STOP_TIMEOUT_S = 30.0


class ServerFailedError(RuntimeError):
    """The server command ended or did not become ready; the text has the end of its log."""


@contextlib.asynccontextmanager
async def running_server(
    command: str, address: Address, *, ready_paths: Sequence[str], timeout_s: float, log: Path
) -> AsyncIterator[tuple[psutil.Process, float]]:
    """Yields the server's process and its start-up seconds; stops its process group at the end.

    ready_paths: what must answer GET with 200, or 401 (it wants a key), before the server counts as
    started; with one path alone a server that only lives, but still loads its model, may pass.

    Raises:
        ServerFailedError: another server has the address, it ended early, or it was not ready
            within ``timeout_s``.
    """
    if await answers(address, ready_paths[0]):
        raise ServerFailedError(f"{address.host}:{address.port} already answers: stop that server")
    start = time.perf_counter()
    with log.open("wb") as file:
        process = subprocess.Popen(
            shlex.split(command), stdout=file, stderr=subprocess.STDOUT, start_new_session=True
        )
    try:
        while not all([await answers(address, path) for path in ready_paths]):
            if process.poll() is not None:
                raise ServerFailedError(
                    f"{command!r} ended with {process.returncode}\n{_tail(log)}"
                )
            if time.perf_counter() - start > timeout_s:
                raise ServerFailedError(f"{command!r}: not ready in {timeout_s} s\n{_tail(log)}")
            await asyncio.sleep(0.1)
        yield psutil.Process(process.pid), time.perf_counter() - start
    finally:
        stop(process)


async def answers(address: Address, path: str) -> bool:
    """Whether GET ``path`` gives 200 or 401."""
    connection = Connection(address)
    try:
        async with asyncio.timeout(5):
            return (await connection.request("GET", path)).status in (200, 401)
    except (ClientError, TimeoutError):
        return False
    finally:
        connection.close()


def stop(process: subprocess.Popen[bytes]) -> None:
    """SIGTERM, and SIGKILL to the whole group if it has not ended in ``STOP_TIMEOUT_S``."""
    if process.poll() is None:
        process.send_signal(signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(STOP_TIMEOUT_S)
    with contextlib.suppress(ProcessLookupError):  # nothing is left of the group
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def cpu_seconds(process: psutil.Process) -> float:
    """CPU seconds that ``process`` and its living descendants have used."""
    total = 0.0
    for member in [process, *process.children(recursive=True)]:
        with contextlib.suppress(psutil.NoSuchProcess):
            times = member.cpu_times()
            total += times.user + times.system
    return total


def _tail(log: Path) -> str:
    return log.read_text(errors="replace")[-2000:]
