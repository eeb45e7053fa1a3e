"""Topology, plans and the npz form: what they accept and what they say."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from helpers_placement import topologies
from hypothesis import given
from hypothesis import strategies as st

from moeserve_placement.placement import Placement
from moeserve_placement.placement_npz import load_npz, save_npz
from moeserve_placement.plan import apply_moves
from moeserve_placement.planners.base import linear_table
from moeserve_placement.slot_table import even_shares, slot_table, to_placement
from moeserve_placement.topology import LinkCosts, Topology


@given(st.integers(1, 9).flatmap(lambda n: st.tuples(st.just(n), topologies(n))))
def test_linear_fits_every_topology_and_round_trips(case: tuple[int, Topology]) -> None:
    experts, topology = case
    table = linear_table(experts, topology)[None]
    placement = to_placement(table, [3], num_experts=experts, topology=topology)
    assert (slot_table(placement, [3], topology=topology) == table).all()
    assert ((table[0] >= 0).sum(1) <= topology.usable_slots).all()


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"slots_per_rank": ()}, "slots_per_rank"),
        ({"slots_per_rank": (1, -1)}, "slots_per_rank"),
        ({"slots_per_rank": (1, 1), "node_of_rank": (0, 2)}, "numbered 0, 1, 2"),
        ({"slots_per_rank": (1, 1), "node_of_rank": (0,)}, "one per rank"),
        ({"slots_per_rank": (1,), "speed_of_rank": (0.0,)}, "speed_of_rank"),
        ({"slots_per_rank": (1,), "alive": (False,)}, "at least one rank"),
        ({"slots_per_rank": (1,), "bytes_per_expert": 0}, "bytes_per_expert"),
    ],
)
def test_impossible_topologies_are_named(options: dict[str, object], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        Topology(**options)  # type: ignore[arg-type]


def test_speeds_have_mean_one_over_ranks_alive() -> None:
    topology = Topology(
        slots_per_rank=(1, 1, 1), speed_of_rank=(1.0, 3.0, 9.0), alive=(True, True, False)
    )
    np.testing.assert_allclose(topology.speeds, [0.5, 1.5, 0.0])
    assert topology.without([0]).usable_slots.tolist() == [0, 1, 0]


def test_negative_link_cost_is_refused() -> None:
    with pytest.raises(ValueError, match=r"link_costs\.fabric"):
        LinkCosts(fabric=-1.0)


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


@pytest.mark.parametrize("content", [b"", b"PK\x03\x04", b"no", b"\x80\x04N."])
def test_broken_npz_is_one_clear_error(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "bad.npz"
    path.write_bytes(content)
    with pytest.raises(ValueError, match=r"placement file .*bad\.npz"):
        load_npz(path)


def test_npz_of_other_arrays_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "other.npz"
    np.savez(path, slots=np.zeros(3))
    with pytest.raises(ValueError, match="is not a placement"):
        load_npz(path)
    np.savez(path, slots=np.array([object()], dtype=object))
    with pytest.raises(ValueError, match=r"other\.npz"):
        load_npz(path)


def test_moves_of_another_placement_are_refused() -> None:
    from moeserve_placement.plan import Move, SlotWrite

    write = SlotWrite(rank=0, slot=0, expert=1, replaces=1, source_rank=1, link="node", num_bytes=1)
    with pytest.raises(ValueError, match="does not hold 1"):
        apply_moves(Placement.linear(2, 2, [0]), [Move(layer=0, writes=(write,))])
