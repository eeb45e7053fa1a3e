"""Groups: stores, collectives, and what happens when a peer is gone."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
import torch.distributed as dist

from moeserve.parallel.groups import ParallelGroups, file_store, tcp_store

ROOT = Path(__file__).parents[2]
MakeWorld = Callable[[int], Any]
StartPeers = Callable[[int, float], list[subprocess.Popen[str]]]


def test_all_gather_stacks_uneven_rows_in_rank_order(world: Any) -> None:
    """Rank r brings r rows."""
    counts = list(range(world.size))

    def gather(groups: ParallelGroups) -> torch.Tensor:
        return groups.all_gather(torch.full((groups.rank, 2), float(groups.rank)), counts)

    wanted = torch.cat([torch.full((rank, 2), float(rank)) for rank in counts])
    assert all(torch.equal(result, wanted) for result in world.run(gather))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.uint8])
def test_all_to_all_delivers_uneven_slices(world: Any, dtype: torch.dtype) -> None:
    """Rank r sends (r + 2 * peer) % 3 rows to each peer, some of them none."""
    size = world.size

    def count(source: int, target: int) -> int:
        return (source + 2 * target) % 3

    def exchange(groups: ParallelGroups) -> torch.Tensor:
        sent = [count(groups.rank, peer) for peer in range(size)]
        received = [count(peer, groups.rank) for peer in range(size)]
        rows = torch.full((sum(sent), 3), groups.rank).to(dtype)
        return groups.all_to_all(rows, sent, received)

    for rank, result in enumerate(world.run(exchange)):
        sources = [peer for peer in range(size) for _ in range(count(peer, rank))]
        assert result[:, 0].tolist() == sources
        assert result.dtype == dtype


def test_a_peer_that_leaves_is_an_error_at_once_and_close_returns(
    make_world: MakeWorld,
) -> None:
    """The others wait in a collective when it leaves."""
    world = make_world(3)

    def step(groups: ParallelGroups) -> float:
        started = time.monotonic()
        if groups.rank == 1:
            groups.close()
        else:
            with pytest.raises(RuntimeError, match="lost a peer"):
                groups.all_gather(torch.zeros(1), [1, 1, 1])
            groups.close()
        return time.monotonic() - started

    assert max(world.run(step)) < 5


def test_a_closed_group_is_an_error_not_a_wait(make_world: MakeWorld) -> None:
    """Closing twice is fine."""
    groups = make_world(2).groups[0]
    groups.close()
    groups.close()
    with pytest.raises(RuntimeError, match="closed"):
        groups.all_gather(torch.zeros(1), [1, 1])


def test_leaving_right_after_the_last_collective_loses_nothing(
    make_world: MakeWorld,
) -> None:
    """Ranks stop together after an agreement: who is quick must not cut off who is slow."""

    def last_step(groups: ParallelGroups) -> list[float]:
        time.sleep(0.02 * groups.rank)
        gathered = groups.all_gather(torch.full((1,), float(groups.rank)), [1, 1, 1])
        groups.close()
        return list(gathered.tolist())

    for _ in range(10):
        assert make_world(3).run(last_step) == [[0.0, 1.0, 2.0]] * 3


def test_survivors_meet_again_at_the_same_store_in_the_next_epoch() -> None:
    """Two of three ranks form a new world after the third is gone."""
    store = dist.HashStore()
    with ThreadPoolExecutor(3) as pool:

        def meet(rank: int, size: int, epoch: int) -> ParallelGroups:
            return ParallelGroups.create(rank, size, store, 10.0, epoch=epoch)

        first = list(pool.map(lambda rank: meet(rank, 3, 0), range(3)))
        for groups in first:
            groups.close()
        second = list(pool.map(lambda rank: meet(rank, 2, 1), range(2)))
        rows = list(pool.map(lambda g: g.all_gather(torch.ones(1), [1, 1]).tolist(), second))
        assert rows == [[1.0, 1.0]] * 2
        for groups in second:
            groups.close()


def test_a_rank_that_never_arrives_is_an_error() -> None:
    """After the timeout, not never."""
    with pytest.raises(RuntimeError):
        ParallelGroups.create(0, 2, dist.HashStore(), 0.5)


def test_wrong_arguments_are_named() -> None:
    """Rank, store, interface."""
    with pytest.raises(ValueError, match="rank = 2"):
        ParallelGroups(2, 2)
    with pytest.raises(ValueError, match="store"):
        ParallelGroups.create(0, 2, None, 1.0)
    with pytest.raises(RuntimeError):
        ParallelGroups.create(0, 2, dist.HashStore(), 1.0, interface="no-such-interface")


def test_the_group_listens_on_its_interface_only(make_world: MakeWorld) -> None:
    """The default is the loopback."""
    make_world(2)
    listening = [
        connection.laddr.ip
        for connection in psutil.Process().net_connections("tcp")
        if connection.status == psutil.CONN_LISTEN
    ]
    assert listening
    assert set(listening) <= {"127.0.0.1", "::1"}


def test_the_file_store_is_for_this_user_only(tmp_path: Path) -> None:
    """Its directory is made with mode 0700; one that others may enter is refused."""
    path = tmp_path / "run" / "store"
    file_store(path, 1).set("key", "value")
    assert path.parent.stat().st_mode & 0o777 == 0o700
    path.parent.chmod(0o755)
    with pytest.raises(ValueError, match="mode is 0755, must be 0700"):
        file_store(path, 1)


@pytest.mark.parametrize("is_served", [False, True], ids=["rank 0 serves", "the launcher serves"])
def test_ranks_of_a_launcher_meet_at_its_address(is_served: bool) -> None:
    """Rank 0 serves, on the loopback alone, unless somebody does already."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    server = dist.TCPStore("127.0.0.1", port, None, True, wait_for_workers=False)
    if not is_served:
        del server
    with ThreadPoolExecutor(2) as pool:
        stores = list(pool.map(lambda rank: tcp_store("127.0.0.1", port, rank, 2, 10.0), range(2)))
        if not is_served:
            assert [
                connection.laddr.ip
                for connection in psutil.Process().net_connections("tcp")
                if connection.laddr.port == port and connection.status == psutil.CONN_LISTEN
            ] == ["127.0.0.1"]
        worlds = list(
            pool.map(lambda rank: ParallelGroups.create(rank, 2, stores[rank], 10.0), range(2))
        )
        rows = list(pool.map(lambda g: g.all_gather(torch.ones(1), [1, 1]).tolist(), worlds))
    assert rows == [[1.0, 1.0]] * 2


