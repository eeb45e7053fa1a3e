"""Opening and reading text that nobody vouches for."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from moeserve_placement import Placement, PlacementError
from moeserve_placement.text_files import FileError, open_regular, parse_json, read_text
from moeserve_placement.traces import TraceError, detect, open_any, stream_windows

needs_posix = pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="needs pipes and devices")


@pytest.fixture(params=["pipe", "device"])
def endless(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """A file that never ends, or that nobody writes to."""
    if request.param == "device":
        return Path("/dev/zero")
    os.mkfifo(tmp_path / "pipe")
    return tmp_path / "pipe"


@needs_posix
@pytest.mark.timeout(20)
def test_only_regular_files_are_opened(endless: Path) -> None:
    with pytest.raises(FileError, match="is not a regular file"):
        open_regular(endless)
    for read in (open_any, detect, lambda path: next(stream_windows(path, 8))):
        with pytest.raises(TraceError, match="is not a regular file"):
            read(endless)
    with pytest.raises(PlacementError, match="is not a regular file"):
        Placement.load(endless)


@needs_posix
def test_a_link_to_a_file_is_read_and_a_folder_is_named(tmp_path: Path) -> None:
    (tmp_path / "text").write_text("hello")
    (tmp_path / "link").symlink_to(tmp_path / "text")
    assert read_text(tmp_path / "link") == "hello"
    with pytest.raises(IsADirectoryError):
        open_regular(tmp_path)


def test_longer_text_is_refused_and_text_at_the_limit_is_read(tmp_path: Path) -> None:
    path = tmp_path / "text"
    path.write_text("12345")
    assert read_text(path, max_bytes=5) == "12345"
    with pytest.raises(FileError, match="has 5 bytes, text files may have 4"):
        read_text(path, max_bytes=4)


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="needs /proc")
def test_a_file_that_hides_its_size_is_read_no_further_than_the_limit() -> None:
    path = Path("/proc/self/status")  # says that it has no bytes
    assert path.stat().st_size == 0 and len(read_text(path)) > 100
    with pytest.raises(FileError, match="has 101 bytes, text files may have 100"):
        read_text(path, max_bytes=100)


def test_json_takes_no_key_twice_and_no_number_that_is_none() -> None:
    assert parse_json('{"a": [1, {"b": 2}]}', what="x") == {"a": [1, {"b": 2}]}
    for text, words in (
        ('{"a": 1, "b": {"c": 1, "c": 2}}', "'c' comes twice"),
        ("[NaN]", "NaN is not"),
        ("[-Infinity]", "-Infinity is not"),
        ("[" * 100_000, "x: not valid JSON"),
        ("9" * 10_000, "x: not valid JSON"),
    ):
        with pytest.raises(FileError, match=words):
            parse_json(text, what="x")


def test_a_placement_names_no_layer_twice_and_is_no_longer_than_a_text_file(
    tmp_path: Path,
) -> None:
    text = Placement.linear(2, 2, [7]).to_json()
    twice = text.replace('"7": [[0], [1]]', '"7": [[0], [1]], "7": [[1], [0]]')
    with pytest.raises(PlacementError, match="JSON: key '7' comes twice"):
        Placement.from_json(twice)
    with pytest.raises(PlacementError, match="version = True: must be 1"):
        Placement.from_json(json.dumps(json.loads(text) | {"version": True}))
    path = tmp_path / "p.json"
    with path.open("wb") as stream:  # 300 MiB of nothing, which takes no room on the disk
        stream.truncate(300 << 20)
    with pytest.raises(PlacementError, match=r"p\.json: has 314,572,800 bytes"):
        Placement.load(path)
