"""Worlds of ranks that are threads of this process: real gloo groups, no process start-up."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from typing import TypeVar

import pytest
import torch
import torch.distributed as dist

from moeserve.parallel.groups import ParallelGroups

T = TypeVar("T")


class World:
    """``size`` connected ranks; ``run`` executes a function on all of them at once."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._pool = ThreadPoolExecutor(size)
        self.groups = self._connect()

    def run(self, function: Callable[[ParallelGroups], T]) -> list[T]:
        """The function's results by rank; or the error that was first, and a new world for later.

        A rank with an error leaves at once, so that the others do not wait for it.
        """
        errors: list[BaseException] = []

        def run_rank(groups: ParallelGroups) -> T:
            try:
                return function(groups)
            except BaseException as error:
                errors.append(error)
                groups.close()
                raise

        futures = [self._pool.submit(run_rank, groups) for groups in self.groups]
        wait(futures)
        if errors:
            self.groups = self._connect()
            raise errors[0]
        return [future.result() for future in futures]

    def close(self) -> None:
        """Closes all ranks."""
        for groups in self.groups:
            groups.close()
        self._pool.shutdown()

    def _connect(self) -> list[ParallelGroups]:
        store = dist.HashStore()

        def connect(rank: int) -> ParallelGroups:
            return ParallelGroups.create(rank, self.size, store, 20.0)

        return list(self._pool.map(connect, range(self.size)))


@pytest.fixture(scope="session", autouse=True)
def one_thread() -> None:
    """The machine's cores are shared; tensors here are tiny."""
    torch.set_num_threads(1)


@pytest.fixture(scope="session", params=[2, 3, 4])
def world(request: pytest.FixtureRequest) -> Iterator[World]:
    """Worlds of 2, 3 and 4 ranks, one after the other."""
    made = World(request.param)
    yield made
    made.close()


@pytest.fixture
def make_world() -> Iterator[Callable[[int], World]]:
    """Makes worlds that one test may break."""
    made: list[World] = []

    def make(size: int) -> World:
        made.append(World(size))
        return made[-1]

    yield make
    for each in made:
        each.close()
