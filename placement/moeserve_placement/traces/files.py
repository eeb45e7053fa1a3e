"""Reading and writing files whose content nobody vouches for: sizes first, one clear error."""

from __future__ import annotations

import json
import os
import struct
import zipfile
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from moeserve_placement.placement import PlacementError
from moeserve_placement.traces.trace import TraceError

MAX_BYTES = 2 << 30
"""Bytes that the arrays of one file may hold in memory, unless the caller allows more."""
MAX_TEXT_BYTES = 256 << 20
"""Bytes of a text file (JSON, YAML, tab-separated)."""

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
    except (TraceError, PlacementError) as error:
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
    """The UTF-8 text of a file.

    Raises:
        TraceError: it can not be read, is not UTF-8, or is longer than max_bytes.
    """
    with reading(path):
        size = path.stat().st_size
        if size > max_bytes:
            raise TraceError(f"has {size:,} bytes, text files may have {max_bytes:,}")
        return path.read_text(encoding="utf-8")


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
        return json.loads(text, object_pairs_hook=_unique_keys, parse_constant=_no_constant)
    except TraceError:
        raise
    except (ValueError, RecursionError) as error:
        raise TraceError(f"{what}: not valid JSON: {one_line(error)}") from error


def one_line(error: BaseException) -> str:
    """The message of an error as one short line; its type where it has no message."""
    return " ".join(str(error).split())[:200] or type(error).__name__


def _unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        seen: set[str] = set()
        for key, _ in pairs:
            if key in seen:
                raise TraceError(f"JSON: key {key[:40]!r} comes twice")
            seen.add(key)
    return found


def _no_constant(name: str) -> Any:
    raise TraceError(f"JSON: {name} is not a finite number")
