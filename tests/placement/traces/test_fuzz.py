"""Damaged files of every format give a valid trace or a TraceError of one line, nothing else."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from moeserve_placement.placement import Placement
from moeserve_placement.traces import (
    CountTrace,
    ReadOptions,
    RoutingTrace,
    TraceError,
    count_windows,
    open_any,
    stream_windows,
)
from moeserve_placement.traces.detect import FORMATS
from moeserve_placement.traces.sglang import parse_sglang


def _routing() -> RoutingTrace:
    rng = np.random.default_rng(5)
    ids = np.argsort(rng.random((40, 2, 9)), axis=2)[:, :, :3]
    return RoutingTrace(
        topk_ids=ids,
        num_experts=9,
        layer_ids=(1, 4),
        sequence_lengths=np.array([10, 30]),
        topk_weights=rng.random(ids.shape).astype(np.float32),
        labels=("law", "code"),
        arrival_times_s=np.array([0.5, 1.5]),
        metadata={"model": "toy"},
    )


def _placement() -> Placement:
    return Placement(num_experts=3, layers={0: ((0, 1), (2, 0)), 1: ((1, 2), (0, 1))})


_DATA: dict[str, Any] = {
    "npz": _routing(),
    "json": _routing(),
    "placement": _placement(),
    "placement-npz": _placement(),
    "sglang": _routing(),
    "sglang-location": _placement(),
    "vllm": count_windows(_routing(), 10),
    "tensorrt-llm": _placement(),
    "omni": _placement(),
    "esft": _routing(),
}
_KEYS = st.sampled_from(
    [
        *("format", "version", "kind", "num_experts", "layer_ids", "metadata", "sequences"),
        *("weights_dtype", "windows", "topk_ids", "topk_weights", "label", "arrival_time_s"),
        *("layers", "physical_to_logical_map", "logical_count", "records", "forward_pass_id"),
        *("last_physical_to_logical_map", "extend_seq_lens", "forward_mode", "0"),
        *("topk_ids_of_layer", "global_physical_count", "labels"),
    ]
)
_OPTIONS = ReadOptions(num_ranks=2, top_k=3, max_bytes=1 << 24)


def _written(name: str, folder: Path) -> Path:
    """A valid file (for esft: one of the files of a folder) of a format."""
    path = folder / f"file{FORMATS[name].suffix}"
    writer = FORMATS[name].write
    assert writer is not None
    writer(path, _DATA[name])
    return path / "law" / "expert_weights_4.txt" if name == "esft" else path


@st.composite
def _damage(draw: st.DrawFn) -> Callable[[bytes], bytes]:
    """Cuts a file, or changes, removes or repeats some of its bytes."""
    kind = draw(st.sampled_from(["cut", "flip", "flip", "remove", "repeat", "insert"]))
    places = draw(st.lists(st.floats(0, 1, exclude_max=True), min_size=1, max_size=4))
    value = draw(st.integers(1, 255))

    def apply(data: bytes) -> bytes:
        found = bytearray(data)
        for place in places:
            at = int(place * len(found)) if found else 0
            if kind == "cut":
                del found[at:]
            elif kind == "flip" and found:
                found[at] ^= value
            elif kind == "remove":
                del found[at : at + 7]
            elif kind == "repeat":
                found[at:at] = found[at : at + 40]
            else:
                found[at:at] = bytes([value]) * 3
        return bytes(found)

    return apply


def _try(name: str, path: Path, *, by_content: bool) -> None:
    opened = path.parent.parent if name == "esft" else path
    try:
        data = open_any(opened, _OPTIONS, format_name=None if by_content else name)
    except TraceError as error:
        assert "\n" not in str(error)
    else:
        assert isinstance(data, (RoutingTrace, CountTrace, Placement))


@pytest.mark.parametrize("name", [name for name in _DATA if name != "sglang"])
@settings(max_examples=40)
@given(damage=_damage(), by_content=st.booleans())
def test_a_damaged_file_is_refused_or_valid(
    name: str, damage: Callable[[bytes], bytes], by_content: bool
) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = _written(name, Path(folder))
        path.write_bytes(damage(path.read_bytes()))
        _try(name, path, by_content=by_content)


@settings(max_examples=40)
@given(damage=_damage())
def test_a_damaged_torch_file_is_refused_or_valid(damage: Callable[[bytes], bytes]) -> None:
    pytest.importorskip("torch")
    with tempfile.TemporaryDirectory() as folder:
        path = _written("sglang", Path(folder))
        path.write_bytes(damage(path.read_bytes()))
        _try("sglang", path, by_content=False)


@settings(max_examples=40)
@given(damage=_damage())
def test_a_damaged_stream_is_refused_or_valid(damage: Callable[[bytes], bytes]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = _written("npz", Path(folder))
        path.write_bytes(damage(path.read_bytes()))
        try:
            assert sum(window.num_tokens for window in stream_windows(path, 7)) >= 1
        except TraceError as error:
            assert "\n" not in str(error)


@settings(max_examples=100)
@given(data=st.binary(max_size=200), name=st.sampled_from(sorted(set(FORMATS) - {"esft"})))
def test_any_bytes_are_refused_or_valid(data: bytes, name: str) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "file"
        path.write_bytes(data)
        for format_name in (name, None):
            with pytest.raises(TraceError):
                open_any(path, _OPTIONS, format_name=format_name)


_NUMBERS = st.integers(-2, 5) | st.sampled_from([2**31, 2**63 - 1, -(2**63), 10**30, 0.5, 1e300])
_JSON = st.recursive(
    st.none() | st.booleans() | _NUMBERS | st.sampled_from(["", "routing", "counts", "float16"]),
    lambda children: st.lists(children, max_size=4) | st.dictionaries(_KEYS, children, max_size=4),
    max_leaves=20,
)


@settings(max_examples=100)
@given(changes=st.dictionaries(_KEYS, _JSON, max_size=3), data=st.data())
def test_any_json_under_known_keys_is_refused_or_valid(
    changes: dict[str, Any], data: st.DataObject
) -> None:
    name = data.draw(st.sampled_from(["json", "placement", "sglang-location"]))
    with tempfile.TemporaryDirectory() as folder:
        path = _written(name, Path(folder))
        document = json.loads(path.read_text())
        path.write_text(json.dumps(document | changes))
        _try(name, path, by_content=False)
        if name == "json":
            document["sequences"][0].update(changes)
            path.write_text(json.dumps(document))
            _try(name, path, by_content=False)


_ANY_ARRAY = st.one_of(
    hnp.arrays(dtype, hnp.array_shapes(min_dims=0, max_dims=4, min_side=0, max_side=4))
    for dtype in (np.uint8, np.int64, np.uint64, np.float16, np.float64, np.bool_, "<U3", "S2")
)


@settings(max_examples=100)
@given(name=st.sampled_from(["npz", "vllm", "raw"]), data=st.data())
def test_any_arrays_under_known_names_are_refused_or_valid(name: str, data: st.DataObject) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "file.npz"
        arrays: dict[str, Any] = {}
        if name == "raw":
            names = ["ids", "seqlen", "cat", "probs", "law", "law_seqlen"]
        else:
            with np.load(_written(name, Path(folder))) as npz:
                arrays = dict(npz)
            names = sorted(arrays)
        changed = data.draw(st.dictionaries(st.sampled_from(names), _ANY_ARRAY, max_size=4))
        np.savez(path, **(arrays | changed))
        _try(name, path, by_content=False)


@settings(max_examples=100)
@given(changes=st.dictionaries(_KEYS, _JSON | _ANY_ARRAY, max_size=4), inside=st.booleans())
def test_any_recorder_content_is_refused_or_valid(changes: dict[str, Any], inside: bool) -> None:
    slots = np.array([[0, 1], [0, 1]])
    record: dict[str, Any] = {
        "forward_pass_id": 1,
        "extend_seq_lens": [1],
        "forward_mode": 1,
        "topk_ids_of_layer": np.array([[[0]], [[1]]]),
        "global_physical_count": slots,
    }
    loaded: dict[str, Any] = {"records": [record], "last_physical_to_logical_map": slots}
    (record if inside else loaded).update(changes)
    try:
        parse_sglang(loaded, _OPTIONS)
    except TraceError as error:
        assert "\n" not in str(error)


def test_a_file_of_another_format_is_refused_or_valid(tmp_path: Path) -> None:
    for name in _DATA:
        (tmp_path / name).mkdir()
        path = _written(name, tmp_path / name)
        for other in FORMATS:
            try:
                open_any(path, _OPTIONS, format_name=other)
            except TraceError as error:
                assert "\n" not in str(error)
