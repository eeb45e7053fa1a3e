"""Our npz and JSON forms: exact round trips; what is damaged, forged or a bomb is refused."""

from __future__ import annotations

import io
import json
import tempfile
import warnings
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers_traces import assert_same_counts, assert_same_routing, count_traces, routing_traces
from hypothesis import given, settings
from hypothesis import strategies as st

from moeserve_placement.traces import (
    CountTrace,
    RoutingTrace,
    TraceError,
    detect,
    open_trace,
    read_trace,
    write_trace,
)

HEADER = {
    "format": "moeserve-trace",
    "version": 1,
    "kind": "routing",
    "num_experts": 4,
    "layer_ids": [0],
    "metadata": {},
}
IDS = np.array([[[0, 1]], [[2, 3]]], dtype=np.uint8)
LENGTHS = np.array([2])


def npz(path: Path, *, header: Any = None, **arrays: Any) -> Path:
    """An npz with a header, as numpy itself writes it; None leaves an array out."""
    text = json.dumps(HEADER | (header or {})).encode()
    found = {"header": np.frombuffer(text, np.uint8), "topk_ids": IDS, "sequence_lengths": LENGTHS}
    found |= arrays
    np.savez(path, **{name: array for name, array in found.items() if array is not None})
    return path


@settings(max_examples=40)
@given(trace=routing_traces(), suffix=st.sampled_from([".npz", ".json"]))
def test_routing_traces_come_back_exactly(trace: RoutingTrace, suffix: str) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / f"trace{suffix}"
        write_trace(path, trace)
        assert detect(path) == suffix[1:]
        assert_same_routing(open_trace(path), trace)
        assert [item.name for item in Path(folder).iterdir()] == [path.name]


@settings(max_examples=40)
@given(trace=count_traces(), suffix=st.sampled_from([".npz", ".json"]))
def test_count_traces_come_back_exactly(trace: CountTrace, suffix: str) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / f"trace{suffix}"
        write_trace(path, trace)
        back = open_trace(path)
        assert_same_counts(back, trace)
        assert dict(back.metadata) == dict(trace.metadata)


@settings(max_examples=40)
@given(trace=routing_traces())
def test_equal_traces_give_equal_files(trace: RoutingTrace) -> None:
    with tempfile.TemporaryDirectory() as folder:
        for name in ("a.npz", "b.npz"):
            write_trace(Path(folder) / name, trace)
        assert (Path(folder) / "a.npz").read_bytes() == (Path(folder) / "b.npz").read_bytes()


