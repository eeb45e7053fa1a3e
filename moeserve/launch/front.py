"""Rank 0's HTTP process in a job that a launcher started: start it, watch it, end it."""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import tempfile
import threading
import time
from collections.abc import Callable

import msgspec
import zmq
from rich.console import Console

from moeserve import config, messages
from moeserve.api.process import HttpProcessConfig
from moeserve.engine.spec import CurveKeys
from moeserve.launch import report
from moeserve.launch.children import Child, failed, listen, spawn

logger = logging.getLogger(__name__)

# How long the HTTP process may take to tell its clients that the engine is dead.
_DEATH_NOTICE_S = 1.0


class Front:
    """The HTTP process.

    Args:
        listener: the listening socket; ``stop`` closes it.
        endpoints: zmq addresses of all ranks, by rank.
        keys: the job's.
    """

    def __init__(
        self,
        serve_config: config.ServeConfig,
        listener: socket.socket,
        endpoints: list[str],
        keys: CurveKeys,
    ) -> None:
        self._server = serve_config.server
        self._listener = listener
        self._endpoints = endpoints
        self._keys = keys
        self._started = time.monotonic()
        self._lock = threading.Lock()
        self._is_stopped = False
        self.has_ended = False
        self._context = zmq.Context()
        self._control = self._context.socket(zmq.PUSH)
        # A folder of mode 0700, removed with us: no other user may take messages from the socket.
        self._run_dir = tempfile.TemporaryDirectory(prefix="moeserve-", ignore_cleanup_errors=True)
        control = f"ipc://{self._run_dir.name}/http0"
        self._control.bind(control)
        self._child = self._spawn(serve_config, control)

    def _spawn(self, serve_config: config.ServeConfig, control: str) -> Child:
        return spawn(
            "moeserve.api.process",
            "http 0",
            lambda status_fd: msgspec.json.encode(
                HttpProcessConfig(
                    config=serve_config,
                    rank_endpoints=self._endpoints,
                    control_endpoint=control,
                    listen_fd=self._listener.fileno(),
                    server_index=0,
                    status_fd=status_fd,
                    parent_pid=os.getpid(),
                    curve_public=self._keys.public,
                    curve_secret=self._keys.secret,
                )
            ),
            pass_fds=(self._listener.fileno(),),
        )

    def watch(self, on_death: Callable[[str], None]) -> None:
        """Listens to the process in a thread, says when it serves, and what follows from its end.

        When it leaves in order (it was told to drain) ``has_ended`` is set and the ranks are told
        to leave too; when it has failed ``on_death`` is called, in the thread, with its last words.
        """
        threading.Thread(target=self._watch, args=(on_death,), daemon=True).start()

    def _watch(self, on_death: Callable[[str], None]) -> None:
        is_announced = False
        while not failed([self._child]):
            listen([self._child], None)
            if self._child.ready and not is_announced:
                is_announced = True
                self._announce()
        last_words = self._child.last_words()
        if self._child.process.returncode == 0:
            self.has_ended = True
            logger.info("HTTP has ended; the ranks leave")
            self._stop_ranks()
        elif not self._is_stopped:
            on_death(last_words)

    def _announce(self) -> None:
        console = Console(stderr=True)
        report.print_startup(console, [], [self._child], time.monotonic() - self._started)
        address = self._listener.getsockname()[:2]
        report.print_address(console, address, has_key=self._server.api_key is not None)

    def drain(self) -> None:
        """Lets requests in flight finish; when the HTTP process has left, the ranks follow."""
        self._tell(messages.Drain(self._server.shutdown_timeout))

    def _tell(self, message: messages.ToHttp) -> None:
        with self._lock:
            if not self._is_stopped:
                with contextlib.suppress(zmq.Again):
                    self._control.send(messages.encode(message), zmq.NOBLOCK)

    def _stop_ranks(self) -> None:
        """Tells rank 0, our own process, which takes the others along."""
        with self._lock:
            if self._is_stopped:
                return
            socket_ = self._context.socket(zmq.DEALER)
            socket_.curve_serverkey = self._keys.public.encode()
            socket_.curve_publickey = self._keys.public.encode()
            socket_.curve_secretkey = self._keys.secret.encode()
            socket_.connect(self._endpoints[0])
            socket_.send(messages.encode(messages.Shutdown()))

    def stop(self, reason: str) -> None:
        """Ends the HTTP process, which tells its clients ``reason``; a second call does nothing."""
        self._tell(messages.Dead(reason))
        with self._lock:
            if self._is_stopped:
                return
            self._is_stopped = True
            self._child.leave(time.monotonic() + _DEATH_NOTICE_S)
            self._context.destroy(linger=0)
            self._listener.close()
            self._run_dir.cleanup()
