"""The zmq sockets between this HTTP process and the ranks. No event loop in here.

One DEALER per rank. ``send`` never blocks; ``receive`` takes what is there. A frame that does not
decode is dropped and counted.
"""

from __future__ import annotations

import logging
import secrets
from collections.abc import Sequence
from dataclasses import dataclass

import msgspec
import zmq

from moeserve import messages

logger = logging.getLogger(__name__)

_MAX_MESSAGE_BYTES = 64 << 20
_SEND_QUEUE = 10_000  # messages; a rank that lets it fill is as good as gone


class RankUnreachable(RuntimeError):
    """A rank does not take messages any more."""


@dataclass(frozen=True, slots=True)
class CurveKeys:
    """The job's zmq key pair (Z85), for ranks that are reached over tcp."""

    public: str
    secret: str


class RankLinks:
    """Connections to all ranks.

    Args:
        endpoints: where rank 0, 1, ... can be reached.
        control_endpoint: where the supervisor pushes ``Dead`` and ``Drain``.
        keys: CURVE keys for tcp endpoints.
    """

    def __init__(
        self,
        endpoints: Sequence[str],
        *,
        control_endpoint: str | None = None,
        keys: CurveKeys | None = None,
    ) -> None:
        self._context = zmq.Context()
        self._identity = f"http-{secrets.token_hex(8)}".encode()
        self.num_bad_frames = 0
        self.sockets = [self._connect(endpoint, keys) for endpoint in endpoints]
        self.control: zmq.Socket[bytes] | None = None
        if control_endpoint is not None:
            self.control = self._socket(zmq.PULL)
            self.control.connect(control_endpoint)

    def _socket(self, kind: int) -> zmq.Socket[bytes]:
        socket = self._context.socket(kind)
        socket.setsockopt(zmq.LINGER, 0)
        socket.setsockopt(zmq.MAXMSGSIZE, _MAX_MESSAGE_BYTES)
        socket.setsockopt(zmq.RCVHWM, 0)  # what is in flight bounds it; a lost token would hang
        socket.setsockopt(zmq.SNDHWM, _SEND_QUEUE)
        return socket

    def _connect(self, endpoint: str, keys: CurveKeys | None) -> zmq.Socket[bytes]:
        socket = self._socket(zmq.DEALER)
        socket.setsockopt(zmq.IDENTITY, self._identity)
        if keys is not None and endpoint.startswith("tcp://"):
            socket.curve_serverkey = keys.public.encode()
            socket.curve_publickey = keys.public.encode()
            socket.curve_secretkey = keys.secret.encode()
        socket.connect(endpoint)
        return socket

    @property
    def descriptors(self) -> list[int]:
        """A file descriptor per rank that turns readable when something may have come."""
        return [int(socket.getsockopt(zmq.FD)) for socket in self.sockets]

    @property
    def control_descriptor(self) -> int | None:
        """The same for the supervisor's socket."""
        return None if self.control is None else int(self.control.getsockopt(zmq.FD))

    def send(self, rank: int, message: messages.ToRank) -> None:
        """Hands a message to zmq.

        Raises:
            RankUnreachable: the rank has not taken messages for a long time.
        """
        try:
            self.sockets[rank].send(messages.encode(message), zmq.NOBLOCK, copy=True)
        except zmq.Again as error:
            raise RankUnreachable(f"rank {rank} takes no messages") from error

    def receive(self, rank: int, limit: int) -> list[tuple[messages.FromRank, int]]:
        """Up to ``limit`` messages that are here, each with its size in bytes."""
        received: list[tuple[messages.FromRank, int]] = []
        recv = self.sockets[rank].recv
        for _ in range(limit):
            try:
                frame = recv(zmq.NOBLOCK)
            except zmq.Again:
                break
            try:
                received.append((messages.decode_from_rank(frame), len(frame)))
            except (msgspec.DecodeError, ValueError) as error:
                self._drop(frame, error)
        return received

    def receive_control(self) -> list[messages.ToHttp]:
        """What the supervisor has sent."""
        received: list[messages.ToHttp] = []
        while self.control is not None:
            try:
                frame = self.control.recv(zmq.NOBLOCK)
            except zmq.Again:
                break
            try:
                received.append(messages.decode_to_http(frame))
            except (msgspec.DecodeError, ValueError) as error:
                self._drop(frame, error)
        return received

    def _drop(self, frame: bytes, error: Exception) -> None:
        self.num_bad_frames += 1
        logger.warning("dropped a frame of %d bytes: %s", len(frame), error)

    def close(self) -> None:
        """Closes all sockets; what is unsent is dropped."""
        self._context.destroy(linger=0)
