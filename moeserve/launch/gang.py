"""One rank of a job that a launcher started: torchrun, the deepspeed launcher, or another that
sets RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT.

Every process of the job runs the same ``moeserve serve`` command. Rank 0 also starts the HTTP
process on its machine. Ranks publish their zmq addresses in the launcher's rendezvous store; the
sockets are TCP with CURVE keys, which travel through that store, so only the job can connect.

A process that fails ends the job: launchers see to that on their machine, ``Lifeline`` between
machines.
"""

from __future__ import annotations

import ipaddress
import logging
import os
import signal
import socket
import threading
from collections.abc import Callable
from datetime import timedelta
from typing import NoReturn

import msgspec
import zmq
from torch.distributed import PrefixStore, Store  # type: ignore[attr-defined]  # public, no stub

from moeserve import config, log
from moeserve.engine.setup import make_setup
from moeserve.engine.spec import CurveKeys, WorkerSpec
from moeserve.engine.worker import Worker
from moeserve.launch.children import STOP_GRACE_S, LaunchError
from moeserve.launch.front import Front
from moeserve.launch.interfaces import interface_address
from moeserve.launch.lifeline import Lifeline
from moeserve.launch.listener import listen_on
from moeserve.parallel.groups import tcp_store

logger = logging.getLogger(__name__)


def serve(serve_config: config.ServeConfig, place: config.LauncherRank) -> int:
    """Runs this process's rank until the job is told to stop; returns the exit code."""
    log.setup(f"rank {place.rank}", serve_config.server.log_level)
    try:
        job = Job(checked(serve_config, place), place)
    except (ValueError, LaunchError) as error:  # the text says it all
        logger.error("%s", error)
        return 1
    return job.run()


def checked(serve_config: config.ServeConfig, place: config.LauncherRank) -> config.ServeConfig:
    """The settings of the whole job, from those of this process.

    Raises:
        ValueError: a setting contradicts the launcher, the model or this machine.
    """
    serve_config = config.with_ep(serve_config, place.world_size)
    if serve_config.server.api_server_count != 1:
        raise config.ConfigError(
            f"api_server_count = {serve_config.server.api_server_count}: under a launcher it must "
            "be 1, rank 0 starts one HTTP process"
        )
    interface = serve_config.parallel.interface
    address = interface_address(interface)
    is_alone = place.local_world_size == place.world_size or _is_loopback(_resolve(place))
    if _is_loopback(address) and not is_alone:
        raise config.ConfigError(
            f"interface = {interface!r}: its address is {address}, but the job is on several "
            "machines; must be the interface that leads to the others"
        )
    make_setup(serve_config)
    return serve_config


def _is_loopback(address: str) -> bool:
    return ipaddress.ip_address(address).is_loopback


def _resolve(place: config.LauncherRank) -> str:
    try:
        return socket.gethostbyname(place.master_addr)
    except OSError as error:
        raise config.ConfigError(f"MASTER_ADDR = {place.master_addr}: {error.strerror}") from error


class Job:
    """This process's part of the job: a rank, and on rank 0 the HTTP process.

    Raises:
        LaunchError: the ranks can not find each other, or the HTTP port is in use.
        ValueError: a setting differs from rank 0's.
    """

    def __init__(self, serve_config: config.ServeConfig, place: config.LauncherRank) -> None:
        self._rank = place.rank
        self._silence_s = serve_config.parallel.collective_timeout
        self._is_over = threading.Event()
        store = meet(place, self._silence_s)
        listener = _listener(serve_config.server) if place.rank == 0 else None
        _agree(store, place, serve_config)
        self._keys = _share_keys(store, place)
        self._worker = Worker(_spec(serve_config, place, self._keys), store)
        self._endpoints = _share_endpoints(store, place, self._worker.endpoint)
        self._front: Front | None = None
        if listener is not None:
            self._front = Front(serve_config, listener, self._endpoints, self._keys)

    def run(self) -> int:
        """Serves until all ranks agreed to stop: 0. After a failure this process ends with 1."""
        peers = {r: e for r, e in enumerate(self._endpoints) if r != self._rank}
        watched = peers if self._rank == 0 else {0: peers[0]}
        _on_stop_signal(self._front.drain if self._front else None)
        if self._front:
            self._front.watch(on_death=self._abandon)
        lifeline = Lifeline(watched, self._keys, self._silence_s, on_loss=self._on_loss)
        try:
            self._worker.run(list(peers.values()))
        except ValueError as error:  # a wrong setting or checkpoint: the text says it all
            self._abandon(str(error))
        except Exception as error:
            logger.exception("stopped by an error")
            self._abandon(f"rank {self._rank}: {error}")
        self._is_over.set()
        lifeline.close()
        if self._front:
            self._front.stop("rank 0 has left")
        return 0

    def _on_loss(self, what: str) -> None:
        """Another rank's process has ended: with ours, by agreement, or not."""
        may_be_agreed = self._front is None or self._front.has_ended
        if not self._is_over.wait(STOP_GRACE_S if may_be_agreed else 0):
            self._abandon(what)

    def _abandon(self, reason: str) -> NoReturn:
        logger.error("%s; the job ends", reason)
        if self._front:
            self._front.stop(reason)
        os._exit(1)  # at once: a library's exit handler may wait for a peer that is gone


