"""The rank processes of one machine: start them, wait until they serve, stop them.

Each rank is a fresh interpreter (``python -m moeserve.engine.worker``) that reads its spec from
standard input, so nothing is forked, pickled or imported from the caller's main module.
"""

from __future__ import annotations

import os
import shutil
import tempfile
import time
from pathlib import Path

import msgspec
import zmq

from moeserve import config, messages
from moeserve.engine.setup import make_setup
from moeserve.engine.spec import WorkerSpec
from moeserve.launch.children import STOP_GRACE_S, Child, LaunchError, failed, listen, spawn
from moeserve.launch.interfaces import interface_address


class RankGroup:
    """All ranks of an instance on this machine.

    Args:
        serve_config: the whole configuration; ``parallel.ep`` says how many ranks.

    Raises:
        ValueError: a setting does not suit the model; nothing has been started then.

    Use as a context manager, or call ``stop``; both leave no process and no file.
    """

    def __init__(self, serve_config: config.ServeConfig) -> None:
        self._config = serve_config
        make_setup(serve_config)
        if serve_config.parallel.ep > 1:
            interface_address(serve_config.parallel.interface)
        self.run_dir = _make_run_dir()
        self.endpoints = [f"ipc://{self.run_dir}/rank{r}" for r in range(serve_config.parallel.ep)]
        self.children: list[Child] = []
        try:
            for rank in range(serve_config.parallel.ep):
                self.children.append(self._spawn(rank))
        except BaseException:
            self.kill()
            raise

    def _spawn(self, rank: int) -> Child:
        parallel = self._config.parallel
        num_threads = parallel.threads_per_rank or max(1, config.num_cores() // parallel.ep)
        store = f"file:{self.run_dir}/store" if parallel.ep > 1 else ""
        return spawn(
            "moeserve.engine.worker",
            f"rank {rank}",
            lambda status_fd: msgspec.json.encode(
                WorkerSpec(
                    config=self._config,
                    rank=rank,
                    endpoint=self.endpoints[rank],
                    peers=[e for r, e in enumerate(self.endpoints) if r != rank],
                    store=store,
                    num_threads=num_threads,
                    ranks_on_host=parallel.ep,
                    status_fd=status_fd,
                    parent_pid=os.getpid(),
                )
            ),
        )

    def wait_ready(self) -> None:
        """Returns when every rank serves.

        Raises:
            LaunchError: a rank died or gave up; the text says which and why.
        """
        while not all(child.ready for child in self.children):
            listen(self.children, None)
            if child := failed(self.children):
                raise LaunchError(child.last_words())

    def stop(self) -> None:
        """Asks all ranks to leave together, then kills who stays longer than the grace."""
        context = zmq.Context()
        for endpoint in self.endpoints:
            socket = context.socket(zmq.DEALER)
            socket.setsockopt(zmq.LINGER, 1000)
            socket.connect(endpoint)
            socket.send(messages.encode(messages.Shutdown()))
        deadline = time.monotonic() + STOP_GRACE_S
        for child in self.children:
            child.leave(deadline)
        context.destroy(linger=0)
        self.kill()

    def kill(self) -> None:
        """Ends every rank now and removes the files."""
        for child in self.children:
            child.process.kill()
        for child in self.children:
            child.leave(0.0)
        shutil.rmtree(self.run_dir, ignore_errors=True)

    def __enter__(self) -> RankGroup:
        return self

    def __exit__(self, *exc: object) -> None:
        self.stop()


# A Unix socket's path has at most 107 characters; the longest name in the folder has 10.
_MAX_RUN_DIR_CHARS = 96


def _make_run_dir() -> Path:
    """A fresh folder for sockets, mode 0700: it guards them, their own mode does not.

    Raises:
        ValueError: the temporary folder's path is too long for sockets.
    """
    folder = Path(tempfile.gettempdir())
    if len(str(folder)) + len("/moeserve-12345678") > _MAX_RUN_DIR_CHARS:
        raise ValueError(f"TMPDIR = {folder}: is too long for socket paths; set a shorter one")
    return Path(tempfile.mkdtemp(prefix="moeserve-"))
