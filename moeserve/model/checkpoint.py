"""Reading safetensors: one file or shards with an index, any part of a tensor by plain reads.

Not memory-mapped: a file that is cut short while it is read is an error here, not a dead process.
Nothing a file says is trusted: names must stay inside the folder, offsets inside the file.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
_MAX_HEADER_BYTES = 100 << 20  # the limit of the safetensors library
_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
}


class CheckpointError(ValueError):
    """A checkpoint can not be read or does not fit its config. The text names file and tensor."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TensorEntry:
    """Where a tensor is: ``num_bytes`` at ``offset`` of ``path``, and what it is."""

    path: Path
    offset: int
    num_bytes: int
    shape: tuple[int, ...]
    dtype: torch.dtype


def open_checkpoint(folder: Path) -> dict[str, TensorEntry]:
    """All tensors of the checkpoint in ``folder`` by name; only headers are read.

    Raises:
        CheckpointError: no safetensors there, a file is missing, cut short or malformed, or a shard
            lacks a tensor that the index puts there.
    """
    if not (folder / INDEX_FILE).exists():
        if not (folder / SINGLE_FILE).exists():
            raise CheckpointError(_nothing_found(folder))
        return _read_header(_contained(folder, SINGLE_FILE))
    shard_of = _read_index(_contained(folder, INDEX_FILE))
    entries: dict[str, TensorEntry] = {}
    for shard in sorted(set(shard_of.values())):
        for name, entry in _read_header(_contained(folder, shard)).items():
            if name in entries:
                raise CheckpointError(f"{entry.path}: {name} is also in {entries[name].path.name}")
            entries[name] = entry
    for name, shard in shard_of.items():
        if name not in entries:
            raise CheckpointError(f"{folder / shard}: {name} is not there, {INDEX_FILE} says it is")
    return entries


def read_tensor(
    entry: TensorEntry, name: str, index: int | None = None, *, dtype: torch.dtype
) -> torch.Tensor:
    """The tensor, or entry ``index`` of its first dimension, in ``dtype`` and memory of its own.

    Raises:
        CheckpointError: the file can not be read to the tensor's end.
    """
    shape, offset, num_bytes = entry.shape, entry.offset, entry.num_bytes
    if index is not None:
        num_bytes //= shape[0]
        offset += index * num_bytes
        shape = shape[1:]
    buffer = torch.empty(num_bytes, dtype=torch.uint8)
    try:
        with entry.path.open("rb", buffering=0) as file:
            file.seek(offset)
            _read_fully(file, buffer.numpy().data)
    except (OSError, EOFError) as error:
        raise CheckpointError(f"{entry.path}: {name}: {error}") from error
    return buffer.view(entry.dtype).view(shape).to(dtype)


def _read_fully(file: Any, target: memoryview) -> None:
    done = 0
    while done < len(target):
        count = file.readinto(target[done:])
        if not count:
            raise EOFError(f"the file ends {len(target) - done} bytes early")
        done += count


def _nothing_found(folder: Path) -> str:
    if list(folder.glob("pytorch_model*.bin")):
        return (
            f"{folder}: has only pytorch_model.bin, which is pickle and never read; "
            "convert it to safetensors"
        )
    return f"{folder}: has neither {SINGLE_FILE} nor {INDEX_FILE}"


def _contained(folder: Path, name: str) -> Path:
    """``folder / name``, resolved; it must be a regular file inside the folder.

    In a Hugging Face cache the files of ``snapshots/REVISION`` are links to ``blobs`` beside
    ``snapshots``, so there the folder that counts is the repository's.
    """
    path = folder.absolute() / name
    root = folder.resolve()
    if root.parent.name == "snapshots":
        root = root.parent.parent
    resolved = path.resolve()
    if Path(name).name != name or not resolved.is_relative_to(root):
        raise CheckpointError(f"{folder}: {name[:200]!r} is not a file name inside the folder")
    if not resolved.is_file():
        raise CheckpointError(f"{path}: {'not a regular file' if path.exists() else 'missing'}")
    return resolved


def _read_index(path: Path) -> dict[str, str]:
    try:
        shard_of = json.loads(path.read_text(encoding="utf-8"))["weight_map"]
        pairs = dict(shard_of.items())
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{path}: must be JSON with a weight_map ({error!r})") from error
    if not pairs or not all(isinstance(name, str) for name in pairs.values()):
        raise CheckpointError(f"{path}: weight_map must give a file name for each tensor")
    return pairs


def _read_header(path: Path) -> dict[str, TensorEntry]:
    try:
        with path.open("rb") as file:
            size = path.stat().st_size
            length = int.from_bytes(file.read(8), "little")
            if not 2 <= length <= min(_MAX_HEADER_BYTES, size - 8):
                raise ValueError(f"header of {length} bytes in a file of {size}")
            header = json.loads(file.read(length))
            header.pop("__metadata__", None)
            return {name: _entry(path, 8 + length, size, item) for name, item in header.items()}
    except CheckpointError:
        raise
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise CheckpointError(f"{path}: not a whole safetensors file: {error}") from error


def _entry(path: Path, data_start: int, file_size: int, item: Any) -> TensorEntry:
    start, end = item["data_offsets"]
    shape = tuple(item["shape"])
    dtype = _DTYPES.get(item["dtype"])
    if dtype is None:
        raise ValueError(f"unknown dtype {str(item['dtype'])[:20]}")
    if not all(isinstance(size, int) and size >= 0 for size in (start, end, *shape)):
        raise ValueError("offsets and shapes must be non-negative integers")
    if end - start != math.prod(shape) * dtype.itemsize:
        raise ValueError(f"{end - start} bytes for shape {list(shape)} of {dtype}")
    if data_start + end > file_size:
        raise ValueError(f"cut short: {file_size} bytes, at least {data_start + end} expected")
    return TensorEntry(
        path=path, offset=data_start + start, num_bytes=end - start, shape=shape, dtype=dtype
    )
