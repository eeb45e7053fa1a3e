"""npz and npy files, read without trust: headers and declared sizes first, then in chunks.

``numpy.load`` is not used: it would unpickle where allowed, read a whole member at once and believe
its declared size. Here an array is read only after its header says that it holds plain numbers or
text, that its size fits the limit, and that this is also the size the archive declares.
"""

from __future__ import annotations

import math
import os
import re
import zipfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import IO, Any

import numpy as np

from moeserve_placement.text_files import open_regular
from moeserve_placement.traces.files import MAX_BYTES, reading, replacing
from moeserve_placement.traces.trace import Array, TraceError

_MAX_MEMBERS = 4096
_CHUNK_BYTES = 1 << 20

_FIELD = re.compile(r"'(descr|fortran_order|shape)'\s*:\s*('[^']*'|True|False|\([0-9,\s]*\))")
_HEADER = re.compile(rf"\{{(?:\s*{_FIELD.pattern}\s*,?){{3}}\s*\}}\s*")
_DESCR = re.compile(r"[<>|=]?([biuf][1-9]?|U[0-9]{1,9})")


@dataclass(frozen=True, slots=True, kw_only=True)
class ArrayHeader:
    """What a .npy header declares about its array."""

    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    is_fortran: bool

    @property
    def num_bytes(self) -> int:
        """Bytes of the array's data."""
        return math.prod(self.shape) * self.dtype.itemsize


class SafeNpz:
    """An open npz file: names and headers are known and checked, data is read on demand.

    Use as a context manager. ``headers`` maps an array's name (without .npy) to its header.

    Raises:
        TraceError: not a zip file of .npy members; a member comes twice, is compressed in a way
            other than deflate, holds objects, or declares another size than its header.
    """

    def __init__(self, path: Path, *, max_bytes: int = MAX_BYTES) -> None:
        self.path = path
        self._max_bytes = max_bytes
        with reading(path):
            self._file = open_regular(path)
        try:
            with reading(path):
                self._zip = zipfile.ZipFile(self._file)
                self.headers = self._read_headers()
        except BaseException:
            self._file.close()
            raise

    def __enter__(self) -> SafeNpz:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._zip.close()
        self._file.close()

    def __contains__(self, name: str) -> bool:
        return name in self.headers

    def _read_headers(self) -> dict[str, ArrayHeader]:
        members = self._zip.infolist()
        if len(members) > _MAX_MEMBERS:
            raise TraceError(f"has {len(members)} members, npz files may have {_MAX_MEMBERS}")
        headers: dict[str, ArrayHeader] = {}
        for member in members:
            name = member.filename.removesuffix(".npy")
            if name == member.filename:
                raise TraceError(f"member {name[:60]!r} is not a .npy array")
            if name in headers:
                raise TraceError(f"array {name[:60]!r} comes twice")
            if member.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
                raise TraceError(f"array {name[:60]!r} is neither stored nor deflated")
            with self._zip.open(member) as stream:
                headers[name] = read_header(stream, name, file_size=member.file_size)
        return headers

    def read(self, name: str) -> Array:
        """The whole array, C-contiguous and in native byte order.

        Raises:
            TraceError: no such array, larger than max_bytes, or damaged.
        """
        with reading(self.path):
            header = self._header(name)
            if header.num_bytes > self._max_bytes:
                raise TraceError(
                    f"array {name!r} declares {header.num_bytes:,} bytes, more than the limit of "
                    f"{self._max_bytes:,} (max_bytes)"
                )
            with self._open(name) as stream:
                return _finish(_read_exactly(stream, header.num_bytes, name), header, stream)

    def blocks(self, name: str, rows: int) -> Iterator[Array]:
        """The array in blocks of ``rows`` of its first axis (the last may be shorter), in order.

        Never holds more than one block and a chunk of the decompressor.

        Raises:
            TraceError: no such array, no rows, stored in Fortran order, or damaged.
        """
        header = self._header(name)
        with reading(self.path):
            if header.is_fortran or not header.shape:
                raise TraceError(f"array {name!r}: can not be streamed, save it in C order")
            stream = self._open(name)
        row_bytes = math.prod(header.shape[1:]) * header.dtype.itemsize
        with stream:
            for start in range(0, header.shape[0], rows):
                count = min(rows, header.shape[0] - start)
                with reading(self.path):
                    data = _read_exactly(stream, count * row_bytes, name)
                    block = data.view(header.dtype).reshape(count, *header.shape[1:])
                    if start + count == header.shape[0]:
                        _check_end(stream)
                yield _native(block)

    def _header(self, name: str) -> ArrayHeader:
        if name not in self.headers:
            raise TraceError(f"{self.path}: array {name!r} is missing")
        return self.headers[name]

    def _open(self, name: str) -> IO[bytes]:
        stream = self._zip.open(f"{name}.npy")
        read_header(stream, name, file_size=self._zip.getinfo(f"{name}.npy").file_size)
        return stream


