"""The planner as a process of its own: ``python -m moeserve.control.planner_process PARENT_PID``.

Planning takes a fraction of a second of Python; in the rank's process it would hold up every step.
Messages on standard input and output are msgpack, each after its size in four bytes. The process
yields to all others (nice 19) and dies with its parent.
"""

from __future__ import annotations

import os
import signal
import struct
import sys
from typing import IO

import setproctitle

from moeserve.control import proposals
from moeserve.control.proposals import Ask, Machine, PlannerSession, Window
from moeserve.status import die_with_parent

SIZE = struct.Struct("<I")


def read_frame(stream: IO[bytes]) -> bytes | None:
    """The next message; None at the end of the stream."""
    head = stream.read(SIZE.size)
    if len(head) < SIZE.size:
        return None
    (size,) = SIZE.unpack(head)
    body = stream.read(size)
    return body if len(body) == size else None


def write_frame(stream: IO[bytes], body: bytes) -> None:
    """Writes one message and pushes it out."""
    stream.write(SIZE.pack(len(body)) + body)
    stream.flush()


def serve(source: IO[bytes], sink: IO[bytes]) -> None:
    """Answers until ``source`` ends."""
    session: PlannerSession | None = None
    while (frame := read_frame(source)) is not None:
        match proposals.decode_to_planner(frame):
            case Machine() as machine:
                session = PlannerSession(machine)
            case Window() as window if session is not None:
                session.observe(window)
            case Ask() as ask if session is not None:
                write_frame(sink, proposals.encode(session.propose(ask)))


def main() -> None:
    """Serves the parent; anything it prints goes to standard error."""
    die_with_parent(int(sys.argv[1]))
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    setproctitle.setproctitle("moeserve planner")
    os.nice(19)
    sink = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # a planner that prints must not break the protocol
    serve(sys.stdin.buffer, sink)


if __name__ == "__main__":
    main()