def meet(place: config.LauncherRank, timeout_s: float) -> Store:
    """The job's part of the launcher's store.

    Raises:
        LaunchError: there is no store, a rank did not come, or another job meets there.
    """
    where = f"MASTER_ADDR = {place.master_addr}, MASTER_PORT = {place.master_port}"
    try:
        store = tcp_store(
            place.master_addr, place.master_port, place.rank, place.world_size, timeout_s
        )
        # A launcher that starts a failed job again may keep its store, with what was said before.
        store = PrefixStore(f"moeserve{place.attempt}", store)
        if place.rank == 0 and store.add("claims", 1) != 1:
            raise LaunchError(f"{where}: another job meets there; must be a free port")
        # All or none: who leaves from here on is missed by the others at once.
        store.set(f"arrived{place.rank}", "1")
        store.wait([f"arrived{r}" for r in range(place.world_size)], timedelta(seconds=timeout_s))
    except (RuntimeError, OSError) as error:
        if isinstance(error, LaunchError):
            raise
        raise LaunchError(
            f"{where}: {place.world_size} ranks did not meet there within {timeout_s:g} s: {error}"
        ) from error
    return store


def _listener(server: config.ServerConfig) -> socket.socket:
    try:
        return listen_on(server)
    except OSError as error:
        raise LaunchError(str(error)) from error


def _agree(store: Store, place: config.LauncherRank, serve_config: config.ServeConfig) -> None:
    """Compares what must be equal on all ranks.

    Paths are not: a checkpoint may lie elsewhere on each machine, but must describe the same model.
    """
    setup, parallel = make_setup(serve_config), serve_config.parallel
    ours = {
        "model": str(setup.spec),
        "placement": str(setup.placement),
        "dtype": setup.dtype,
        "max_model_len": setup.max_model_len,
        "load_format": serve_config.model.load_format,
        "seed": serve_config.model.seed,
        "dispatcher": parallel.dispatcher,
        "batch_invariant": parallel.batch_invariant,
    }
    store.set(f"settings{place.rank}", msgspec.json.encode(ours).decode())
    first, *others = (
        msgspec.json.decode(_get(store, f"settings{rank}")) for rank in range(place.world_size)
    )
    for rank, theirs in enumerate(others, start=1):  # all ranks see it, and all leave
        for name, value in theirs.items():
            if value != first[name]:
                raise config.ConfigError(
                    f"{name} = {str(value)[:200]} on rank {rank}: must be as on rank 0, "
                    f"{str(first[name])[:200]}"
                )


def _spec(
    serve_config: config.ServeConfig, place: config.LauncherRank, keys: CurveKeys
) -> WorkerSpec:
    parallel = serve_config.parallel
    cores = max(1, config.num_cores() // place.local_world_size)
    return WorkerSpec(
        config=serve_config,
        rank=place.rank,
        endpoint=f"tcp://{interface_address(parallel.interface)}:*",
        peers=[],
        store="",
        num_threads=parallel.threads_per_rank or cores,
        ranks_on_host=place.local_world_size,
        keys=keys,
    )


def _share_keys(store: Store, place: config.LauncherRank) -> CurveKeys:
    if place.rank == 0:
        public, secret = zmq.curve_keypair()
        keys = CurveKeys(public.decode(), secret.decode())
        store.set("curve", msgspec.json.encode(keys).decode())
    return msgspec.json.decode(_get(store, "curve"), type=CurveKeys)


def _share_endpoints(store: Store, place: config.LauncherRank, own: str) -> list[str]:
    store.set(f"endpoint{place.rank}", own)
    return [_get(store, f"endpoint{rank}").decode() for rank in range(place.world_size)]


def _get(store: Store, key: str) -> bytes:
    """Waits for what another rank says in the store.

    Raises:
        LaunchError: it did not come.
    """
    try:
        return bytes(store.get(key))
    except RuntimeError as error:
        raise LaunchError(f"another rank did not come ({key}): {error}") from error


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
