"""Made-up loads are exactly what they say, for any number of experts, choices and ranks."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st

from moeserve.model.layers.forced_router import ForcedRouting, make_routing, table_of
from moeserve_placement.traces.synth import linear_ranks


def routing(
    workload: str, *, num_experts: int = 16, top_k: int = 2, num_ranks: int = 2, num_layers: int = 3
) -> ForcedRouting:
    """A routing of so many layers, every other layer of the model."""
    return make_routing(
        workload,
        layers=tuple(range(1, 2 * num_layers, 2)),
        num_experts=num_experts,
        top_k=top_k,
        num_ranks=num_ranks,
    )


def counts_of(forced: ForcedRouting, *, layer: int = 1, rank: int = 0, sizes: list[int]):
    """How often each expert is chosen in steps of so many tokens, int64 [num_experts]."""
    router = forced.router(layer, rank)
    ids = [router(torch.zeros(size, 4))[1] for size in sizes]
    return np.bincount(torch.cat(ids).flatten(), minlength=forced.chances.shape[-1])


@st.composite
def chances(draw: st.DrawFn) -> tuple[np.ndarray, int]:
    """Chances of up to 40 experts with sum top_k, none above 1."""
    num_experts = draw(st.integers(2, 40))
    top_k = draw(st.integers(1, num_experts - 1))
    heat = np.array(draw(st.lists(st.floats(0, 1), min_size=num_experts, max_size=num_experts)))
    assume(heat.sum() > 0.1)
    wanted = heat * top_k / heat.sum()
    for _ in range(2 * num_experts):  # what is above 1 goes to the others
        over = np.maximum(wanted - 1, 0).sum()
        room = np.maximum(1 - wanted, 0)
        wanted = np.minimum(wanted, 1) + over * room / room.sum()
    return np.clip(wanted, 0, 1), top_k


@given(chances())
def test_a_table_has_every_expert_as_often_as_asked_and_no_expert_twice_in_a_row(
    case: tuple[np.ndarray, int],
) -> None:
    wanted, top_k = case
    table = table_of(wanted, top_k).numpy()
    found = np.bincount(table.ravel(), minlength=wanted.size)
    assert table.shape[1] == top_k
    assert np.abs(found - wanted * len(table)).max() <= 1 + 1e-6  # whole rows
    assert (np.diff(np.sort(table, axis=1), axis=1) > 0).all()


@given(chances(), st.integers(1, 300), st.integers(0, 5000))
def test_short_batches_are_close_to_the_shares_too(
    case: tuple[np.ndarray, int], num_tokens: int, start: int
) -> None:
    wanted, top_k = case
    table = table_of(wanted, top_k).numpy()
    rows = table[(np.arange(num_tokens) + start) % len(table)]
    found = np.bincount(rows.ravel(), minlength=wanted.size)
    assert np.abs(found - wanted * num_tokens).max() < 6


def test_balanced_is_even_on_every_expert() -> None:
    forced = routing("balanced", num_experts=60, top_k=4, num_ranks=7)
    period = table_of(forced.chances[0, 0], 4).shape[0]
    found = counts_of(forced, sizes=[period // 4] * 4)
    assert set(found) == {period * 4 // 60}


def test_steps_of_any_size_go_on_where_the_last_one_stopped() -> None:
    forced = routing("zipf:1.2")
    assert (counts_of(forced, sizes=[96]) == counts_of(forced, sizes=[1, 0, 30, 65])).all()


@pytest.mark.parametrize(("num_experts", "num_ranks"), [(16, 2), (17, 3), (64, 8)])
def test_hot_rank_has_all_load_on_the_experts_that_rank_0_gets(
    num_experts: int, num_ranks: int
) -> None:
    forced = routing("hot-rank", num_experts=num_experts, num_ranks=num_ranks)
    ranks = linear_ranks(num_experts, num_ranks)
    for layer in forced.layers:
        found = counts_of(forced, layer=layer, rank=1, sizes=[500])
        assert found[ranks > 0].sum() == 0
        assert found.sum() == 1000


def test_shares_in_the_name_are_kept() -> None:
    ranks = linear_ranks(16, 2)
    found = counts_of(routing("hot-rank:0.75"), sizes=[4096])
    assert found[ranks == 0].sum() == 0.75 * found.sum()
    found = counts_of(routing("hot-expert:0.5"), sizes=[4096])
    assert found[0] == 2048
    found = counts_of(routing("spread-hot:0.5"), sizes=[4096])
    assert found[[0, 8]].tolist() == [2048, 2048]


def test_hot_expert_is_in_every_token() -> None:
    assert counts_of(routing("hot-expert"), sizes=[333])[0] == 333


def test_empty_rank_gets_nothing() -> None:
    found = counts_of(routing("empty-rank", num_ranks=4), sizes=[4096])
    assert found[:4].sum() == 0
    assert len(set(found[4:])) <= 2


def test_zipf_popularity_falls_as_asked_and_layers_differ() -> None:
    forced = routing("zipf:0.5", num_experts=64, top_k=2)
    falling = np.sort(forced.chances[0, 0])[::-1]
    assert falling[0] / falling[15] == pytest.approx(16**0.5)
    assert (forced.chances[0, 0] != forced.chances[0, 1]).any()


def test_rotating_goes_round_by_steps_with_or_without_tokens() -> None:
    forced = routing("rotating:2", num_experts=8, num_ranks=4)
    router = forced.router(1, 0)
    hot = [set((router(torch.zeros(size, 4))[1] // 2).flatten().tolist()) for size in [3] * 9]
    assert hot == [{0}, {0}, {1}, {1}, {2}, {2}, {3}, {3}, {0}]
    idle = forced.router(1, 1)
    for size in (0, 0):
        assert idle(torch.zeros(size, 4))[1].shape == (0, 2)
    assert set(idle(torch.zeros(5, 4))[1].flatten().tolist()) == {2, 3}


def test_burst_is_balanced_but_for_every_fourth_span() -> None:
    forced = routing("burst:10")
    assert [forced.phase(step) for step in (0, 9, 10, 29, 30, 39, 40)] == [0, 0, 1, 2, 3, 3, 0]
    assert (forced.chances[:3] == 1 / 8).all()
    assert (forced.chances[3, :, 8:] == 0).all()


def test_weights_are_even_and_ids_are_as_the_gate_gives_them() -> None:
    weights, ids = routing("balanced", top_k=4).router(3, 0)(torch.zeros(5, 4))
    assert (weights == 0.25).all() and weights.dtype == torch.float32
    assert ids.shape == (5, 4) and ids.dtype == torch.int64


def test_ranks_and_layers_do_not_walk_in_step() -> None:
    forced = routing("balanced")
    first = [forced.router(layer, r)(torch.zeros(1, 4))[1] for layer in (1, 3) for r in (0, 1)]
    assert len({tuple(ids.flatten().tolist()) for ids in first}) > 1


@pytest.mark.parametrize(
    ("workload", "text"),
    [
        ("warm", "must start with one of balanced, zipf"),
        ("balanced:2", "takes no number"),
        ("hot-rank:1.5", r"a number in \[0, 1\]"),
        ("hot-rank:x", r"a number in \[0, 1\]"),
        ("rotating:0", "a whole number"),
        ("rotating:2.5", "a whole number"),
    ],
)
def test_wrong_names_are_refused_with_what_would_be_right(workload: str, text: str) -> None:
    with pytest.raises(ValueError, match=f"force_routing = '{workload}'.*{text}"):
        routing(workload)


@pytest.mark.parametrize(
    ("workload", "shape"),
    [
        ("hot-rank", {"num_experts": 4, "top_k": 3}),
        ("empty-rank", {"num_ranks": 1}),
        ("rotating", {"num_experts": 8, "num_ranks": 8}),
    ],
)
def test_loads_that_different_experts_per_token_do_not_allow_are_refused(
    workload: str, shape: dict[str, int]
) -> None:
    with pytest.raises(ValueError, match="a token chooses"):
        routing(workload, **shape)


@given(
    st.sampled_from(["balanced", "zipf", "hot-expert", "hot-rank", "spread-hot", "empty-rank"]),
    st.integers(2, 70),
    st.integers(1, 8),
    st.integers(1, 9),
)
def test_any_model_gets_what_is_asked_or_a_reason(
    workload: str, num_experts: int, top_k: int, num_ranks: int
) -> None:
    assume(top_k <= num_experts and num_ranks <= num_experts)
    try:
        forced = routing(workload, num_experts=num_experts, top_k=top_k, num_ranks=num_ranks)
    except ValueError as error:
        assert "force_routing" in str(error)
        return
    for wanted in forced.chances[0]:
        table = table_of(wanted, top_k).numpy()
        found = np.bincount(table.ravel(), minlength=num_experts)
        assert np.abs(found / len(table) - wanted).max() <= 1 / len(table) + 1e-9
