"""A server with two ranks, shared by the tests of a module."""

from __future__ import annotations

from collections.abc import Iterator

import httpx
import pytest
from helpers_server import Server, serving


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    """One server with two ranks for all tests of a module."""
    with serving("--ep", "2") as running:
        yield running


@pytest.fixture
def client(server: Server) -> Iterator[httpx.Client]:
    """HTTP client of the module's server."""
    with httpx.Client(base_url=server.url, timeout=60) as http:
        yield http
