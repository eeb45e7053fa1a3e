"""``moeserve serve`` on one machine: HTTP processes and ranks, watched until the end.

The supervisor computes nothing and serves nobody. It opens the listening socket (so a port in use
is found before anything is loaded), starts all processes at once, prints how starting went, and
then waits for a signal or a death. Whatever happens, it leaves no process and no file behind.

Exit codes: 0 after SIGTERM or Ctrl-C, 1 when a process died or could not start.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import socket
import time
from collections.abc import Iterator

import msgspec
import zmq
from rich.console import Console

from moeserve import config, log, messages
from moeserve.api.process import HttpProcessConfig
from moeserve.launch import report
from moeserve.launch.children import STOP_GRACE_S, Child, LaunchError, failed, listen, spawn
from moeserve.launch.listener import listen_on
from moeserve.launch.ranks import RankGroup

logger = logging.getLogger(__name__)

# How long HTTP processes may take to tell their clients that the engine is dead.
DEATH_NOTICE_S = 1.0


def serve(serve_config: config.ServeConfig) -> int:
    """Runs an instance until it is told to stop or something dies; returns the exit code."""
    log.setup("serve", serve_config.server.log_level)
    console = Console(stderr=True)
    try:
        listener = listen_on(serve_config.server)
    except OSError as error:
        logger.error("%s", error)
        return 1
    with listener, _signals() as wake_fd:
        try:
            instance = Instance(serve_config, listener)
        except ValueError as error:
            logger.error("%s", error)
            return 1
        try:
            instance.wait_ready(wake_fd, console)
            reason = instance.watch(wake_fd)
        except LaunchError as error:
            reason = str(error)
        if reason is None:
            instance.drain(wake_fd)
            return 0
        logger.error("%s; stopping", reason)
        instance.fail(reason)
        return 1


@contextlib.contextmanager
def _signals() -> Iterator[int]:
    """Turns SIGTERM and SIGINT into a readable byte each; gives the reading end."""
    read_end, write_end = socket.socketpair()
    read_end.setblocking(False)
    write_end.setblocking(False)
    signal.set_wakeup_fd(write_end.fileno())
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: None)
    yield read_end.fileno()
    signal.set_wakeup_fd(-1)


def _signalled(wake_fd: int) -> bool:
    with contextlib.suppress(BlockingIOError):
        return bool(os.read(wake_fd, 64))
    return False


class Instance:
    """The processes of one server."""

    def __init__(self, serve_config: config.ServeConfig, listener: socket.socket) -> None:
        self._server = serve_config.server
        self._started = time.monotonic()
        self._address = listener.getsockname()[:2]
        self._context = zmq.Context()
        self._ranks = RankGroup(serve_config)
        self._controls: list[zmq.Socket[bytes]] = []
        self._http = [
            self._spawn_http(serve_config, listener, index)
            for index in range(self._server.api_server_count)
        ]

    def _spawn_http(
        self, serve_config: config.ServeConfig, listener: socket.socket, index: int
    ) -> Child:
        control = f"ipc://{self._ranks.run_dir}/http{index}"
        socket_ = self._context.socket(zmq.PUSH)
        socket_.bind(control)
        self._controls.append(socket_)
        return spawn(
            "moeserve.api.process",
            f"http {index}",
            lambda status_fd: msgspec.json.encode(
                HttpProcessConfig(
                    config=serve_config,
                    rank_endpoints=self._ranks.endpoints,
                    control_endpoint=control,
                    listen_fd=listener.fileno(),
                    server_index=index,
                    status_fd=status_fd,
                    parent_pid=os.getpid(),
                )
            ),
            pass_fds=(listener.fileno(),),
        )

    @property
    def _children(self) -> list[Child]:
        return [*self._ranks.children, *self._http]

    def wait_ready(self, wake_fd: int, console: Console) -> None:
        """Returns when all processes serve, after printing how that went.

        Raises:
            LaunchError: a process died or gave up, or a signal says to stop: nobody is served yet.
        """
        while not all(child.ready for child in self._children):
            listen(self._children, None, wake_fd)
            if child := failed(self._children):
                raise LaunchError(child.last_words())
            if _signalled(wake_fd):
                raise LaunchError("stopped by a signal while starting")
        seconds = time.monotonic() - self._started
        report.print_startup(console, self._ranks.children, self._http, seconds)
        report.print_address(console, self._address, has_key=self._server.api_key is not None)

    def watch(self, wake_fd: int) -> str | None:
        """Waits; None on a signal, else how a process died."""
        while True:
            listen(self._children, None, wake_fd)
            if child := failed(self._children):
                return child.last_words()
            if _signalled(wake_fd):
                return None

    def drain(self, wake_fd: int) -> None:
        """Lets requests finish within the shutdown timeout, then stops; a second signal hurries."""
        timeout_s = self._server.shutdown_timeout
        logger.info("stopping: requests in flight get %g s", timeout_s)
        self._tell_http(messages.Drain(timeout_s))
        deadline = time.monotonic() + timeout_s + STOP_GRACE_S
        hurry = False
        while any(c.process.poll() is None for c in self._http) and time.monotonic() < deadline:
            listen(self._children, 0.1, wake_fd)
            if child := failed(self._ranks.children):
                self._tell_http(messages.Dead(child.last_words()))
                break
            if hurry := _signalled(wake_fd):
                break
        self._end_http(0.0 if hurry else DEATH_NOTICE_S)
        self._ranks.stop()

    def fail(self, reason: str) -> None:
        """Tells every client that the engine is dead, then ends all processes."""
        self._tell_http(messages.Dead(reason))
        self._end_http(DEATH_NOTICE_S)
        self._ranks.kill()

    def _tell_http(self, message: messages.ToHttp) -> None:
        for control in self._controls:
            with contextlib.suppress(zmq.Again):
                control.send(messages.encode(message), zmq.NOBLOCK)

    def _end_http(self, grace_s: float) -> None:
        deadline = time.monotonic() + grace_s
        for child in self._http:
            child.leave(deadline)
        self._context.destroy(linger=0)
