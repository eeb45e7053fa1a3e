"""Count windows under the names that vLLM gives its tensors.

vLLM keeps, per model, ``expert_load_window`` [window_size, num_moe_layers, num_physical_experts],
a ring buffer whose next place is ``expert_load_window_step``, and ``physical_to_logical_map``
[num_moe_layers, num_physical_experts]. It writes no file: these are the arrays as a user saves them
from the workers with ``numpy.savez`` (all in one npz), or the window alone with ``numpy.save``,
where every physical expert is then taken as the logical expert of that number. Written files also
have ``logical_to_physical_map`` and ``logical_replica_count``.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np

from moeserve_placement.text_files import open_regular
from moeserve_placement.traces.files import reading
from moeserve_placement.traces.options import ReadOptions, to_logical
from moeserve_placement.traces.safe_npz import SafeNpz, read_npy, write_npy, write_npz
from moeserve_placement.traces.trace import Array, CountTrace, TraceError

WINDOW = "expert_load_window"
MAP = "physical_to_logical_map"
STEP = "expert_load_window_step"


def read_vllm(path: Path, options: ReadOptions | None = None) -> CountTrace:
    """The count windows of an npz or npy with vLLM's arrays, oldest first, per logical expert.

    Windows of the ring buffer that were never filled (all zero) are left out. Options: num_experts
    (else from the map), first_layer (vLLM only numbers MoE layers), max_bytes.

    Raises:
        TraceError: no such arrays, shapes that do not agree, no window with tokens, or damage.
    """
    options = options or ReadOptions()
    with reading(path):
        with open_regular(path) as stream:
            is_npy = stream.read(6) == b"\x93NUMPY"
        if is_npy:
            arrays = {WINDOW: read_npy(path, max_bytes=options.max_bytes)}
        else:
            with SafeNpz(path, max_bytes=options.max_bytes) as npz:
                if WINDOW not in npz:
                    raise TraceError(f"array {WINDOW!r} is missing")
                arrays = {name: npz.read(name) for name in (WINDOW, MAP, STEP) if name in npz}
        return counts_of(arrays, options)


def counts_of(arrays: dict[str, Array], options: ReadOptions) -> CountTrace:
    """The trace of vLLM's arrays; see ``read_vllm``."""
    window = np.asarray(arrays[WINDOW])
    if window.ndim != 3 or window.dtype.kind not in "iu" or min(window.shape) < 1:
        raise TraceError(f"{WINDOW}: must be integers [window_size, layers, physical experts]")
    if STEP in arrays:
        window = np.roll(window, -_step(arrays[STEP], window.shape[0]), axis=0)
    if MAP in arrays:
        slots = np.asarray(arrays[MAP])
    else:
        slots = np.broadcast_to(np.arange(window.shape[2]), window.shape[1:])
    filled = window.any(axis=(1, 2))
    if not filled.any():
        raise TraceError(f"{WINDOW}: has no tokens at all")
    return CountTrace(
        counts=to_logical(window[filled], slots, num_experts=options.num_experts),
        layer_ids=options.layer_ids(window.shape[1]),
        metadata={"source_format": "vllm"},
    )


def write_vllm(path: Path, trace: CountTrace) -> tuple[str, ...]:
    """Writes the windows as vLLM's arrays, without redundant experts; says what is lost.

    A name in .npy gets the window array alone.

    Raises:
        TraceError: the file can not be written.
    """
    lost = ["layer_ids: vLLM numbers MoE layers from 0"] if _has_other_layers(trace) else []
    if trace.tokens_per_window is not None:
        lost.append("tokens_per_window")
    if trace.metadata:
        lost.append("metadata")
    if not trace.counts.any(axis=(1, 2)).all():
        lost.append("windows without tokens: they read as never filled")
    if path.suffix == ".npy":
        write_npy(path, trace.counts)
        return tuple(lost)
    identity = np.tile(np.arange(trace.num_experts, dtype=np.int64), (trace.num_layers, 1))
    write_npz(
        path,
        {
            WINDOW: trace.counts,
            STEP: np.array(0, dtype=np.int64),
            MAP: identity,
            "logical_to_physical_map": identity[:, :, None],
            "logical_replica_count": np.ones_like(identity),
        },
    )
    return tuple(lost)


def _step(value: Array, window_size: int) -> int:
    step = np.asarray(value)
    if step.size != 1 or step.dtype.kind not in "iu" or not 0 <= int(step.flat[0]) <= window_size:
        raise TraceError(f"{STEP}: must be one integer in [0, {window_size}]")
    return int(step.flat[0])


def _has_other_layers(trace: CountTrace) -> bool:
    return trace.layer_ids != tuple(range(trace.num_layers))
