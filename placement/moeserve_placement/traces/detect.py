"""Opening any trace or placement by its content, and the list of formats known."""

from __future__ import annotations

import re
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from moeserve_placement.placement import FORMAT as PLACEMENT_FORMAT
from moeserve_placement.placement import Placement
from moeserve_placement.text_files import open_regular
from moeserve_placement.traces.esft import is_esft, read_esft, write_esft
from moeserve_placement.traces.files import (
    MAX_BYTES,
    parse_json,
    read_text,
    reading,
    write_text,
)
from moeserve_placement.traces.format import read_trace, write_trace
from moeserve_placement.traces.json_form import is_trace_document
from moeserve_placement.traces.omni import is_pattern, omni_placement, read_omni, write_omni
from moeserve_placement.traces.options import ReadOptions
from moeserve_placement.traces.placement_npz import is_placement, load_npz, save_npz
from moeserve_placement.traces.raw import ids_trace, is_raw, read_raw
from moeserve_placement.traces.safe_npz import SafeNpz, read_npy
from moeserve_placement.traces.sglang import read_sglang, write_sglang
from moeserve_placement.traces.sglang_location import (
    is_location,
    read_sglang_location,
    write_sglang_location,
)
from moeserve_placement.traces.tensorrt_llm import (
    ASSIGNMENTS,
    read_tensorrt_llm,
    write_tensorrt_llm,
)
from moeserve_placement.traces.trace import Array, CountTrace, RoutingTrace, TraceError
from moeserve_placement.traces.vllm import WINDOW, counts_of, read_vllm, write_vllm

_NPY = b"\x93NUMPY"
_OURS = re.compile(r'\s*\{\s*"format"\s*:\s*"moeserve-trace"')

Data = RoutingTrace | CountTrace | Placement


@dataclass(frozen=True, slots=True, kw_only=True)
class Format:
    """One file format.

    writes: the types it can hold; empty: read only.
    suffix: of the names of its files; empty: a folder.
    """

    name: str
    suffix: str
    read: Callable[[Path, ReadOptions], Data]
    write: Callable[[Path, Any], tuple[str, ...]] | None = None
    writes: tuple[type, ...] = ()


def _read_ours(path: Path, options: ReadOptions) -> Data:
    return read_trace(path, max_bytes=options.max_bytes)


def _write_npz(path: Path, trace: RoutingTrace | CountTrace) -> tuple[str, ...]:
    write_trace(path if path.suffix == ".npz" else _refuse(path, ".npz"), trace)
    return ()


def _write_json(path: Path, trace: RoutingTrace | CountTrace) -> tuple[str, ...]:
    write_trace(path if path.suffix == ".json" else _refuse(path, ".json"), trace)
    return ()


def _refuse(path: Path, suffix: str) -> Path:
    raise TraceError(f"{path}: the name of this format must end in {suffix}")


def _read_placement(path: Path, options: ReadOptions) -> Data:
    text = read_text(path)
    with reading(path):
        return Placement.from_json(text)


def _write_placement(path: Path, placement: Placement) -> tuple[str, ...]:
    write_text(path, placement.to_json())
    return ()


def _read_placement_npz(path: Path, options: ReadOptions) -> Data:
    return load_npz(path, max_bytes=options.max_bytes)[0]


def _write_placement_npz(path: Path, placement: Placement) -> tuple[str, ...]:
    save_npz(path, placement)
    return ()


_TRACES = (RoutingTrace, CountTrace)
_ALL = (
    Format(name="npz", suffix=".npz", read=_read_ours, write=_write_npz, writes=_TRACES),
    Format(name="json", suffix=".json", read=_read_ours, write=_write_json, writes=_TRACES),
    Format(
        name="placement",
        suffix=".json",
        read=_read_placement,
        write=_write_placement,
        writes=(Placement,),
    ),
    Format(
        name="placement-npz",
        suffix=".npz",
        read=_read_placement_npz,
        write=_write_placement_npz,
        writes=(Placement,),
    ),
    Format(name="sglang", suffix=".pt", read=read_sglang, write=write_sglang, writes=_TRACES),
    Format(
        name="sglang-location",
        suffix=".json",
        read=read_sglang_location,
        write=write_sglang_location,
        writes=(Placement, CountTrace),
    ),
    Format(name="vllm", suffix=".npz", read=read_vllm, write=write_vllm, writes=(CountTrace,)),
    Format(
        name="tensorrt-llm",
        suffix=".yaml",
        read=read_tensorrt_llm,
        write=write_tensorrt_llm,
        writes=(Placement,),
    ),
    Format(name="omni", suffix=".npy", read=read_omni, write=write_omni, writes=(Placement,)),
    Format(name="esft", suffix="", read=read_esft, write=write_esft, writes=(RoutingTrace,)),
    Format(name="raw", suffix=".npz", read=read_raw),
)
FORMATS = {item.name: item for item in _ALL}
"""Name -> format."""
_ARRAY_READERS: dict[str, Callable[[Array, ReadOptions], Data]] = {
    "omni": omni_placement,
    "raw": ids_trace,
    "vllm": lambda array, options: counts_of({WINDOW: array}, options),
}


