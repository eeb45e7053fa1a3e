"""Ranks on two machines; the second one is a network namespace of this one.

Both ends of the only cable have addresses that exist nowhere else.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass

import httpx
import pytest
from helpers_jobs import Job, free_port, job, listeners, listening, place, serve_command

from moeserve import config
from moeserve.launch.gang import checked
from moeserve.launch.interfaces import interface_address

# A network for each test run, as two may run at a time.
HERE, THERE = (f"10.77.{os.getpid() % 256}.{host}" for host in (1, 2))


@dataclass(frozen=True)
class Hosts:
    """A cable: the name of its interface on this machine, and on the one that ``name`` enters."""

    name: str
    here: str
    there: str

    def command(self, command: list[str]) -> list[str]:
        """The command as it is run on the second machine."""
        return ["ip", "netns", "exec", self.name, *command]


def ip(*arguments: str) -> None:
    """Runs iproute2's ip."""
    subprocess.run(["ip", *arguments], check=True, capture_output=True, text=True)


@pytest.fixture(scope="module")
def hosts() -> Iterator[Hosts]:
    """Two machines; skips where they can not be made."""
    if os.geteuid() != 0 or shutil.which("ip") is None:
        pytest.skip("a network namespace needs root and iproute2's ip")
    number = os.getpid()
    made = Hosts(f"moeserve-{number}", f"msa{number}", f"msb{number}")
    try:
        try:
            ip("netns", "add", made.name)
            ip("link", "add", made.here, "type", "veth", "peer", "name", made.there)
        except subprocess.CalledProcessError as error:
            pytest.skip(f"no network namespaces here: {error.stderr}")
        ip("link", "set", made.there, "netns", made.name)
        ip("addr", "add", f"{HERE}/30", "dev", made.here)
        ip("link", "set", made.here, "up")
        ip("-n", made.name, "addr", "add", f"{THERE}/30", "dev", made.there)
        ip("-n", made.name, "link", "set", made.there, "up")
        ip("-n", made.name, "link", "set", "lo", "up")
        yield made
    finally:
        for what in (("link", "del", made.here), ("netns", "del", made.name)):
            with contextlib.suppress(subprocess.CalledProcessError):
                ip(*what)


def start(running: Job, hosts: Hosts, *arguments: str) -> None:
    """One rank on each machine."""
    port = free_port()
    command = [sys.executable, "-m", *serve_command(*arguments)]
    one_each = {"LOCAL_WORLD_SIZE": "1", "LOCAL_RANK": "0"}
    running.start([*command, "--interface", hosts.here], {**place(0, 2, HERE, port), **one_each})
    running.start(
        hosts.command([*command, "--interface", hosts.there]),
        {**place(1, 2, HERE, port), **one_each},
    )


def ask(url: str) -> httpx.Response:
    """A short completion."""
    return httpx.post(f"{url}/v1/completions", json={"prompt": "Once", "max_tokens": 5}, timeout=30)


def test_two_machines_serve_and_listen_on_the_cable_only(hosts: Hosts) -> None:
    with job() as running:
        start(running, hosts)
        for _ in range(2):  # one for each rank
            assert ask(running.url).json()["usage"]["completion_tokens"] == 5
        here = {address for address, _ in listeners([running.rank(0), running.http()])}
        assert here == {HERE, "127.0.0.1"}  # 127.0.0.1: HTTP
        assert listening(running.rank(1)) == {THERE}
        running.stop()
        assert running.wait() == [0, 0], running.text


def test_a_death_on_the_other_machine_ends_the_job(hosts: Hosts) -> None:
    with job() as running:
        start(running, hosts)
        assert ask(running.url).status_code == 200
        running.rank(1).kill()
        assert 0 not in running.wait(20), running.text
        assert f"rank 1 (tcp://{THERE}:" in running.text and "is gone" in running.text


def test_a_cable_that_breaks_ends_the_job(hosts: Hosts) -> None:
    """No connection is closed then: silence must be enough."""
    with job() as running:
        start(running, hosts, "--collective-timeout", "6")
        assert ask(running.url).status_code == 200
        ip("link", "set", hosts.here, "down")
        try:
            assert 0 not in running.wait(40), running.text
        finally:
            ip("link", "set", hosts.here, "up")


def launched(local_world_size: int, master_addr: str) -> config.LauncherRank:
    """Rank 0 of two."""
    return config.LauncherRank(
        rank=0,
        world_size=2,
        local_rank=0,
        local_world_size=local_world_size,
        master_addr=master_addr,
        master_port=29500,
    )


def test_loopback_does_not_lead_to_another_machine() -> None:
    with pytest.raises(config.ConfigError, match=r"interface = 'lo'.*several machines"):
        checked(config.from_flat(interface="lo"), launched(1, HERE))


@pytest.mark.parametrize(("local_world_size", "master_addr"), [(2, HERE), (1, "127.0.0.1")])
def test_loopback_leads_to_this_machine(local_world_size: int, master_addr: str) -> None:
    settings = checked(config.from_flat(interface="lo"), launched(local_world_size, master_addr))
    assert settings.parallel.ep == 2


def test_several_http_processes_are_refused_under_a_launcher() -> None:
    with pytest.raises(config.ConfigError, match="api_server_count = 2"):
        checked(config.from_flat(api_server_count=2), launched(2, "127.0.0.1"))


def test_an_interface_has_its_address_and_a_wrong_one_is_named() -> None:
    assert interface_address("lo") == "127.0.0.1"
    with pytest.raises(config.ConfigError, match=r"interface = 'eth99'.*lo \(127\.0\.0\.1\)"):
        interface_address("eth99")