def test_the_documented_json_examples_are_read(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    path.write_text(
        '{"format": "moeserve-trace", "version": 1, "kind": "routing", "num_experts": 4,'
        '"layer_ids": [1, 2], "metadata": {"model": "toy"}, "sequences": ['
        '{"label": "law", "arrival_time_s": 0.5, "topk_ids": [[[0, 3], [1, 2]]]}]}'
    )
    trace = read_trace(path)
    assert isinstance(trace, RoutingTrace)
    assert (trace.labels, trace.layer_ids, trace.top_k) == (("law",), (1, 2), 2)
    path.write_text(
        '{"format": "moeserve-trace", "version": 1, "kind": "counts", "num_experts": 2,'
        '"layer_ids": [1], "metadata": {}, "windows": [{"num_tokens": 5, "counts": [[3, 7]]}]}'
    )
    counts = read_trace(path)
    assert isinstance(counts, CountTrace)
    assert counts.counts.tolist() == [[[3, 7]]]


@pytest.mark.parametrize(
    ("arrays", "text"),
    [
        ({"topk_ids": None}, "'topk_ids' is missing"),
        ({"sequence_lengths": None}, "'sequence_lengths' is missing"),
        ({"topk_ids": IDS[:, 0]}, "must be an integer array"),
        ({"topk_ids": IDS + 1}, r"expert 4 is not in \[0, 4\)"),
        ({"topk_ids": IDS * 0}, "twice"),
        ({"topk_weights": np.full(IDS.shape, np.nan)}, "not a finite number"),
        ({"topk_weights": np.ones((1, 1, 2))}, "differs from topk_ids"),
        ({"sequence_lengths": np.array([1])}, "sum to 1"),
        ({"sequence_lengths": np.array([2**63 - 1, 2**63 - 1, 4])}, "each in"),
        ({"surprise": IDS}, "no such array"),
        ({"topk_ids": IDS.astype(complex)}, "neither numbers nor text"),
        ({"topk_ids": np.array([(1, 2)], dtype=[("a", int), ("b", int)])}, "its header is not"),
        ({"header": {"version": 2}}, "version = 2: must be 1"),
        ({"header": {"kind": "video"}}, "kind = 'video'"),
        ({"header": {"num_experts": 10**12}}, "num_experts"),
        ({"header": {"num_experts": True}}, "num_experts"),
        ({"header": {"layer_ids": ["a"]}}, "layer_ids"),
        ({"header": {"format": "other"}}, "must be a JSON object with"),
        ({"header": {"labels": ["a"]}}, "'label_ids' is missing"),
        ({"header": {"labels": ["a"]}, "label_ids": np.array([1])}, "label_ids"),
        ({"header": {"extra": 1}}, "unknown key 'extra'"),
    ],
)
def test_a_wrong_npz_is_refused_in_one_line(
    tmp_path: Path, arrays: dict[str, Any], text: str
) -> None:
    with pytest.raises(TraceError, match=text) as caught:
        read_trace(npz(tmp_path / "bad.npz", **arrays))
    assert str(caught.value).startswith(f"{tmp_path / 'bad.npz'}: ")
    assert "\n" not in str(caught.value)


def test_pickled_objects_are_never_loaded(tmp_path: Path) -> None:
    loud = np.array([[[print]]], dtype=object)
    with pytest.raises(TraceError, match="pickled objects: refused"):
        read_trace(npz(tmp_path / "bad.npz", topk_ids=loud))
    (tmp_path / "bad.pkl").write_bytes(b"\x80\x04K\x01.")
    with pytest.raises(TraceError, match="is a Python pickle: refused"):
        open_trace(tmp_path / "bad.pkl")


def _member(shape: str, data: bytes = b"") -> bytes:
    """A .npy member that declares a shape and holds some data."""
    head = f"{{'descr': '|u1', 'fortran_order': False, 'shape': {shape}, }}".encode()
    return b"\x93NUMPY\x01\x00" + len(head).to_bytes(2, "little") + head + data


def _archive(path: Path, members: list[tuple[str, bytes]]) -> Path:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # zipfile warns about names that come twice
        with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
            for name, data in members:
                archive.writestr(name, data)
    return path


def test_an_array_that_declares_more_than_it_has_is_refused_unread(tmp_path: Path) -> None:
    path = _archive(tmp_path / "bad.npz", [("header.npy", _member("(1099511627776,)"))])
    with pytest.raises(TraceError, match="needs 1,099,511,627,776 bytes, but 0 are there"):
        read_trace(path)


def test_a_zip_bomb_is_refused_by_its_declared_size(tmp_path: Path) -> None:
    text = json.dumps(HEADER).encode()
    header = io.BytesIO()
    np.save(header, np.frombuffer(text, np.uint8))
    size = 64 << 20
    bomb = _member(f"({size // 2}, 1, 2)", bytes(size))
    path = _archive(
        tmp_path / "bomb.npz", [("header.npy", header.getvalue()), ("topk_ids.npy", bomb)]
    )
    assert path.stat().st_size < 100_000
    with pytest.raises(TraceError, match="declares 67,108,864 bytes, more than the limit of 1,000"):
        read_trace(path, max_bytes=1000)


def test_members_that_come_twice_or_are_no_arrays_are_refused(tmp_path: Path) -> None:
    one = ("header.npy", _member("(1,)", b"x"))
    with pytest.raises(TraceError, match="'header' comes twice"):
        read_trace(_archive(tmp_path / "a.npz", [one, one]))
    with pytest.raises(TraceError, match=r"'run.sh' is not a \.npy array"):
        read_trace(_archive(tmp_path / "b.npz", [one, ("run.sh", b"ls")]))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"format": "moeserve-trace", "format": "x"}', "'format' comes twice"),
        ('{"a": NaN}', "NaN is not a finite number"),
        ('{"a": ', "not valid JSON"),
        ("[" * 100_000, "not valid JSON"),
        ("[]", "JSON of no known format"),
        ("", "no known format"),
        ("hello", "no known format"),
    ],
)
def test_wrong_json_is_refused_in_one_line(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "bad.json"
    path.write_text(text)
    with pytest.raises(TraceError, match=message) as caught:
        open_trace(path)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("sequences", "message"),
    [
        ([], "one or more objects"),
        ([{}], "'topk_ids' is missing"),
        ([{"topk_ids": [[[0, 1]], [[2]]]}], "full array of numbers"),
        ([{"topk_ids": [[["0", "1"]]]}], "full array of numbers"),
        ([{"topk_ids": [[[0.5, 1]]]}], "full array of numbers"),
        ([{"topk_ids": [[[0, 10**30]]]}], "full array of numbers"),
        ([{"topk_ids": [[[0, 9]]]}], "expert 9"),
        ([{"topk_ids": [[[0, 1]]]}, {"topk_ids": [[[0]]]}], "alike in all sequences"),
        ([{"topk_ids": [[[0, 1]]], "label": 3}], "strings"),
        ([{"topk_ids": [[[0, 1]]], "label": "a"}, {"topk_ids": [[[0, 1]]]}], "everywhere or nowhe"),
        ([{"topk_ids": [[[0, 1]]], "topk_weights": [[[1e999, 1]]]}], "Infinity|finite"),
        ([{"topk_ids": [[[0, 1]]], "topk_weights": [[[1e300, 1]]]}], "finite"),
        ([{"topk_ids": [[[0, 1]]], "topk_weights": [[[1]]]}], "as long as topk_ids"),
    ],
)
def test_wrong_sequences_in_json_are_refused(tmp_path: Path, sequences: Any, message: str) -> None:
    path = tmp_path / "bad.json"
    text = json.dumps(HEADER | {"sequences": sequences})
    path.write_text(text.replace("Infinity", "1e999"))
    with pytest.raises(TraceError, match=message):
        read_trace(path)


def test_a_missing_file_is_one_clear_line(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match="No such file or directory"):
        open_trace(tmp_path / "none.npz")


def test_a_name_without_a_known_suffix_is_refused(tmp_path: Path) -> None:
    trace = read_trace(npz(tmp_path / "a.npz"))
    with pytest.raises(TraceError, match=r"must end in \.npz or \.json"):
        write_trace(tmp_path / "trace.bin", trace)
    assert not (tmp_path / "trace.bin").exists()


def test_fortran_and_big_endian_arrays_are_read_by_value(tmp_path: Path) -> None:
    ids = np.asfortranarray(np.array([[[0, 1], [2, 3]], [[3, 2], [1, 0]]], dtype=">i4"))
    path = npz(tmp_path / "a.npz", header={"layer_ids": [0, 1]}, topk_ids=ids)
    trace = read_trace(path)
    assert isinstance(trace, RoutingTrace)
    np.testing.assert_array_equal(trace.topk_ids, ids)
    assert trace.topk_ids.dtype.isnative and trace.topk_ids.flags.c_contiguous
