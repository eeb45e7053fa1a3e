"""Reading and writing files whose content nobody vouches for: sizes first, one clear error."""

from __future__ import annotations

import os
import struct
import zipfile
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from moeserve_placement import text_files
from moeserve_placement.placement import PlacementError
from moeserve_placement.text_files import MAX_TEXT_BYTES, FileError, one_line
from moeserve_placement.traces.trace import TraceError

MAX_BYTES = 2 << 30
"""Bytes that the arrays of one file may hold in memory, unless the caller allows more."""

DAMAGE = (
    EOFError,
    LookupError,
    MemoryError,
    NotImplementedError,
    OSError,
    OverflowError,
    RecursionError,
    RuntimeError,
    TypeError,
    ValueError,
    struct.error,
    zipfile.BadZipFile,
    zlib.error,
)
"""What zipfile, zlib, numpy and json raise for damaged input."""


@contextmanager
def reading(path: Path) -> Iterator[None]:
    """Turns whatever goes wrong inside into a TraceError of one line that starts with the path."""
    try:
        yield
    except (TraceError, PlacementError, FileError) as error:
        if str(error).startswith(f"{path}:"):
            raise
        raise TraceError(f"{path}: {error}") from error
    except (FileNotFoundError, IsADirectoryError, NotADirectoryError, PermissionError) as error:
        raise TraceError(f"{path}: {error.strerror}") from error
    except DAMAGE as error:
        raise TraceError(
            f"{path}: can not be read, damaged or not such a file: {one_line(error)}"
        ) from error


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """A path beside ``path`` to write to; it takes the place of ``path`` once all went well."""
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
    try:
        yield partial
        partial.replace(path)
    except OSError as error:
        raise TraceError(f"{path}: can not be written: {error.strerror or error}") from error
    finally:
        partial.unlink(missing_ok=True)


def read_text(path: Path, *, max_bytes: int = MAX_TEXT_BYTES) -> str:
    """The UTF-8 text of a regular file.

    Raises:
        TraceError: it can not be read, is not UTF-8, or is longer than max_bytes.
    """
    with reading(path):
        return text_files.read_text(path, max_bytes=max_bytes)


def write_text(path: Path, text: str) -> None:
    """Writes UTF-8 text, whole or not at all."""
    with replacing(path) as partial:
        partial.write_text(text, encoding="utf-8")


def parse_json(text: str, *, what: str) -> Any:
    """``json.loads`` that takes no NaN or infinity and no key twice.

    Raises:
        TraceError: not such a JSON text.
    """
    try:
        return text_files.parse_json(text, what=what)
    except FileError as error:
        raise TraceError(str(error)) from error


__all__ = [
    "DAMAGE",
    "MAX_BYTES",
    "one_line",
    "parse_json",
    "read_text",
    "reading",
    "replacing",
    "write_text",
]
