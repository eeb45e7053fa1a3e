"""Tiles of the expert FFN: the shipped tables, the choice among them, and what it is fed with."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from moeserve_kernels import tables
from moeserve_kernels.device import tiles
from moeserve_kernels.device.histogram import HistogramTracker
from moeserve_kernels.device.moe_cases import aot_cases
from moeserve_kernels.device.targets import INTERPRET, TARGETS
from moeserve_kernels.weights import FORMATS, GROUP

SHIPPED = [*TARGETS.values(), INTERPRET]
H200 = tiles.load("sm_90")


def block_m(
    counts: list[float] | None,
    *,
    num_pairs: int = 0,
    num_slots: int = 128,
    format: str = "plain",
) -> int:
    return tiles.choose(H200, format, counts, num_pairs, num_slots).block_m


@pytest.mark.parametrize("target", SHIPPED, ids=lambda target: target.name)
def test_shipped_tables_ask_for_no_more_than_the_chip_can(target: Any) -> None:
    table = tiles.load(target.name)
    formats = {"plain", "int8", "int4", "float32"}
    formats |= {"fp8_channel", "fp8_block"} if target.fp8 else set()
    assert set(table.formats) == formats
    for format, sizes in table.formats.items():
        for tile in sizes:
            for cut in (tile.up, tile.down):
                assert not cut.swap or target.swap
                assert not (cut.tma_weights or cut.tma_rows) or target.tma
                assert not cut.tma_rows or tile.block_m >= 64
                # A step has one scale for each row of weights.
                assert format not in ("fp8_block", "int4") or GROUP % cut.block_k == 0
            assert not tile.up.persistent  # there is no such form of the kernel


@pytest.mark.parametrize("name", TARGETS)
def test_block_sizes_of_formats_are_prefixes_of_one_row(name: str) -> None:
    # So that the smaller of two formats' choices exists in both.
    formats = tiles.load(name).formats
    sizes = {tuple(tile.block_m for tile in formats[one]) for one in FORMATS if one in formats}
    longest = max(sizes, key=len)
    assert all(longest[: len(one)] == one for one in sizes)


@pytest.mark.parametrize("name", TARGETS)
def test_compiler_gets_every_tile_of_the_table(name: str) -> None:
    labels = [label for label, _ in aot_cases(TARGETS[name])]
    assert len(labels) == len(set(labels)) <= 45
    for format in ("plain", "int8", "int4"):
        for tile in tiles.load(name).formats[format]:
            for product in ("up", "down"):
                assert any(one.startswith(f"{product} {format} {tile.block_m}") for one in labels)


def test_few_rows_take_small_blocks_and_many_take_large_ones() -> None:
    assert block_m(None, num_pairs=8) == 16
    assert block_m([10.0] * 128) == 16
    assert block_m([30.0] * 128) == 32
    assert block_m([2000.0] * 128) == 128
    chosen = [block_m([float(rows)] * 128) for rows in range(1, 1000)]
    assert chosen[0] == 16
    assert chosen[-1] == 128


def test_equal_pairs_take_other_blocks_when_experts_are_chosen_unevenly() -> None:
    # 4096 pairs: 32 rows for each of 128 experts, or 512 for each of 8.
    even = block_m(None, num_pairs=4096)
    uneven = block_m([512.0] * 8 + [0.0] * 120)
    assert even < uneven == 128


def test_padding_is_free_below_the_break_even_only() -> None:
    # A row more than fills the block: in blocks of 128 that is a second one, all padding.
    assert cost(32, [4.0] * 64) == pytest.approx(cost(16, [4.0] * 64), rel=0.05)
    assert cost(128, [1025.0] * 64) / cost(128, [1024.0] * 64) == pytest.approx(9 / 8, rel=0.02)
    assert cost(16, [1024.0] * 64) > 2 * cost(128, [1024.0] * 64)


def cost(size: int, counts: list[float]) -> float:
    tile = H200.tile("plain", torch.bfloat16, size)
    return tiles._cost(tile, counts, 2.0, 2.0, 2 * size / H200.flops_per_byte)


@given(
    st.lists(st.floats(0, 5000), min_size=1, max_size=64),
    st.sampled_from(FORMATS),
    st.sampled_from([torch.float32, torch.bfloat16]),
)
def test_choice_is_a_tile_of_the_format(
    counts: list[float], format: str, dtype: torch.dtype
) -> None:
    tile = tiles.choose(H200, format, counts, 0, len(counts), dtype=dtype)
    assert tile in H200.of(format, dtype)
    assert tile == H200.tile(format, dtype, tile.block_m)


GOOD = tables.load("moe", "sm_80")
FIRST = GOOD["formats"]["plain"][0]
BAD = {
    "no formats": ({key: GOOD[key] for key in GOOD if key != "formats"}, "'formats'"),
    "unknown format": (GOOD | {"formats": {"int2": [FIRST]}}, "formats: 'int2'"),
    "no tile": (GOOD | {"formats": {"plain": []}}, "must grow"),
    "order": (GOOD | {"formats": {"plain": [FIRST, FIRST]}}, "must grow"),
    "key": (GOOD | {"formats": {"plain": [FIRST | {"up": {"block_x": 1}}]}}, "block_x"),
    "alias": (GOOD | {"formats": {"plain": "int8"}}, "'int8'"),
}


@pytest.mark.parametrize("name", BAD)
def test_malformed_tables_are_refused(name: str) -> None:
    data, message = BAD[name]
    with pytest.raises(ValueError, match=f"moe-sm_80.json: .*{message}"):
        tiles.parse("sm_80", data)


def test_tracker_averages_shares_of_steps_of_any_size() -> None:
    tracker = HistogramTracker(2, decay=0.5)
    assert tracker.expected(10) is None
    tracker.observe(torch.tensor([1, 3], dtype=torch.int32), 4)
    assert tracker.expected(8) == [2.0, 6.0]
    tracker.observe(torch.tensor([8, 0], dtype=torch.int32), 16)  # half is not here
    assert tracker.expected(8) == [3.0, 3.0]


def test_tracker_takes_nothing_from_a_step_without_pairs() -> None:
    tracker = HistogramTracker(2)
    tracker.observe(torch.zeros(2, dtype=torch.int32), 0)
    assert tracker.expected(8) is None


class Copy:
    """Stands for the event after a copy: it is done when the test says so."""

    done = False

    def query(self) -> bool:
        return self.done


def test_tracker_leaves_out_steps_while_a_copy_is_under_way(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    tracker = HistogramTracker(2)
    tracker.observe(torch.tensor([4, 0], dtype=torch.int32), 4)
    copy = Copy()
    tracker._copied = copy  # type: ignore[assignment]
    tracker.observe(torch.tensor([0, 4], dtype=torch.int32), 4)
    assert tracker.expected(4) is None
    copy.done = True
    assert tracker.expected(4) == [4.0, 0.0]


def test_tracker_refuses_a_decay_that_never_learns() -> None:
    with pytest.raises(ValueError, match="decay = 1: must be"):
        HistogramTracker(2, decay=1)