def read_npy(path: Path, *, max_bytes: int = MAX_BYTES) -> Array:
    """The array of a .npy file, under the same rules as ``SafeNpz``.

    Raises:
        TraceError: damaged, larger than max_bytes, or holding objects.
    """
    with reading(path), open_regular(path) as stream:
        header = read_header(stream, path.name, file_size=os.fstat(stream.fileno()).st_size)
        if header.num_bytes > max_bytes:
            raise TraceError(f"has {header.num_bytes:,} bytes, more than {max_bytes:,} (max_bytes)")
        return _finish(_read_exactly(stream, header.num_bytes, path.name), header, stream)


def read_header(stream: IO[bytes], name: str, *, file_size: int) -> ArrayHeader:
    """Reads a .npy header; the stream then stands at the data.

    file_size: bytes of the whole member, as declared by the archive or the file system.

    Raises:
        TraceError: objects or records in place of numbers or text, or sizes that do not agree.
        ValueError: not a .npy header.
    """
    version = np.lib.format.read_magic(stream)
    if version != (1, 0):
        # Version 2 and 3 allow headers of gigabytes; no array of numbers needs one.
        raise TraceError(f"array {name[:60]!r}: .npy version {version}, must be (1, 0)")
    length = int.from_bytes(stream.read(2), "little")
    header = _parse_header(stream.read(length).decode("latin-1"), name)
    data_bytes = file_size - len(np.lib.format.magic(1, 0)) - 2 - length
    if header.num_bytes != data_bytes:
        raise TraceError(
            f"array {name[:60]!r}: shape {header.shape} of {header.dtype} needs "
            f"{header.num_bytes:,} bytes, but {data_bytes:,} are there"
        )
    return header


def write_npz(path: Path, arrays: Mapping[str, Array]) -> None:
    """Writes a compressed npz, whole or not at all; equal arrays give equal bytes.

    Raises:
        TraceError: the file can not be written.
        ValueError: an array holds objects.
    """
    with replacing(path) as partial, zipfile.ZipFile(partial, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, array in arrays.items():
            with archive.open(f"{name}.npy", "w", force_zip64=True) as stream:
                contiguous = np.asarray(array, order="C")  # a single number stays one
                np.lib.format.write_array(stream, contiguous, version=(1, 0), allow_pickle=False)


def write_npy(path: Path, array: Array) -> None:
    """Writes a .npy file, whole or not at all."""
    with replacing(path) as partial, partial.open("wb") as stream:
        np.lib.format.write_array(stream, np.asarray(array, order="C"), allow_pickle=False)


def _parse_header(text: str, name: str) -> ArrayHeader:
    # A pattern in place of numpy's parser, which evaluates the text as Python.
    fields = dict(_FIELD.findall(text)) if _HEADER.fullmatch(text) else {}
    if set(fields) != {"descr", "fortran_order", "shape"}:
        raise TraceError(f"array {name[:60]!r}: its header is not that of numbers or text")
    descr = fields["descr"].strip("'")
    if descr.endswith("O"):
        raise TraceError(f"array {name[:60]!r} holds pickled objects: refused")
    dtype = np.dtype(descr) if _DESCR.fullmatch(descr) else None
    if dtype is None or (dtype.kind != "U" and dtype.itemsize > 8):
        raise TraceError(f"array {name[:60]!r}: dtype {descr!r} is neither numbers nor text")
    shape = tuple(int(length) for length in re.findall(r"\d+", fields["shape"]))
    is_fortran = fields["fortran_order"] == "True"
    return ArrayHeader(dtype=dtype, shape=shape, is_fortran=is_fortran)


def _read_exactly(stream: IO[bytes], num_bytes: int, name: str) -> Array:
    data = bytearray(num_bytes)
    view, done = memoryview(data), 0
    while done < num_bytes:
        # In chunks: one read of a zip member would hold its whole output twice.
        chunk = stream.read(min(_CHUNK_BYTES, num_bytes - done))
        if not chunk:
            raise TraceError(f"array {name[:60]!r}: ends after {done:,} of {num_bytes:,} bytes")
        view[done : done + len(chunk)] = chunk
        done += len(chunk)
    return np.frombuffer(data, dtype=np.uint8)


def _finish(data: Array, header: ArrayHeader, stream: IO[bytes]) -> Array:
    _check_end(stream)
    array = data.view(header.dtype)
    if header.is_fortran:
        return _native(np.ascontiguousarray(array.reshape(header.shape[::-1]).T))
    return _native(array.reshape(header.shape))


def _check_end(stream: IO[bytes]) -> None:
    # Reading up to the end is also what makes zipfile compare the checksum.
    if stream.read(1):
        raise TraceError("an array holds more bytes than its header declares")


def _native(array: Array) -> Array:
    return array.astype(array.dtype.newbyteorder("="), copy=False)
