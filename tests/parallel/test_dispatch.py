"""Dispatch and combine against a dense reference in float64, and against one rank bit for bit."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from moeserve.experts.mapping import SlotMap
from moeserve.parallel.all_gather import AllGatherDispatcher
from moeserve.parallel.all_to_all import AllToAllDispatcher
from moeserve.parallel.dispatcher import Dispatched, StepSizes, TokenDispatcher
from moeserve.parallel.groups import ParallelGroups
from moeserve.parallel.local import LocalDispatcher
from moeserve_kernels.ops import Ops, get_ops
from moeserve_placement import Placement

LAYER = 3
OPS = get_ops("invariant")
Transport = Callable[[ParallelGroups, int, Ops], TokenDispatcher]


@pytest.fixture(params=[AllToAllDispatcher, AllGatherDispatcher], ids=lambda cls: cls.name)
def transport(request: pytest.FixtureRequest) -> Transport:
    """Each transport between ranks in turn."""
    made: Transport = request.param
    return made


@dataclass(frozen=True, kw_only=True)
class Case:
    """A layer's input on all ranks, and experts ``y = tanh(scale[e] * x)``, scale [E, H]."""

    placement: Placement
    scale: torch.Tensor
    hidden_states: list[torch.Tensor]
    topk_ids: list[torch.Tensor]
    topk_weights: list[torch.Tensor]

    @property
    def sizes(self) -> StepSizes:
        counts = tuple(len(tokens) for tokens in self.hidden_states)
        return StepSizes(num_tokens=counts, has_work=True, stop=False)

    def pairs(self, rank: int, rows: Dispatched) -> torch.Tensor:
        """[R, k, H], computed by the rank's experts; NaN where the pair is elsewhere."""
        held = [-1 if e is None else e for e in self.placement.layers[LAYER][rank]]
        experts = torch.tensor(held, dtype=torch.int64)
        scale = self.scale[experts[rows.slots.clamp(min=0)]]
        pairs = torch.tanh(scale * rows.hidden_states.unsqueeze(1))
        return pairs.masked_fill((rows.slots < 0).unsqueeze(2), torch.nan)

    def dense(self, rank: int) -> torch.Tensor:
        """[T, H] in float64, without any dispatch."""
        hidden = self.hidden_states[rank].double().unsqueeze(1)
        pairs = torch.tanh(self.scale[self.topk_ids[rank]].double() * hidden)
        return (pairs * self.topk_weights[rank].double().unsqueeze(2)).sum(1)


def random_placement(rng: random.Random, num_experts: int, num_ranks: int) -> Placement:
    """Experts dealt at random, some copied, free slots, ranks that may have nothing at all."""
    ranks: list[list[int | None]] = [[] for _ in range(num_ranks)]
    for expert in range(num_experts):
        for rank in rng.sample(range(num_ranks), rng.choice((1, 1, 2, num_ranks))):
            ranks[rank].append(expert)
    for slots in ranks:
        slots += [None] * rng.choice((0, 0, 2))
        rng.shuffle(slots)
    layers = {LAYER: tuple(tuple(slots) for slots in ranks)}
    return Placement(num_experts=num_experts, layers=layers)


def make_case(seed: int, num_tokens: list[int], dtype: torch.dtype, *, is_hot: bool) -> Case:
    """A random case; hot: every token goes to the experts of rank 0."""
    rng = random.Random(seed)
    torch.manual_seed(seed)
    num_experts = rng.randint(1, 9)
    placement = random_placement(rng, num_experts, len(num_tokens))
    pool = [e for e in placement.layers[LAYER][0] if e is not None] if is_hot else []
    pool = pool or list(range(num_experts))
    top_k = rng.randint(1, len(pool))
    hidden_size = rng.randint(1, 9)
    ids = [[rng.sample(pool, top_k) for _ in range(count)] for count in num_tokens]
    return Case(
        placement=placement,
        scale=torch.randn(num_experts, hidden_size).to(dtype),
        hidden_states=[torch.randn(count, hidden_size).to(dtype) for count in num_tokens],
        topk_ids=[torch.tensor(rows, dtype=torch.int64).view(-1, top_k) for rows in ids],
        topk_weights=[torch.rand(count, top_k) for count in num_tokens],
    )


