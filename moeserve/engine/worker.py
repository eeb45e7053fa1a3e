"""One rank's process, from start to the loop: ``python -m moeserve.engine.worker``.

The supervisor writes a ``WorkerSpec`` as JSON to standard input. Under torchrun or another launcher
``launch/gang.py`` makes the spec and uses ``Worker`` in the launcher's own process.
"""

from __future__ import annotations

import logging
import os
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import msgspec
import psutil
import setproctitle
import torch
from torch.distributed import Store  # type: ignore[attr-defined]  # public, not in the stubs

from moeserve import log
from moeserve.engine.assembly import Rank, assemble
from moeserve.engine.channel import Channel
from moeserve.engine.spec import WorkerSpec
from moeserve.parallel.groups import file_store
from moeserve.status import Failed, Phase, Ready, StatusPipe, die_with_parent

logger = logging.getLogger(__name__)


class Worker:
    """A rank: reachable at ``endpoint`` from the moment it is made, serving in ``run``."""

    def __init__(self, spec: WorkerSpec, store: Store | None) -> None:
        self._spec = spec
        self._store = store
        self._status = StatusPipe(spec.status_fd)
        invariant = spec.config.parallel.batch_invariant
        # How a matrix product is cut up for threads changes its bits: see moeserve_kernels.
        torch.set_num_threads(1 if invariant else spec.num_threads)
        self._channel = Channel(spec.endpoint, spec.keys)

    @property
    def endpoint(self) -> str:
        """Where this rank's mailbox is."""
        return self._channel.endpoint

    def run(self, peers: Sequence[str]) -> None:
        """Starts up, meets the other ranks and steps until all agreed to stop.

        Args:
            peers: endpoints of the other ranks.

        Raises:
            RuntimeError: a peer died or fell silent.
        """
        self._channel.connect_peers(peers)
        try:
            rank, groups = assemble(self._spec, self._store, self._channel, self._status)
            self._announce(rank)
            rank.loop.run()
            groups.close()
        finally:
            self._channel.close()

    def _announce(self, rank: Rank) -> None:
        self._status.send(Ready(rank.facts))
        for fact, value in rank.facts.items():
            logger.debug("%s: %s", fact, value)


def main() -> None:
    """Runs the rank that standard input describes; exit code 0 after an agreed stop, else 1."""
    spec = msgspec.json.decode(sys.stdin.buffer.read(), type=WorkerSpec)
    die_with_parent(spec.parent_pid)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the supervisor stops us in order
    setproctitle.setproctitle(f"moeserve rank {spec.rank}")
    log.setup(f"rank {spec.rank}", spec.config.server.log_level)
    status = StatusPipe(spec.status_fd)
    status.send(Phase("import torch", time.time() - psutil.Process().create_time()))
    try:
        kind, _, path = spec.store.partition(":")
        store = file_store(Path(path), spec.config.parallel.ep) if kind == "file" else None
        Worker(spec, store).run(spec.peers)
    except Exception as error:
        if isinstance(error, ValueError):  # a wrong setting or checkpoint: the text says it all
            status.send(Failed(str(error)))
        else:
            logger.exception("stopped by an error")
            status.send(Failed(f"{type(error).__name__}: {error}"))
        os._exit(1)  # at once: a library's exit handler may wait for a peer that is gone


if __name__ == "__main__":
    main()
