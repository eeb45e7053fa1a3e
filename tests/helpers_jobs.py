"""Starts jobs of several ranks for tests, under launchers or by hand; nothing is left of them."""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import psutil
from helpers_server import wait_until

_MARK = "MOESERVE_TEST_JOB"


@dataclass
class Job:
    """Some processes and all that descends from them, found by a mark in their environment."""

    mark: str = field(default_factory=lambda: secrets.token_hex(8))
    starters: list[subprocess.Popen[str]] = field(default_factory=list)
    log: list[str] = field(default_factory=list)

    def start(self, command: Sequence[str], environment: dict[str, str] | None = None) -> None:
        """Starts one more process; what it prints goes to ``log``."""
        environment = {
            **{k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE")},
            **(environment or {}),
            _MARK: self.mark,
            "SPT_NOENV": "1",  # setproctitle would write its title over the mark
            "OMP_NUM_THREADS": "1",
        }
        process = subprocess.Popen(
            command, env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
            start_new_session=True,
        )  # fmt: skip
        self.starters.append(process)
        threading.Thread(target=self._read, args=(process,), daemon=True).start()

    def _read(self, process: subprocess.Popen[str]) -> None:
        assert process.stdout is not None
        self.log.extend(process.stdout)

    @property
    def text(self) -> str:
        """All that was printed so far."""
        return "".join(self.log)

    @property
    def url(self) -> str:
        """The address that was printed; waits for it."""
        wait_until(lambda: "Serving on" in self.text or not self.alive(), 100)
        match = re.search(r"Serving on (http://\S+)", self.text)
        assert match, self.text
        return match[1]

    def alive(self) -> list[psutil.Process]:
        """All processes of the job that have not ended."""
        found = []
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error):
                if process.environ().get(_MARK) == self.mark and process.status() != "zombie":
                    found.append(process)
        return found

    def rank(self, number: int) -> psutil.Process:
        """The process of one rank (its HTTP process inherits RANK too, but has a title)."""
        [found] = [
            process
            for process in self.alive()
            if process.environ().get("RANK") == str(number) and "serve" in process.cmdline()
        ]
        return found

    def http(self) -> psutil.Process:
        """The HTTP process."""
        [found] = [p for p in self.alive() if "moeserve http" in " ".join(p.cmdline())]
        return found

    def wait(self, timeout_s: float = 40) -> list[int]:
        """The starters' exit codes, once nothing is left of the job."""
        wait_until(lambda: not self.alive(), timeout_s)
        return [process.wait(5) for process in self.starters]

    def stop(self) -> None:
        """Sends SIGTERM to the process groups that were started."""
        for process in self.starters:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGTERM)


@contextlib.contextmanager
def job() -> Iterator[Job]:
    """A job to start processes in; at the end of the block they are killed."""
    running = Job()
    try:
        yield running
    finally:
        for process in running.alive():
            with contextlib.suppress(psutil.Error):
                process.kill()
        for starter in running.starters:
            starter.wait(10)


def serve_command(*arguments: str) -> list[str]:
    """The command of one rank, to put behind a launcher's."""
    return ["moeserve", "serve", "embedded", "--port", "0", *arguments]


def start_ranks(running: Job, num_ranks: int, *arguments: str) -> None:
    """Starts ranks on loopback as a launcher would, which is quicker than a launcher."""
    port = free_port()
    for rank in range(num_ranks):
        running.start([sys.executable, "-m", *serve_command(*arguments)],
                      place(rank, num_ranks, "127.0.0.1", port))  # fmt: skip


def place(rank: int, world_size: int, master_addr: str, master_port: int) -> dict[str, str]:
    """What a launcher tells a rank, by environment."""
    return {
        "RANK": str(rank),
        "WORLD_SIZE": str(world_size),
        "MASTER_ADDR": master_addr,
        "MASTER_PORT": str(master_port),
    }


def free_port() -> int:
    """A port that nobody listens on at the moment."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])


def listeners(processes: Sequence[psutil.Process]) -> list[tuple[str, int]]:
    """Where the processes listen for TCP; in this network namespace."""
    return sorted(
        {
            (connection.laddr.ip, connection.laddr.port)
            for process in processes
            for connection in process.net_connections(kind="tcp")
            if connection.status == psutil.CONN_LISTEN
        }
    )


def listening(process: psutil.Process) -> set[str]:
    """Addresses that are listened on for TCP in the network namespace of the process."""
    found = set()
    for line in Path(f"/proc/{process.pid}/net/tcp").read_text().splitlines()[1:]:
        _, local, _, state, *_ = line.split()
        if state == "0A":  # LISTEN
            found.add(socket.inet_ntoa(bytes.fromhex(local.split(":")[0])[::-1]))
    return found
