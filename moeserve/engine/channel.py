"""A rank's mailbox: one zmq ROUTER for everyone who talks to it, one DEALER to each peer.

HTTP processes, the supervisor and the other ranks all connect to the ROUTER; who connects is known
by the identity that zmq puts before each message. A frame that is no message of ours is dropped
and counted, never an error.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass

import msgspec
import zmq
from zmq.auth.thread import ThreadAuthenticator

from moeserve import messages
from moeserve.engine.spec import CurveKeys

logger = logging.getLogger(__name__)

# One request is at most a prompt of token ids; 64 MiB is far above any of them.
MAX_MESSAGE_BYTES = 64 << 20


@dataclass(frozen=True, slots=True)
class Mail:
    """One message and the identity of its sender."""

    source: bytes
    message: messages.ToRank


class _OnlyJobKey:
    """zmq asks this whether a client may connect; the key comes as Z85 text."""

    def __init__(self, public: str) -> None:
        self._public = public.encode()

    def callback(self, domain: str, key: bytes) -> bool:
        return key == self._public


class Channel:
    """The socket that a rank is reached at.

    Args:
        endpoint: where to bind; ``tcp://address:*`` takes a free port, see ``endpoint``.
        keys: CURVE keys; needed for tcp, so that only members of the job can connect.

    Raises:
        zmq.ZMQError: the endpoint can not be bound.
    """

    def __init__(self, endpoint: str, keys: CurveKeys | None = None) -> None:
        self._context = zmq.Context()
        self._keys = keys
        self._authenticator: ThreadAuthenticator | None = None
        self._router = self._socket(zmq.ROUTER)
        # A slow reader must not lose tokens: the HTTP process bounds what it keeps per client.
        self._router.setsockopt(zmq.SNDHWM, 0)
        self._router.setsockopt(zmq.ROUTER_HANDOVER, 1)
        if keys is not None:
            self._authenticator = ThreadAuthenticator(self._context)
            self._authenticator.start()
            self._authenticator.configure_curve_callback("*", _OnlyJobKey(keys.public))
            self._router.curve_server = True
            self._router.curve_publickey = keys.public.encode()
            self._router.curve_secretkey = keys.secret.encode()
        self._router.bind(endpoint)
        self.endpoint: str = self._router.getsockopt_string(zmq.LAST_ENDPOINT)
        self._peers: list[zmq.Socket[bytes]] = []
        self.num_bad_frames = 0

    def _socket(self, kind: int) -> zmq.Socket[bytes]:
        socket = self._context.socket(kind)
        socket.setsockopt(zmq.LINGER, 0)
        socket.setsockopt(zmq.MAXMSGSIZE, MAX_MESSAGE_BYTES)
        return socket

    def connect_peers(self, endpoints: Sequence[str]) -> None:
        """Opens the way to the other ranks (their endpoints, without this rank's own)."""
        for endpoint in endpoints:
            peer = self._socket(zmq.DEALER)
            if self._keys is not None:
                peer.curve_serverkey = self._keys.public.encode()
                peer.curve_publickey = self._keys.public.encode()
                peer.curve_secretkey = self._keys.secret.encode()
            peer.connect(endpoint)
            self._peers.append(peer)

    def drain(self) -> list[Mail]:
        """All mail that is here now; does not wait."""
        mail: list[Mail] = []
        while True:
            try:
                source, *_, frame = self._router.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return mail
            try:
                mail.append(Mail(source, messages.decode_to_rank(frame)))
            except (msgspec.DecodeError, ValueError, RecursionError) as error:
                self.num_bad_frames += 1
                logger.warning("dropped a frame of %d bytes: %s", len(frame), error)

    def wait(self, timeout_s: float | None = None) -> list[Mail]:
        """Blocks until there is mail (or the time is up: then an empty list); uses no CPU."""
        self._router.poll(None if timeout_s is None else int(timeout_s * 1000))
        return self.drain()

    def send(self, target: bytes, message: messages.FromRank) -> None:
        """Sends to one HTTP process; a target that is gone is ignored."""
        self._router.send_multipart([target, messages.encode(message)])

    def wake_peers(self, step: int) -> None:
        """Tells every other rank that this one enters ``step``."""
        frame = messages.encode(messages.Wake(step))
        for peer in self._peers:
            peer.send(frame)

    def close(self) -> None:
        """Closes all sockets; what is unsent is dropped."""
        if self._authenticator is not None:
            self._authenticator.stop()
        self._context.destroy(linger=0)
