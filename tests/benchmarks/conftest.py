"""Puts this folder's helper on the import path (tests are no package)."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest

FAKE_SERVER = Path(__file__).parent / "fake_server.py"


@pytest.fixture(scope="session")
def fake() -> ModuleType:
    """The module fake_server."""
    spec = importlib.util.spec_from_file_location("fake_server", FAKE_SERVER)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
