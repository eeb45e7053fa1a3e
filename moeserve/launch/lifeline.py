"""Notices that the process of another rank is gone, on whichever machine, whatever this rank does.

A rank that computes learns of a dead peer from the next collective. One that is loading or idle
would not: it waits for a store or for mail. So in a job that nobody supervises as a whole rank 0
keeps a connection open to each rank, and each rank one to rank 0. It breaks when the other process
ends, and zmq's heartbeats (answered by its own thread, whatever the rank computes) find a machine
that fell silent.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping

import zmq
from zmq.utils.monitor import recv_monitor_message

from moeserve.engine.spec import CurveKeys

_HEARTBEAT_S = 5.0
_CONNECT_S = 20.0

_LOST = {
    zmq.Event.DISCONNECTED: "is gone",
    zmq.Event.CLOSED: "can not be reached",
    zmq.Event.HANDSHAKE_FAILED_NO_DETAIL: "does not answer as a rank",
    zmq.Event.HANDSHAKE_FAILED_PROTOCOL: "does not answer as a rank",
    zmq.Event.HANDSHAKE_FAILED_AUTH: "belongs to another job",
}


class Lifeline:
    """Open connections to other ranks, watched in a thread until ``close``.

    Args:
        endpoints: zmq tcp address by rank; each is bound already.
        keys: the job's.
        silence_s: after so many seconds without a sign of life a rank counts as gone.
        on_loss: called once, in the thread, with what has happened; no more is watched then.
    """

    def __init__(
        self,
        endpoints: Mapping[int, str],
        keys: CurveKeys,
        silence_s: float,
        on_loss: Callable[[str], None],
    ) -> None:
        self._context = zmq.Context()
        self._on_loss = on_loss
        self._poller = zmq.Poller()
        self._watched: dict[zmq.Socket[bytes], str] = {}
        self._sockets: list[zmq.Socket[bytes]] = []  # zmq closes what nobody refers to
        for rank, endpoint in endpoints.items():
            self._connect(endpoint, keys, silence_s, f"rank {rank} ({endpoint})")
        self._closing, self._stop = (self._context.socket(zmq.PAIR) for _ in range(2))
        self._closing.bind("inproc://close")
        self._stop.connect("inproc://close")
        self._poller.register(self._closing, zmq.POLLIN)
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()

    def _connect(self, endpoint: str, keys: CurveKeys, silence_s: float, name: str) -> None:
        socket = self._context.socket(zmq.DEALER)
        socket.curve_serverkey = keys.public.encode()
        socket.curve_publickey = keys.public.encode()
        socket.curve_secretkey = keys.secret.encode()
        socket.setsockopt(zmq.RECONNECT_IVL, -1)
        socket.setsockopt(zmq.CONNECT_TIMEOUT, int(_CONNECT_S * 1000))
        socket.setsockopt(zmq.HEARTBEAT_IVL, int(min(_HEARTBEAT_S, silence_s / 3) * 1000))
        socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, int(silence_s * 1000))
        monitor = socket.get_monitor_socket(sum(_LOST))  # before anything can happen
        self._watched[monitor] = name
        self._sockets.append(socket)
        self._poller.register(monitor, zmq.POLLIN)
        socket.connect(endpoint)

    def _watch(self) -> None:
        ready = dict(self._poller.poll())
        if self._closing in ready:
            return
        monitor = next(iter(ready))
        event = recv_monitor_message(monitor)["event"]
        self._on_loss(f"{self._watched[monitor]} {_LOST[event]}")

    def close(self) -> None:
        """Drops the connections; ``on_loss`` is not called any more when this returns."""
        self._stop.send(b"")
        if threading.current_thread() is not self._thread:
            self._thread.join()
        self._context.destroy(linger=0)
