"""One server of bench_skew: started, watched through /experts/load while it works, stopped."""

from __future__ import annotations

import asyncio
import contextlib
import json
import shlex
import socket
import sys
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from benchmarks import server_process
from benchmarks.load import Run, run_bodies
from benchmarks.skew_measure import Sample, SkewError
from benchmarks.skew_workloads import Stream
from benchmarks.sse_client import Address, ClientError, Connection


@dataclass(kw_only=True)
class Watched:
    """A running server. samples: snapshots of its load, in order of time."""

    address: Address
    process: psutil.Process | None = None
    samples: list[Sample] = field(default_factory=list)

    async def get(self, path: str) -> Any:
        """The JSON that GET ``path`` gives.

        Raises:
            ClientError: the server answers with an error, or not at all.
        """
        connection = Connection(self.address)
        try:
            reply = await connection.request("GET", path)
        finally:
            connection.close()
        if reply.status != 200:
            raise ClientError(f"GET {path}: HTTP {reply.status}")
        return json.loads(reply.body)

    async def snapshot(self) -> Sample:
        """Takes a snapshot; it is also added to ``samples``."""
        answer = await self.get("/experts/load")
        sample = Sample.parse(time.perf_counter(), answer)
        self.samples.append(sample)
        return sample

    async def run(self, streams: Sequence[Stream]) -> tuple[Run, list[Sample]]:
        """Sends all streams at once; what the client measured, and the snapshots around and within.

        Raises:
            SkewError: a request failed.
        """
        first = await self.snapshot()
        runs = await asyncio.gather(
            *[
                run_bodies(stream.target, stream.bodies[::-1], stream.concurrency, self.process)
                for stream in streams
            ]
        )
        last = await self.snapshot()
        run = merged(runs)
        if run.errors:
            raise SkewError(f"{len(run.errors)} requests failed, the first with: {run.errors[0]}")
        inside = [s for s in self.samples if first.time_s <= s.time_s <= last.time_s]
        return run, inside

    async def poll(self, interval_s: float) -> None:
        """Takes snapshots until it is cancelled; a busy server may miss one."""
        while True:
            with contextlib.suppress(ClientError):
                await self.snapshot()
            await asyncio.sleep(interval_s)


def merged(runs: Sequence[Run]) -> Run:
    """Runs of one client that ran side by side, as one."""
    longest = max(runs, key=lambda run: run.wall_s)
    return Run(
        wall_s=longest.wall_s,
        timings=tuple(timing for run in runs for timing in run.timings),
        errors=tuple(error for run in runs for error in run.errors),
        client_cores=longest.client_cores,
        server_cores=longest.server_cores,
        other_cores=longest.other_cores,
    )


@contextlib.asynccontextmanager
async def watched_server(
    arguments: Sequence[str], *, log: Path, timeout_s: float, poll_s: float
) -> AsyncIterator[Watched]:
    """Runs ``moeserve serve`` with these arguments on a free port and watches it.

    Raises:
        ServerFailedError: it did not start; the text has the end of its log.
    """
    port = _free_port()
    command = [sys.executable, "-m", "moeserve", "serve", "--port", str(port), *arguments]
    address = Address.parse(f"http://127.0.0.1:{port}")
    async with server_process.running_server(
        shlex.join(command),
        address,
        ready_paths=("/health", "/v1/models"),
        timeout_s=timeout_s,
        log=log,
    ) as (process, _seconds):
        server = Watched(address=address, process=process)
        poller = asyncio.create_task(server.poll(poll_s))
        try:
            yield server
        finally:
            poller.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await poller


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
