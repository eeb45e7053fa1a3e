"""A plain, blocking client of the ranks, for offline inference and the terminal."""

from __future__ import annotations

import itertools
import os
from collections.abc import Sequence
from typing import Any, Literal, TypeVar

import msgspec
import zmq

from moeserve import messages

# A rank that has said it is ready answers within a step; a step is bounded by the batch size.
ANSWER_TIMEOUT_S = 120.0

M = TypeVar("M", messages.RankInfo, messages.Answer)


class RankClient:
    """Talks to all ranks of an instance that is ready.

    Raises:
        RuntimeError: a rank does not answer, or speaks another protocol version.
    """

    def __init__(self, endpoints: Sequence[str]) -> None:
        self._context = zmq.Context()
        self._poller = zmq.Poller()
        self._sockets: list[zmq.Socket[bytes]] = []
        self._query_ids = itertools.count()
        for endpoint in endpoints:
            socket = self._context.socket(zmq.DEALER)
            socket.setsockopt(zmq.IDENTITY, f"llm-{os.getpid()}-{id(self)}".encode())
            socket.setsockopt(zmq.LINGER, 0)
            socket.setsockopt(zmq.RCVHWM, 0)
            socket.connect(endpoint)
            socket.send(messages.encode(messages.Hello()))
            self._poller.register(socket, zmq.POLLIN)
            self._sockets.append(socket)
        answers = self._collect(messages.RankInfo)
        self.infos: list[messages.RankInfo] = [answers[r] for r in range(len(endpoints))]
        if any(info.protocol != messages.PROTOCOL for info in self.infos):
            raise RuntimeError(f"a rank does not speak protocol {messages.PROTOCOL}")

    def send(self, rank: int, message: messages.ToRank) -> None:
        """Sends to one rank."""
        self._sockets[rank].send(messages.encode(message))

    def receive(self, timeout_s: float) -> list[tuple[int, messages.FromRank]]:
        """What the ranks have sent, with the sender's rank; empty when the time is up."""
        received: list[tuple[int, messages.FromRank]] = []
        ready = dict(self._poller.poll(int(timeout_s * 1000)))
        for rank, socket in enumerate(self._sockets):
            while socket in ready:
                try:
                    frame = socket.recv(zmq.NOBLOCK)
                except zmq.Again:
                    break
                received.append((rank, messages.decode_from_rank(frame)))
        return received

    def query(self, what: Literal["placement", "load", "check"]) -> list[Any]:
        """Every rank's answer, by rank. Only for when no request is in flight."""
        query_id = next(self._query_ids)
        for rank in range(len(self._sockets)):
            self.send(rank, messages.Query(query_id, what))
        answers = self._collect(messages.Answer)
        return [msgspec.json.decode(answers[r].body) for r in range(len(self._sockets))]

    def command(self, what: str, body: object) -> Any:
        """Rank 0's answer to a command; ``body`` is written as JSON. Only as ``query``.

        Raises:
            ValueError: rank 0 will not do that; the text says why.
        """
        message = messages.Command(next(self._query_ids), what, msgspec.json.encode(body))
        self.send(0, message)
        return self._ask_rank_0(message.query_id)

    def history(self) -> Any:
        """Rank 0's placement decisions, see ``Query``."""
        message = messages.Query(next(self._query_ids), "history")
        self.send(0, message)
        return self._ask_rank_0(message.query_id)

    def _ask_rank_0(self, query_id: int) -> Any:
        while received := self.receive(ANSWER_TIMEOUT_S):
            for _, message in received:
                if isinstance(message, messages.Answer) and message.query_id == query_id:
                    if message.error is not None:
                        raise ValueError(message.error)
                    return msgspec.json.decode(message.body)
        raise RuntimeError(f"rank 0: no answer within {ANSWER_TIMEOUT_S:g} s")

    def _collect(self, kind: type[M]) -> dict[int, M]:
        found: dict[int, M] = {}
        while len(found) < len(self._sockets):
            received = self.receive(ANSWER_TIMEOUT_S)
            if not received:
                silent = sorted(set(range(len(self._sockets))) - set(found))
                raise RuntimeError(f"ranks {silent}: no answer within {ANSWER_TIMEOUT_S:g} s")
            found.update((rank, m) for rank, m in received if isinstance(m, kind))
        return found

    def close(self) -> None:
        """Closes the sockets."""
        self._context.destroy(linger=0)