@pytest.fixture
def start_peers(tmp_path: Path) -> Iterator[StartPeers]:
    """Starts ranks as processes and waits until all step; none outlives the test."""
    started: list[subprocess.Popen[str]] = []

    def start(world_size: int, timeout: float) -> list[subprocess.Popen[str]]:
        search = [str(ROOT), str(ROOT / "kernels"), str(ROOT / "placement")]
        for rank in range(world_size):
            arguments = [str(tmp_path / "run" / "store"), rank, world_size, timeout]
            started.append(
                subprocess.Popen(
                    [
                        sys.executable,
                        str(Path(__file__).with_name("peer.py")),
                        *map(str, arguments),
                    ],
                    env={
                        **os.environ,
                        "PYTHONPATH": os.pathsep.join(search),
                        "OMP_NUM_THREADS": "1",
                    },
                    stdout=subprocess.PIPE,
                    text=True,
                )
            )
        assert [read(peer) for peer in started] == [["ready"]] * world_size
        return started

    yield start
    for peer in started:
        peer.kill()
        peer.wait()


def read(peer: subprocess.Popen[str]) -> list[str]:
    """The words of the next line that a peer prints."""
    assert peer.stdout is not None
    return peer.stdout.readline().split()


def test_a_killed_process_is_an_error_at_once_and_the_others_close(start_peers: StartPeers) -> None:
    """Far sooner than the timeout of a minute."""
    victim, *survivors = start_peers(3, 60.0)
    victim.kill()
    for peer in survivors:
        word, seconds, *_ = read(peer)
        assert (word, float(seconds) < 5) == ("error", True)
        word, seconds = read(peer)
        assert (word, float(seconds) < 5) == ("closed", True)
        assert peer.wait(timeout=10) == 0


def test_a_stopped_process_is_an_error_after_the_timeout_and_the_other_closes(
    start_peers: StartPeers,
) -> None:
    """It is silent, not gone: nobody tells the other but the clock."""
    victim, peer = start_peers(2, 2.0)
    victim.send_signal(signal.SIGSTOP)
    word, seconds, *_ = read(peer)
    assert word == "error"
    assert 1.0 < float(seconds) < 8.0
    word, seconds = read(peer)
    assert (word, float(seconds) < 5) == ("closed", True)
    assert peer.wait(timeout=10) == 0
