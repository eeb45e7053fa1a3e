"""What a rank's process is told by whoever starts it."""

from __future__ import annotations

import msgspec

from moeserve.config import ServeConfig


class CurveKeys(msgspec.Struct, frozen=True):
    """The job's zmq key pair (CURVE, as Z85 text): who holds it belongs to the job."""

    public: str
    secret: str


class WorkerSpec(msgspec.Struct, frozen=True, kw_only=True):
    """Everything a rank needs to start.

    endpoint: where to bind; peers: endpoints of the other ranks; store: ``file:PATH`` or empty
    for one rank; status_fd: writing end of the supervisor's pipe; parent_pid: whose death ends us.
    """

    config: ServeConfig
    rank: int
    endpoint: str
    peers: list[str]
    store: str
    num_threads: int
    ranks_on_host: int = 1
    status_fd: int | None = None
    parent_pid: int | None = None
    keys: CurveKeys | None = None
