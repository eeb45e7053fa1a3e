"""Questions to ranks that are not requests: who was asked what, and what came back."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable, Sequence

from moeserve.api.errors import ApiError
from moeserve.messages import Answer, Command, Query

_TIMEOUT_S = 5.0


class _Open:
    """A question and the answers so far."""

    def __init__(self, ranks: Sequence[int]) -> None:
        self.missing = set(ranks)
        self.bodies: dict[int, bytes] = {}
        self.done: asyncio.Future[None] = asyncio.get_running_loop().create_future()


class Queries:
    """Open questions.

    Args:
        send: sends a query to a rank.
    """

    def __init__(self, send: Callable[[int, Query | Command], None]) -> None:
        self._send = send
        self._ids = itertools.count()
        self._open: dict[int, _Open] = {}

    async def ask(
        self, ranks: Sequence[int], question_of: Callable[[int], Query | Command]
    ) -> list[bytes]:
        """The ranks' JSON answers, in the order of ``ranks``.

        Args:
            question_of: makes the message of the id that its answer will have.

        Raises:
            ApiError: 400, a rank refuses, the text says why; 503, a rank does not answer; or what
                ``fail`` was called with.
        """
        query_id = next(self._ids)
        question = self._open[query_id] = _Open(ranks)
        try:
            for rank in ranks:
                self._send(rank, question_of(query_id))
            await asyncio.wait_for(question.done, _TIMEOUT_S)
        except TimeoutError as error:
            raise ApiError(503, "a rank does not answer", retry_after=5) from error
        finally:
            del self._open[query_id]
        return [question.bodies[rank] for rank in ranks]

    def answer(self, answer: Answer) -> None:
        """Takes an answer; one that comes too late is ignored."""
        question = self._open.get(answer.query_id)
        if question is None:
            return
        if answer.error is not None:
            if not question.done.done():
                question.done.set_exception(ApiError(400, answer.error))
            return
        question.bodies[answer.rank] = answer.body
        question.missing.discard(answer.rank)
        if not question.missing and not question.done.done():
            question.done.set_result(None)

    def fail(self, failure: Exception) -> None:
        """Ends all open questions."""
        for question in self._open.values():
            if not question.done.done():
                question.done.set_exception(failure)
