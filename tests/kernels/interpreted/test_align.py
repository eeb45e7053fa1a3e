"""The kernels that sort pairs by slot, in the interpreter, against loops over lists."""

from __future__ import annotations

from collections.abc import Mapping

import pytest
import torch

from moeserve_kernels import backend
from moeserve_kernels.alignment import Alignment
from moeserve_kernels.device import align as device
from moeserve_kernels.device.targets import INTERPRET
from moeserve_kernels.formulas import align as formulas
from moeserve_kernels.operations.align import align

from .. import guards

_TENSORS = ("sorted_pairs", "block_slots", "counts", "num_padded_rows")
# Sizes that make chunks, scans and fills all take several steps on few pairs.
_SMALL = {"chunk": 16, "scan_chunks": 4, "scan_columns": 4, "fill_blocks": 4, "num_warps": 1}


def run(
    topk_ids: torch.Tensor,
    num_slots: int,
    block_m: int,
    expert_map: torch.Tensor | None = None,
    tile: Mapping[str, int] | None = None,
) -> Alignment:
    """Twice, between canaries; the bits must be equal."""
    topk_ids = guards.inside_nan(topk_ids)
    expert_map = None if expert_map is None else guards.inside_nan(expert_map)
    results = []
    for _ in range(2):
        with backend.forced("triton-interpret"), guards.poisoned_empty():
            if tile is None:
                results.append(align(topk_ids, num_slots, block_m, expert_map=expert_map))
                continue
            alignment, launches = device.align_launches(
                topk_ids, num_slots, block_m, expert_map=expert_map, target=INTERPRET, tile=tile
            )
            for launch in launches:
                launch.run()
            results.append(alignment)
    for name in _TENSORS:
        one, other = (getattr(result, name) for result in results)
        assert one is other is None or guards.same_bits(one, other), name
    return results[0]


def check(alignment: Alignment, expected: Alignment) -> None:
    for name in _TENSORS:
        one, other = getattr(alignment, name), getattr(expected, name)
        assert (one is None) == (other is None), name
        if one is not None:
            assert one.dtype == torch.int32
            assert torch.equal(one, other), f"{name}: {one.tolist()} {other.tolist()}"
    assert alignment.num_rows == expected.num_rows
    assert alignment.is_identity == expected.is_identity


def draw_ids(num_tokens: int, top_k: int, num_experts: int, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(
        -1, num_experts, (num_tokens, top_k), generator=generator, dtype=torch.int32
    )


@pytest.mark.parametrize("once_pairs", [0, 1000], ids=["chunks", "once"])
@pytest.mark.parametrize(
    ("num_tokens", "top_k", "num_slots", "block_m"),
    [
        (1, 1, 1, 1),
        (1, 1, 3, 16),
        (4, 4, 7, 16),  # exactly a chunk
        (5, 3, 7, 5),
        (17, 1, 8, 16),
        (20, 4, 9, 3),
        (33, 3, 5, 32),
        (40, 2, 63, 16),
        (40, 2, 64, 4),  # the slot of pairs that are elsewhere doubles the tile
    ],
)
def test_align_equals_a_loop_over_pairs(
    num_tokens: int, top_k: int, num_slots: int, block_m: int, once_pairs: int
) -> None:
    topk_ids = draw_ids(num_tokens, top_k, num_slots, num_tokens)
    expected = formulas.align(topk_ids, num_slots, block_m)
    check(run(topk_ids, num_slots, block_m, tile=_SMALL | {"once_pairs": once_pairs}), expected)


@pytest.mark.parametrize("num_tokens", [6, 80])
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_with_a_map_of_experts(num_tokens: int, dtype: torch.dtype) -> None:
    topk_ids = draw_ids(num_tokens, 4, 20, 3).to(dtype)
    expert_map = torch.full((20,), -1, dtype=torch.int32)
    expert_map[::3] = torch.arange(7, dtype=torch.int32).flip(0)
    expected = formulas.align(topk_ids, 7, 16, expert_map=expert_map)
    check(run(topk_ids, 7, 16, expert_map), expected)


@pytest.mark.parametrize("once_pairs", [0, 1000], ids=["chunks", "once"])
@pytest.mark.parametrize("slot", [-1, 0, 6, 7, 99])
def test_all_pairs_in_one_slot_or_nowhere(slot: int, once_pairs: int) -> None:
    topk_ids = torch.full((20, 3), slot, dtype=torch.int32)
    expected = formulas.align(topk_ids, 7, 16)
    check(run(topk_ids, 7, 16, tile=_SMALL | {"once_pairs": once_pairs}), expected)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("is_mapped", [False, True])
def test_few_pairs_are_not_sorted(dtype: torch.dtype, is_mapped: bool) -> None:
    topk_ids = draw_ids(3, 4, 50, 5).to(dtype)
    expert_map = torch.arange(49, -1, -1, dtype=torch.int32) if is_mapped else None
    alignment = run(topk_ids, 50, 16, expert_map)
    assert alignment.is_identity
    check(alignment, formulas.align(topk_ids, 50, 16, expert_map=expert_map))


def test_few_pairs_that_are_slots_already_need_no_launch() -> None:
    topk_ids = draw_ids(3, 4, 50, 5)
    _, launches = device.align_launches(topk_ids, 50, 16, expert_map=None, target=INTERPRET)
    assert launches == []


def test_without_tokens_there_are_no_rows() -> None:
    alignment = run(torch.empty(0, 4, dtype=torch.int32), 8, 16)
    assert alignment.num_rows == 0


def test_ids_may_have_any_strides() -> None:
    topk_ids = draw_ids(6, 60, 9, 1).T[::2, 1::2]
    expected = formulas.align(topk_ids, 9, 16)
    check(run(topk_ids, 9, 16), expected)


@pytest.mark.parametrize("once_pairs", [0, 1000], ids=["chunks", "once"])
def test_nothing_is_read_past_the_pairs(once_pairs: int) -> None:
    """What lies there is an id like others when there are more than WILD_INT slots."""
    num_slots = guards.WILD_INT + 20
    topk_ids = draw_ids(21, 3, num_slots, 2)
    tile = _SMALL | {"once_pairs": once_pairs}
    check(run(topk_ids, num_slots, 4, tile=tile), formulas.align(topk_ids, num_slots, 4))


def test_a_slot_out_of_range_is_dropped() -> None:
    topk_ids = draw_ids(20, 3, 9, 2)
    expert_map = torch.arange(9, dtype=torch.int32)
    expected = formulas.align(topk_ids, 7, 4, expert_map=expert_map)
    check(run(topk_ids, 7, 4, expert_map), expected)


def test_shipped_sizes() -> None:
    topk_ids = draw_ids(300, 4, 60, 8)
    check(run(topk_ids, 60, 64), formulas.align(topk_ids, 60, 64))
