"""The ranks and the collectives they meet in: made once from a store, passed along, closed once.

The gloo backend is used as an object, without ``torch.distributed``'s global default group: nothing
is hidden in a module, several groups can live in one process, and the network interface is an
argument instead of an environment variable. Only tensors travel (``*_object`` collectives pickle).
"""

from __future__ import annotations

import errno
import socket
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from typing import Protocol, cast

import torch
from torch.distributed import (  # type: ignore[attr-defined]  # public, missing in torch's stubs
    FileStore,
    PrefixStore,
    ProcessGroupGloo,
    Store,
    TCPStore,
    Work,
)


class CollectiveBackend(Protocol):
    """The one operation of a torch process group that everything here is made of."""

    def alltoall_base(
        self,
        output: torch.Tensor,
        input: torch.Tensor,
        output_split_sizes: list[int],
        input_split_sizes: list[int],
        /,
    ) -> Work:
        """Starts an uneven all-to-all over the first dimension."""
        ...


class ParallelGroups:
    """This rank, its world, and the collectives of the expert-parallel group.

    A collective that fails (a peer is dead, or silent for the timeout) raises RuntimeError; the
    group is of no use afterwards: close it and meet again under the next epoch.
    """

    def __init__(
        self, rank: int, world_size: int, backend: CollectiveBackend | None = None
    ) -> None:
        """Wraps a connected backend; ``create`` is the usual way. One rank needs no backend."""
        if not 0 <= rank < world_size:
            raise ValueError(f"rank = {rank}: must be in [0, {world_size})")
        if (backend is None) != (world_size == 1):
            raise ValueError(f"world_size = {world_size}: a backend is for more than one rank")
        self.rank = rank
        self.world_size = world_size
        self._backend = backend

    @classmethod
    def create(
        cls,
        rank: int,
        world_size: int,
        store: Store | None,
        timeout: float,
        *,
        epoch: int = 0,
        interface: str = "lo",
    ) -> ParallelGroups:
        """Connects this rank to all others; returns when all have arrived.

        Args:
            store: where the ranks find each other; may be None for one rank.
            timeout: seconds after which a silent peer is an error, here and in each collective.
            epoch: the store prefix, so that survivors of a death can meet again at the same store.
            interface: network interface for rank-to-rank traffic; gloo listens on no other.

        Raises:
            RuntimeError: a rank did not arrive in time, or there is no such interface.
        """
        if world_size == 1:
            return cls(rank, world_size)
        if store is None:
            raise ValueError(f"world_size = {world_size}: needs a store to meet at")
        options = ProcessGroupGloo._Options()  # type: ignore[attr-defined]  # the stubs' name differs
        options._timeout = timedelta(seconds=timeout)
        options._devices = [ProcessGroupGloo.create_device(interface=interface)]
        backend = ProcessGroupGloo(PrefixStore(f"epoch{epoch}", store), rank, world_size, options)
        return cls(rank, world_size, cast(CollectiveBackend, backend))

    def all_to_all(
        self, rows: torch.Tensor, send_counts: Sequence[int], recv_counts: Sequence[int]
    ) -> torch.Tensor:
        """Sends slices of ``rows`` to the ranks; returns what they sent, in rank order.

        Args:
            rows: [sum(send_counts), ...], the rows for rank 0 first.
            send_counts: rows for each rank, own rank included.
            recv_counts: rows from each rank; what they pass as ``send_counts`` for this rank.

        Returns:
            [sum(recv_counts), ...].
        """
        if self.world_size == 1:
            return rows
        if self._backend is None:
            raise RuntimeError(f"rank {self.rank}: the group is closed")
        received = rows.new_empty(sum(recv_counts), *rows.shape[1:])
        try:
            self._backend.alltoall_base(
                received, rows.contiguous(), list(recv_counts), list(send_counts)
            ).wait()
        except RuntimeError as error:
            raise RuntimeError(f"rank {self.rank} lost a peer: {error}") from error
        return received

    def all_gather(self, rows: torch.Tensor, counts: Sequence[int]) -> torch.Tensor:
        """All ranks' ``rows``, one rank after the other.

        It is an all-to-all in which every slice is the same: a direct exchange is one hop where
        gloo's own all-gather is a ring of world_size - 1. Measured with 2, 3 and 4 ranks it is
        quicker for a few KB and about equal at 512 KB; and ``counts`` may differ.

        Args:
            rows: [counts[own rank], ...].
            counts: rows that each rank brings; equal on all ranks.

        Returns:
            [sum(counts), ...].
        """
        copies = rows.expand(self.world_size, *rows.shape).flatten(0, 1)
        return self.all_to_all(copies, [len(rows)] * self.world_size, counts)

    def close(self) -> None:
        """Drops the connections. Never waits for a peer; a second call does nothing.

        Every collective above is waited for, so nothing is in flight that the end of the backend
        would have to sit out, even after a failure.
        """
        self._backend = None


def file_store(path: Path, world_size: int) -> Store:
    """A store in a file, for ranks on one host: nothing listens on the network.

    Args:
        path: the file, new for each launch, in a directory that only this user may enter
            (made with mode 0700 when it does not exist).

    Raises:
        ValueError: others may enter the directory; they could lead ranks to a false peer.
    """
    folder = path.parent
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    mode = folder.stat().st_mode & 0o777
    if mode & 0o077:
        raise ValueError(f"store directory {folder}: mode is {mode:04o}, must be 0700")
    return FileStore(str(path), world_size)


def tcp_store(addr: str, port: int, rank: int, world_size: int, timeout: float) -> Store:
    """A store at ``addr:port``, for ranks that a launcher started, on one host or several.

    Some launchers serve a store there themselves (torchrun's agent), others only name the address
    (deepspeed). So rank 0 serves if the port is free and is a client otherwise. It listens on
    ``addr`` alone; torch's own server would listen on every interface.

    Raises:
        RuntimeError: nobody serves there within ``timeout`` seconds.
        OSError: rank 0 can not listen on ``addr``, for another reason than that it is in use.
    """
    wait = timedelta(seconds=timeout)
    listener = _listen(addr, port) if rank == 0 else None
    if listener is None:
        return TCPStore(addr, port, is_master=False, timeout=wait)
    return TCPStore(
        addr,
        port,
        world_size,
        is_master=True,
        timeout=wait,
        wait_for_workers=False,
        master_listen_fd=listener.detach(),
    )


def _listen(addr: str, port: int) -> socket.socket | None:
    """A listening socket, or None when somebody else listens there already."""
    family, _, _, _, address = socket.getaddrinfo(addr, port, type=socket.SOCK_STREAM)[0]
    try:
        return socket.create_server((str(address[0]), port), family=family, backlog=128)
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            return None
        raise
