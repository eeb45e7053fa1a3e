"""One rank of a job that a launcher started: torchrun, the deepspeed launcher, or another that
sets RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT.

Every process of the job runs the same ``moeserve serve`` command. Rank 0 also starts the HTTP
process on its machine. Ranks publish their zmq addresses in the launcher's rendezvous store; the
sockets are TCP with CURVE keys, which travel through that store, so only the job can connect.

Launchers end the whole job when one process dies; that is their contract, and it is kept.
"""

from __future__ import annotations

import logging
import os
import signal
import socket
import threading
import time
from collections.abc import Callable

import msgspec
import psutil
import zmq
from rich.console import Console
from torch.distributed import PrefixStore, Store  # type: ignore[attr-defined]  # public, no stub

from moeserve import config, log, messages
from moeserve.api.process import HttpProcessConfig
from moeserve.engine.spec import CurveKeys, WorkerSpec
from moeserve.engine.worker import Worker
from moeserve.launch import report
from moeserve.launch.children import STOP_GRACE_S, Child, failed, listen, spawn
from moeserve.launch.listener import listen_on
from moeserve.parallel.groups import tcp_store

logger = logging.getLogger(__name__)


def serve(serve_config: config.ServeConfig, place: config.LauncherRank) -> int:
    """Runs this process's rank until the job is told to stop; returns the exit code.

    Raises:
        config.ConfigError: ``--ep`` contradicts the launcher's number of processes.
    """
    serve_config = config.with_ep(serve_config, place.world_size)
    log.setup(f"rank {place.rank}", serve_config.server.log_level)
    parallel = serve_config.parallel
    address = interface_address(parallel.interface)
    store = PrefixStore(
        "moeserve",
        tcp_store(place.master_addr, place.master_port, place.rank, place.world_size,
                  parallel.collective_timeout),
    )  # fmt: skip
    keys = _share_keys(store, place.rank)
    worker = Worker(
        WorkerSpec(
            config=serve_config,
            rank=place.rank,
            endpoint=f"tcp://{address}:*",
            peers=[],
            store="",
            num_threads=parallel.threads_per_rank
            or max(1, config.num_cores() // place.local_world_size),
            ranks_on_host=place.local_world_size,
            keys=keys,
        ),
        store,
    )
    endpoints = _share_endpoints(store, place, worker.endpoint)
    peers = [endpoint for rank, endpoint in enumerate(endpoints) if rank != place.rank]
    if place.rank == 0:
        try:
            listener = listen_on(serve_config.server)
        except OSError as error:
            logger.error("%s", error)
            return 1
        front = Front(serve_config, listener, endpoints, keys)
        _on_stop_signal(front.drain)
    else:
        _on_stop_signal(None)
    try:
        worker.run(peers)
    finally:
        if place.rank == 0:
            front.stop()
    return 0


def _share_keys(store: Store, rank: int) -> CurveKeys:
    if rank == 0:
        public, secret = zmq.curve_keypair()
        keys = CurveKeys(public.decode(), secret.decode())
        store.set("curve", msgspec.json.encode(keys).decode())
    return msgspec.json.decode(store.get("curve"), type=CurveKeys)


def _share_endpoints(store: Store, place: config.LauncherRank, own: str) -> list[str]:
    store.set(f"endpoint{place.rank}", own)
    return [store.get(f"endpoint{rank}").decode() for rank in range(place.world_size)]


def interface_address(name: str) -> str:
    """The IPv4 address of a network interface.

    Raises:
        config.ConfigError: there is no such interface, or it has no IPv4 address.
    """
    interfaces = psutil.net_if_addrs()
    for item in interfaces.get(name, []):
        if item.family == socket.AF_INET:
            return str(item.address)
    raise config.ConfigError(
        f"interface = {name!r}: must be one of {', '.join(interfaces)}, with an IPv4 address"
    )


def _on_stop_signal(action: Callable[[], None] | None) -> None:
    """On SIGTERM or SIGINT runs ``action`` once, in a thread: the main one is in the step loop.

    Launchers send the signal to every process of the job; only rank 0 acts, since ranks must leave
    together, at an agreed step.
    """

    def handle(*_: object) -> None:
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, signal.SIG_IGN)
        if action is not None:
            threading.Thread(target=action, daemon=True).start()

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, handle)


class Front:
    """Rank 0's HTTP process, watched from a thread: when it dies, the job ends."""

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
        self._context = zmq.Context()
        self._control = self._context.socket(zmq.PUSH)
        port = self._control.bind_to_random_port("tcp://127.0.0.1")
        self._child = self._spawn(serve_config, f"tcp://127.0.0.1:{port}")
        threading.Thread(target=self._watch, daemon=True).start()

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

    def _watch(self) -> None:
        while not failed([self._child]):
            was_ready = self._child.ready is not None
            listen([self._child], None)
            if self._child.ready and not was_ready:
                console = Console(stderr=True)
                seconds = time.monotonic() - self._started
                report.print_startup(console, [], [self._child], seconds)
                address = self._listener.getsockname()[:2]
                report.print_address(console, address, has_key=self._server.api_key is not None)
        logger.info("%s; stopping the job", self._child.last_words())
        self._stop_ranks()

    def drain(self) -> None:
        """Lets requests in flight finish; when the HTTP process has left, the ranks follow."""
        self._control.send(messages.encode(messages.Drain(self._server.shutdown_timeout)))

    def _stop_ranks(self) -> None:
        socket_ = self._context.socket(zmq.DEALER)
        socket_.curve_serverkey = self._keys.public.encode()
        socket_.curve_publickey = self._keys.public.encode()
        socket_.curve_secretkey = self._keys.secret.encode()
        socket_.connect(self._endpoints[0])
        socket_.send(messages.encode(messages.Shutdown()))

    def stop(self) -> None:
        """Ends the HTTP process; called when this rank's loop is over, for whatever reason."""
        if not self._child.is_gone:
            self._control.send(messages.encode(messages.Dead("rank 0 has stopped")))
        self._child.leave(time.monotonic() + STOP_GRACE_S)
        self._context.destroy(linger=0)
        self._listener.close()