def run_rank(case: Case, groups: ParallelGroups, transport: Transport) -> dict[str, torch.Tensor]:
    """Both forms of ``combine`` on one rank, and what the rank received."""
    rank = groups.rank
    slot_map = SlotMap(case.placement, rank)
    dispatcher = transport(groups, slot_map.slots_per_rank, OPS)
    physical_ids = slot_map.select(LAYER, case.topk_ids[rank])
    rows = dispatcher.dispatch(
        case.hidden_states[rank], physical_ids, case.topk_weights[rank], case.sizes
    )
    pairs = case.pairs(rank, rows)
    weighted = pairs.float() * rows.topk_weights.unsqueeze(2)
    sums = weighted.nan_to_num(0.0).sum(1).to(pairs.dtype)
    return {
        "slots": rows.slots,
        "owner": slot_map.owner(physical_ids),
        "sums": dispatcher.combine(sums, rows.handle),
        "pairs": dispatcher.combine(pairs, rows.handle),
    }


def run_alone(case: Case, rank: int) -> torch.Tensor:
    """The rank's tokens with all experts on one rank: pairs, by ``LocalDispatcher``."""
    everything = Placement.linear(case.placement.num_experts, 1, [LAYER])
    local = LocalDispatcher(OPS)
    rows = local.dispatch(
        case.hidden_states[rank],
        SlotMap(everything, 0).select(LAYER, case.topk_ids[rank]),
        case.topk_weights[rank],
        StepSizes(num_tokens=(len(case.hidden_states[rank]),), has_work=True, stop=False),
    )
    alone = replace(case, placement=everything)
    return local.combine(alone.pairs(0, rows), rows.handle)


def check_case(world: Any, case: Case, transport: Transport) -> None:
    """All that must hold for one case."""
    results = world.run(lambda groups: run_rank(case, groups, transport))
    tolerance = 1e-5 if case.scale.dtype == torch.float32 else 5e-2
    for rank, result in enumerate(results):
        for form in ("sums", "pairs"):
            assert result[form].dtype == case.scale.dtype
            torch.testing.assert_close(
                result[form].double(), case.dense(rank), rtol=tolerance, atol=tolerance
            )
        assert torch.equal(result["pairs"], run_alone(case, rank))
    check_rows(results)


def check_rows(results: list[dict[str, torch.Tensor]]) -> None:
    """Each token travels once to each rank that needs it, and each pair is computed once."""
    owners = torch.cat([result["owner"] for result in results])
    for rank, result in enumerate(results):
        assert len(result["slots"]) == int((owners == rank).any(1).sum())
        assert int((result["slots"] >= 0).sum()) == int((owners == rank).sum())


@settings(
    max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(data=st.data())
def test_any_routing_over_any_placement_equals_the_dense_layer(
    world: Any, transport: Transport, data: st.DataObject
) -> None:
    """Ranks with different and with no tokens, copies, free slots, hot ranks, both dtypes."""
    size = world.size
    case = make_case(
        data.draw(st.integers(0, 2**32 - 1), label="seed"),
        data.draw(st.lists(st.integers(0, 7), min_size=size, max_size=size), label="num_tokens"),
        data.draw(st.sampled_from([torch.float32, torch.bfloat16]), label="dtype"),
        is_hot=data.draw(st.booleans(), label="is_hot"),
    )
    check_case(world, case, transport)


def test_all_pairs_of_the_busy_rank_may_go_to_one_other(world: Any, transport: Transport) -> None:
    """Rank 0 holds all experts, the last rank all tokens."""
    case = make_case(1, [0] * (world.size - 1) + [300], torch.float32, is_hot=False)
    ranks = (tuple(range(case.placement.num_experts)), *[()] * (world.size - 1))
    all_on_one = Placement(num_experts=case.placement.num_experts, layers={LAYER: ranks})
    check_case(world, replace(case, placement=all_on_one), transport)


def test_a_step_without_tokens_is_harmless(world: Any, transport: Transport) -> None:
    """No rank has a token: empty tensors of the right shape come back."""
    case = make_case(2, [0] * world.size, torch.float32, is_hot=False)
    check_case(world, case, transport)


def test_partial_sums_do_not_depend_on_timing(world: Any, transport: Transport) -> None:
    """The same step gives the same bits whoever comes last."""
    case = make_case(3, [50] * world.size, torch.float32, is_hot=False)

    def late(groups: ParallelGroups, last: int) -> torch.Tensor:
        time.sleep(0.005 * (groups.rank == last))
        return run_rank(case, groups, transport)["sums"]

    first, *others = [world.run(partial(late, last=attempt % world.size)) for attempt in range(8)]
    for other in others:
        assert all(torch.equal(a, b) for a, b in zip(first, other, strict=True))
