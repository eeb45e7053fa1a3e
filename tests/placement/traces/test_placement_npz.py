"""Placements as npz: what comes back, and what is refused before it is read."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers_traces import placements
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from moeserve_placement.placement import Placement, PlacementError
from moeserve_placement.slot_table import even_shares, slot_table
from moeserve_placement.traces import ReadOptions, TraceError, open_any
from moeserve_placement.traces.placement_npz import load_npz, save_npz

ARRAYS: dict[str, Any] = {
    "format": np.array("moeserve-placement"),
    "version": np.array(1),
    "num_experts": np.array(3),
    "layer_ids": np.array([0, 4]),
    "slots": np.array([[[0, 1], [2, -1]], [[0, 2], [1, -2]]]),
    "shares": np.array([[[1.0, 1.0], [1.0, 0.0]], [[1.0, 1.0], [1.0, 0.0]]]),
}


def test_npz_keeps_unequal_ranks_and_shares(tmp_path: Path) -> None:
    layers = {2: ((0, 1, None), (1,), ()), 5: ((1, None), (0, 1), (None,))}
    placement = Placement(num_experts=2, layers=layers)
    shares = even_shares(slot_table(placement, [2, 5]), 2)
    save_npz(tmp_path / "a.npz", placement, shares=shares)
    loaded, loaded_shares = load_npz(tmp_path / "a.npz")
    assert loaded == placement
    np.testing.assert_array_equal(loaded_shares, shares)
    save_npz(tmp_path / "b.npz", placement)
    assert load_npz(tmp_path / "b.npz") == (placement, None)


def test_a_file_that_numpy_wrote_is_read(tmp_path: Path) -> None:
    for save in (np.savez, np.savez_compressed):
        save(tmp_path / "a.npz", **ARRAYS)
        placement, shares = load_npz(tmp_path / "a.npz")
        assert placement.layers == {0: ((0, 1), (2, None)), 4: ((0, 2), (1,))}
        assert shares is not None


@settings(max_examples=20)
@given(placement=placements(free=True))
def test_equal_placements_give_equal_files(placement: Placement) -> None:
    with tempfile.TemporaryDirectory() as folder:
        for name in ("a.npz", "b.npz"):
            save_npz(Path(folder) / name, placement)
        assert (Path(folder) / "a.npz").read_bytes() == (Path(folder) / "b.npz").read_bytes()


@pytest.mark.parametrize(
    "content", [b"", b"PK\x03\x04", b"no", b"\x80\x04N.", b"\x93NUMPY\x01\x00"]
)
def test_broken_npz_is_one_clear_error(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "bad.npz"
    path.write_bytes(content)
    with pytest.raises(TraceError, match=r"bad\.npz: ") as caught:
        load_npz(path)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"version": np.array(2)}, "version = 2: must be 1"),
        ({"version": np.array([1])}, "version: must be one integer"),
        ({"version": np.array(1.0)}, "version: must be one integer"),
        ({"num_experts": np.array([3, 3])}, r"num_experts: must be one integer, .* shape \(2,\)"),
        ({"num_experts": np.array(3.9)}, "num_experts: must be one integer, not float64"),
        ({"num_experts": np.array(4)}, "no rank holds expert 3"),
        ({"format": np.array(["moeserve-placement"])}, "format: must be one text"),
        ({"format": np.array("other")}, "is not a placement"),
        ({"layer_ids": np.array([1, 1])}, "layer_ids: must be distinct"),
        ({"slots": np.array([[[0, -3]]] * 2)}, "slots: holds -3"),
        ({"slots": np.zeros(3)}, "slots: has shape"),
        ({"shares": np.ones((2, 2, 2)) * np.nan}, r"shares: must be in \[0, 1\]"),
        ({"shares": np.ones((1, 2, 2))}, "shares: must be float64 of shape"),
        ({"slots": np.array([object()], dtype=object)}, "pickled objects: refused"),
    ],
)
def test_wrong_arrays_are_named(tmp_path: Path, change: dict[str, Any], text: str) -> None:
    path = tmp_path / "other.npz"
    np.savez(path, **(ARRAYS | change))
    with pytest.raises(TraceError, match=text) as caught:
        load_npz(path)
    assert str(caught.value).startswith(f"{path}: ")


_ANY_ARRAY = st.one_of(
    hnp.arrays(dtype, hnp.array_shapes(min_dims=0, max_dims=4, min_side=0, max_side=3))
    for dtype in (np.uint8, np.int64, np.uint64, np.float64, np.bool_, "<U3")
)


@settings(max_examples=100)
@given(changed=st.dictionaries(st.sampled_from(sorted(ARRAYS)), _ANY_ARRAY, max_size=3))
def test_any_arrays_under_these_names_are_refused_or_valid(changed: dict[str, Any]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "file.npz"
        np.savez(path, **(ARRAYS | changed))
        try:
            assert isinstance(open_any(path, ReadOptions()), Placement)
        except TraceError as error:
            assert "\n" not in str(error)


def test_a_small_file_of_a_giant_table_is_refused_unread(tmp_path: Path) -> None:
    path = tmp_path / "bomb.npz"
    np.savez_compressed(path, **(ARRAYS | {"slots": np.zeros((2, 4096, 4200), np.int64)}))
    assert path.stat().st_size < 1 << 20
    with pytest.raises(TraceError, match="'slots' declares 275,251,200 bytes, more than the limit"):
        load_npz(path)
    with pytest.raises(TraceError, match="more than the limit of 40 "):
        load_npz(path, max_bytes=40)


def test_a_placement_whose_table_would_be_giant_is_not_written(tmp_path: Path) -> None:
    ranks = (tuple(range(4096)), *[()] * 20_000)
    placement = Placement(num_experts=4096, layers={0: ranks})
    with pytest.raises(PlacementError, match=r"slots: a table of 1 layers, 20001 ranks"):
        save_npz(tmp_path / "p.npz", placement)
    assert not list(tmp_path.iterdir())