def open_trace(path: Path | str, options: ReadOptions | None = None) -> RoutingTrace | CountTrace:
    """The trace in a file or folder of any known format, found by its content.

    Raises:
        TraceError: it can not be read, is of no known format, is damaged, or is a placement.
    """
    data = open_any(path, options)
    if isinstance(data, Placement):
        raise TraceError(f"{path}: is a placement, not a trace")
    return data


def open_any(
    path: Path | str, options: ReadOptions | None = None, *, format_name: str | None = None
) -> Data:
    """The trace or placement in a file; format_name names the format instead of its content.

    Raises:
        TraceError: it can not be read, is of no known format, or is damaged.
    """
    return open_as(Path(path), options or ReadOptions(), format_name=format_name)[1]


def open_as(path: Path, options: ReadOptions, *, format_name: str | None) -> tuple[Format, Data]:
    """The format of a file and what it holds; see ``open_any``."""
    if format_name is None and _first_bytes(path).startswith(_NPY):
        # The content of a plain array tells its format: it is read once for both.
        array = read_npy(path, max_bytes=options.max_bytes)
        with reading(path):
            name = _array_format(array)
            return FORMATS[name], _ARRAY_READERS[name](array, options)
    found = get_format(format_name or detect(path, max_bytes=options.max_bytes))
    return found, found.read(path, options)


def get_format(name: str) -> Format:
    """The format of that name.

    Raises:
        TraceError: there is none.
    """
    if name not in FORMATS:
        raise TraceError(f"format = {name!r}: must be one of {', '.join(FORMATS)}")
    return FORMATS[name]


def detect(path: Path, *, max_bytes: int = MAX_BYTES) -> str:
    """The name of the format of a file or folder, from its first bytes, members or keys.

    max_bytes: limit on an array that has to be read for that (.npy).

    Raises:
        TraceError: it can not be read or is of no known format.
    """
    magic = _first_bytes(path)
    with reading(path):
        if path.is_dir():
            if is_esft(path):
                return "esft"
            raise TraceError("is a folder without expert_weights_<layer>.txt files")
        if magic.startswith(b"PK"):
            return _detect_zip(path)
        if magic.startswith(_NPY):
            return _array_format(read_npy(path, max_bytes=max_bytes))
        if magic[:1] == b"\x80":
            raise TraceError("is a Python pickle: refused")
        return _detect_text(path)


def _detect_zip(path: Path) -> str:
    with zipfile.ZipFile(path) as archive:
        if any(name.split("/")[-1] == "data.pkl" for name in archive.namelist()):
            return "sglang"
    with SafeNpz(path) as npz:
        if "header" in npz:
            return "npz"
        if is_placement(npz):
            return "placement-npz"
        if WINDOW in npz:
            return "vllm"
        if is_raw(npz):
            return "raw"
        names = ", ".join(sorted(npz.headers)[:6])
    raise TraceError(f"is an npz of no known format, with the arrays {names[:120]}")


def _first_bytes(path: Path) -> bytes:
    """The beginning of a file; nothing for a folder."""
    with reading(path):
        if path.is_dir():
            return b""
        with open_regular(path) as stream:
            return stream.read(8)


def _array_format(array: Array) -> str:
    """The format of the one array of a .npy file."""
    if array.ndim != 3:
        raise TraceError(f"is an array of shape {array.shape}: no format here has such")
    if is_pattern(array):
        try:
            omni_placement(array, ReadOptions())
        except TraceError:
            pass
        else:
            return "omni"
    if array.dtype.kind not in "iu":
        raise TraceError(f"is an array of {array.dtype}: ids and counts are integers")
    # Ids are stored in narrow types, counts in wide ones.
    return "raw" if array.dtype.itemsize <= 2 else "vllm"


def _detect_text(path: Path) -> str:
    text = read_text(path)
    if _OURS.match(text):
        return "json"  # without parsing, which is most of the work for a long trace
    if text.lstrip()[:1] in ("{", "["):
        document = parse_json(text, what="trace")
        if is_trace_document(document):
            return "json"
        if isinstance(document, dict) and document.get("format") == PLACEMENT_FORMAT:
            return "placement"
        if is_location(document):
            return "sglang-location"
        raise TraceError("is JSON of no known format")
    if ASSIGNMENTS in text:
        return "tensorrt-llm"
    raise TraceError("is of no known format")
