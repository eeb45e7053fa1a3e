"""Files of torch.save, as plain Python and numpy. The only module here that needs torch."""

from __future__ import annotations

import zipfile
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from moeserve_placement.text_files import open_regular
from moeserve_placement.traces.files import MAX_BYTES, one_line, reading, replacing
from moeserve_placement.traces.trace import TraceError

_MISSING = "a .pt file needs torch, which is not installed: pip install 'moeserve[traces]'"


def load_torch_file(path: Path, *, max_bytes: int = MAX_BYTES) -> Any:
    """What ``torch.save`` stored, with every tensor as a numpy array.

    Only tensors and plain Python values are read (``weights_only=True``); a file that names any
    other class is refused without running its code.

    Raises:
        TraceError: torch is missing, the file is damaged, larger than max_bytes, or names classes.
    """
    try:
        import torch
    except ImportError as error:
        raise TraceError(_MISSING) from error
    with reading(path), open_regular(path) as stream:
        _check_sizes(stream, max_bytes)
        stream.seek(0)
        try:
            # weights_only: no pickled class is built. The recorder's files come from elsewhere, so
            # this is the one place where the ban on torch.load does not hold.
            loaded = torch.load(stream, map_location="cpu", weights_only=True)  # noqa: TID251
        except Exception as error:
            # torch raises nearly every type for a damaged file; none of them is a fault of ours.
            first = one_line(error).split(". ")[0]
            raise TraceError(f"not a torch file of plain tensors: {first}") from error
        return _to_numpy(loaded, max_bytes)


def save_torch_file(path: Path, value: Any) -> None:
    """Stores plain Python values, with every numpy array as a tensor.

    Raises:
        TraceError: torch is missing, or the file can not be written.
    """
    try:
        import torch
    except ImportError as error:
        raise TraceError(_MISSING) from error
    # A stream, not a path: torch would put the name of the partial file into the archive.
    with replacing(path) as partial, partial.open("wb") as stream:
        torch.save(_to_torch(torch, value), stream)


def _check_sizes(stream: BinaryIO, max_bytes: int) -> None:
    """Refuses damaged archives and bombs before torch, which checks neither, sees them."""
    with zipfile.ZipFile(stream) as archive:
        total = sum(member.file_size for member in archive.infolist())
        if total > max_bytes:
            raise TraceError(f"declares {total:,} bytes, more than {max_bytes:,} (max_bytes)")
        damaged = archive.testzip()
        if damaged is not None:
            raise TraceError(f"member {damaged[:60]!r} is damaged")


def _to_numpy(value: Any, max_bytes: int) -> Any:
    if isinstance(value, dict):
        return {key: _to_numpy(item, max_bytes) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_to_numpy(item, max_bytes) for item in value]
    if hasattr(value, "element_size"):
        # A tensor may repeat a small storage into a giant shape.
        num_bytes = value.numel() * value.element_size()
        if num_bytes > max_bytes:
            raise TraceError(f"a tensor has {num_bytes:,} bytes, more than {max_bytes:,}")
        return np.ascontiguousarray(value.detach().numpy()).reshape(tuple(value.shape))
    return value


def _to_torch(torch: Any, value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _to_torch(torch, item) for key, item in value.items()}
    if isinstance(value, list):
        return [_to_torch(torch, item) for item in value]
    if isinstance(value, np.ndarray):
        return torch.from_numpy(np.ascontiguousarray(value))
    return value
