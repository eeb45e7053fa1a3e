"""Files whose content nobody vouches for: opened, read and parsed within limits. Plain Python."""

from __future__ import annotations

import errno
import json
import os
import stat
from pathlib import Path
from typing import Any, BinaryIO

MAX_TEXT_BYTES = 256 << 20
"""Bytes of a text file (JSON, YAML, tab-separated)."""


class FileError(ValueError):
    """A file is not what it should be. One line, without the name of the file."""


def open_regular(path: Path) -> BinaryIO:
    """A regular file, open for reading: a device may never end, a pipe may never begin.

    Raises:
        FileError: it is something else.
        OSError: it is a folder, or can not be opened.
    """
    # Opened without O_NONBLOCK, a pipe would wait for a writer before it can be told from a file.
    flags = os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0)
    descriptor = os.open(path, flags)
    try:
        mode = os.fstat(descriptor).st_mode
        if stat.S_ISDIR(mode):
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
        if not stat.S_ISREG(mode):
            raise FileError("is not a regular file")
        return os.fdopen(descriptor, "rb")
    except BaseException:
        os.close(descriptor)
        raise


def read_text(path: Path, *, max_bytes: int = MAX_TEXT_BYTES) -> str:
    """The UTF-8 text of a regular file.

    Raises:
        FileError: not a regular file, or longer than max_bytes.
        OSError: it can not be read.
        UnicodeDecodeError: it is not UTF-8.
    """
    with open_regular(path) as stream:
        size = os.fstat(stream.fileno()).st_size
        # Files of some file systems have more than they say.
        data = stream.read(max_bytes + 1) if size <= max_bytes else b""
    if max(size, len(data)) > max_bytes:
        raise FileError(f"has {max(size, len(data)):,} bytes, text files may have {max_bytes:,}")
    return data.decode("utf-8")


def parse_json(text: str, *, what: str) -> Any:
    """``json.loads`` that takes no NaN or infinity and no key twice.

    Raises:
        FileError: not such a JSON text.
    """
    try:
        return json.loads(text, object_pairs_hook=_unique_keys, parse_constant=_no_constant)
    except FileError:
        raise
    except (ValueError, RecursionError) as error:
        raise FileError(f"{what}: not valid JSON: {one_line(error)}") from error


def one_line(error: BaseException) -> str:
    """The message of an error as one short line; its type where it has no message."""
    return " ".join(str(error).split())[:200] or type(error).__name__


def _unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        seen: set[str] = set()
        for key, _ in pairs:
            if key in seen:
                raise FileError(f"JSON: key {key[:40]!r} comes twice")
            seen.add(key)
    return found


def _no_constant(name: str) -> Any:
    raise FileError(f"JSON: {name} is not a finite number")
