"""Starts real servers for tests and makes sure that nothing is left of them."""

from __future__ import annotations

import contextlib
import re
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import psutil


@dataclass
class Server:
    """A ``moeserve serve`` process; ``log`` fills with what it prints."""

    process: subprocess.Popen[str]
    log: list[str] = field(default_factory=list)

    @property
    def url(self) -> str:
        """Address, once it is printed."""
        match = re.search(r"Serving on (http://\S+)", "".join(self.log))
        assert match, "".join(self.log)
        return match[1]

    def read_log(self) -> None:
        """Fills ``log`` until the process closes its end."""
        assert self.process.stderr is not None
        for line in self.process.stderr:
            self.log.append(line)

    def family(self) -> list[psutil.Process]:
        """The process and all its descendants."""
        parent = psutil.Process(self.process.pid)
        return [parent, *parent.children(recursive=True)]

    def member(self, title: str) -> psutil.Process:
        """The descendant whose command line shows ``title``, such as ``rank 1``."""
        [found] = [p for p in self.family() if f"moeserve {title}" in " ".join(p.cmdline())]
        return found

    def wait(self, timeout_s: float = 30) -> int:
        """Exit code, once it has ended."""
        return self.process.wait(timeout_s)


def wait_until(condition: Callable[[], object], timeout_s: float = 60) -> None:
    """Calls ``condition`` until it is true."""
    end = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < end, "timed out"
        time.sleep(0.02)


@contextlib.contextmanager
def serving(*arguments: str, wait: bool = True) -> Iterator[Server]:
    """Runs a server on a free port with the embedded model, until the block ends."""
    command = [sys.executable, "-m", "moeserve", "serve", "--port", "0", *arguments]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, bufsize=1)
    server = Server(process)
    reader = threading.Thread(target=server.read_log)
    reader.start()
    family: list[psutil.Process] = []
    try:
        if wait:
            wait_until(
                lambda: process.poll() is not None or any("Serving on" in x for x in server.log),
                120,
            )
            assert process.poll() is None, "".join(server.log)
            family = server.family()
        yield server
    finally:
        if process.poll() is None:
            process.terminate()
            try:
                process.wait(40)
            except subprocess.TimeoutExpired:
                process.kill()
        reader.join(10)
        _gone, alive = psutil.wait_procs(family, timeout=10)
        for left in alive:
            left.kill()
        assert not alive, f"left behind: {alive}"
