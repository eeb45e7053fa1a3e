"""The line between a child process and its supervisor.

Upwards: JSON lines on an inherited pipe tell how starting goes; the pipe closing tells that the
process is gone, for whatever reason. Downwards: the kernel ends the child when its parent dies.
"""

from __future__ import annotations

import ctypes
import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager

import msgspec


class Phase(msgspec.Struct, frozen=True, tag=True):
    """A phase of starting up is over."""

    name: str
    seconds: float


class Ready(msgspec.Struct, frozen=True, tag=True):
    """The process serves. ``facts`` are for people: what the memory buys, which transport ..."""

    facts: dict[str, str]


class Failed(msgspec.Struct, frozen=True, tag=True):
    """The process can not go on; ``error`` is for the user, whole."""

    error: str


Status = Phase | Ready | Failed
decode = msgspec.json.Decoder(Status).decode
_encode = msgspec.json.Encoder().encode


class StatusPipe:
    """The writing end. Without a supervisor (``fd`` None) everything is dropped."""

    def __init__(self, fd: int | None) -> None:
        self._fd = fd

    def send(self, status: Status) -> None:
        """Writes one line; a supervisor that is gone is ignored."""
        if self._fd is None:
            return
        try:
            os.write(self._fd, _encode(status) + b"\n")
        except OSError:
            self._fd = None

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Times a block and reports it."""
        start = time.monotonic()
        yield
        self.send(Phase(name, time.monotonic() - start))


_PR_SET_PDEATHSIG = 1


def die_with_parent(parent_pid: int | None) -> None:
    """Asks the kernel to kill this process when its parent dies (Linux), so no orphan is left.

    Raises:
        SystemExit: the parent is gone already.
    """
    if parent_pid is None:
        return
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent_pid:  # it died before the call above
        raise SystemExit(1)
