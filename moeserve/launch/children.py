"""Child processes with a status pipe: start one, listen to all, know how each ended."""

from __future__ import annotations

import contextlib
import os
import selectors
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import IO

from moeserve import config, status

# How long a process may take to leave by itself before it is killed.
STOP_GRACE_S = 5.0

# How long to look around, when a process is gone, for others that went before it.
_BLAME_S = 0.1


class LaunchError(RuntimeError):
    """A process could not start or has died; the text holds its own last words."""


@dataclass(slots=True)
class Child:
    """A started process and the reading end of its status pipe."""

    name: str
    process: subprocess.Popen[bytes]
    pipe: IO[bytes]
    phases: list[status.Phase] = field(default_factory=list)
    ready: status.Ready | None = None
    error: str | None = None
    is_gone: bool = False
    _rest: bytes = b""

    def read(self) -> None:
        """Takes what the pipe holds; ``is_gone`` when the process has closed it."""
        data = os.read(self.pipe.fileno(), 1 << 16)
        self.is_gone = not data
        *lines, self._rest = (self._rest + data).split(b"\n")
        for line in lines:
            match status.decode(line):
                case status.Phase() as phase:
                    self.phases.append(phase)
                case status.Ready() as ready:
                    self.ready = ready
                case status.Failed(error):
                    self.error = error

    def last_words(self) -> str:
        """How the process ended, for a person."""
        try:
            code = self.process.wait(timeout=STOP_GRACE_S)
        except subprocess.TimeoutExpired:
            return f"{self.name}: {self.error or 'closed its status pipe but is still running'}"
        how = f"killed by {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
        return f"{self.name}: {self.error or 'died'} ({how})"

    def leave(self, deadline: float) -> None:
        """Waits for the process to leave by itself until ``deadline`` (monotonic), then kills."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(max(0.0, deadline - time.monotonic()))
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
        self.pipe.close()


def spawn(
    module: str, name: str, make_stdin: Callable[[int], bytes], *, pass_fds: Sequence[int] = ()
) -> Child:
    """Starts ``python -m module`` in a session of its own, so that Ctrl-C reaches only us.

    Args:
        make_stdin: gets the number of the status pipe's writing end; returns the child's input.
    """
    read_fd, write_fd = os.pipe()
    process = subprocess.Popen(
        [sys.executable, "-m", module],
        stdin=subprocess.PIPE,
        pass_fds=(write_fd, *pass_fds),
        start_new_session=True,
        env=config.child_environment(),
    )
    os.close(write_fd)
    assert process.stdin is not None
    with contextlib.suppress(BrokenPipeError):  # it died at once: the pipe's end will tell
        process.stdin.write(make_stdin(write_fd))
        process.stdin.close()
    return Child(name, process, os.fdopen(read_fd, "rb", buffering=0))


def listen(children: Sequence[Child], timeout_s: float | None, wake_fd: int | None = None) -> None:
    """Waits until a child says something, ends, or ``wake_fd`` is readable; takes what was said."""
    with selectors.DefaultSelector() as selector:
        for child in children:
            if not child.is_gone:
                selector.register(child.pipe, selectors.EVENT_READ, child)
        if wake_fd is not None:
            selector.register(wake_fd, selectors.EVENT_READ)
        for key, _ in selector.select(timeout_s):
            if isinstance(key.data, Child):
                key.data.read()


def failed(children: Sequence[Child]) -> Child | None:
    """A child that gave up or is gone, None if all are well.

    When a rank dies its peers give up as well, sometimes sooner than the kernel has cleaned up
    after it. So whoever was killed is blamed first, then whoever left without a word.
    """
    if not any(child.error or child.is_gone for child in children):
        return None
    deadline = time.monotonic() + _BLAME_S
    while time.monotonic() < deadline:
        listen(children, max(0.0, deadline - time.monotonic()))
    gone = [child for child in children if child.error or child.is_gone]
    return min(gone, key=lambda child: ((child.process.poll() or 0) >= 0, bool(child.error)))
