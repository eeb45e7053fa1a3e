"""Admission and the choice of a rank, without any process."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moeserve.api.admission import Admission, Reservation
from moeserve.api.errors import ApiError
from moeserve.api.rank_choice import RankChoice
from moeserve.config import SchedulerConfig


def _admission(seats: int = 2, **limits: int) -> Admission:
    return Admission(SchedulerConfig(**limits), seats)


def test_no_limits_by_default() -> None:
    admission = _admission()
    for _ in range(1000):
        admission.reserve(64, 10**6)


def test_seats_and_queue() -> None:
    admission = _admission(max_num_queued_reqs=1)
    inside = [admission.reserve(1, 1) for _ in range(3)]
    with pytest.raises(ApiError) as caught:
        admission.reserve(1, 1)
    assert (caught.value.status, caught.value.retry_after) == (503, 1)
    inside[0].release()
    admission.reserve(1, 1)


def test_the_ranks_own_queue_counts() -> None:
    admission = _admission(seats=100, max_num_queued_reqs=3)
    admission.num_reported_waiting = 3  # KV memory ran out before the seats did
    with pytest.raises(ApiError):
        admission.reserve(1, 1)
    admission.num_reported_waiting = 0
    admission.reserve(1, 1)


def test_tokens_are_corrected_after_tokenising() -> None:
    admission = _admission(max_num_queued_tokens=100)
    first = admission.reserve(1, 60)
    second = admission.reserve(1, 10)
    with pytest.raises(ApiError):
        second.resize(41)
    second.release()
    assert admission.num_waiting_tokens == 60
    first.start(60)
    assert admission.num_waiting_tokens == 0


@given(
    steps=st.lists(
        st.tuples(st.sampled_from("+-srf"), st.integers(0, 5), st.integers(0, 50)), max_size=60
    )
)
def test_accounts_are_exact(steps: list[tuple[str, int, int]]) -> None:
    admission = _admission(max_num_queued_reqs=10, max_num_queued_tokens=200)
    held: list[Reservation] = []
    for kind, which, amount in steps:
        try:
            if kind == "+":
                held.append(admission.reserve(which + 1, amount))
            elif held:
                reservation = held[which % len(held)]
                match kind:
                    case "-":
                        reservation.release()
                    case "s":
                        reservation.start(amount)
                    case "r":
                        reservation.resize(amount)
                    case "f":
                        reservation.finish()
        except ApiError:
            pass
        assert admission.num_sequences >= 0
        assert admission.num_waiting_tokens >= 0
        assert admission.num_sequences <= 2 + 10
    for reservation in held:
        reservation.release()
        reservation.release()
    assert (admission.num_sequences, admission.num_waiting_tokens) == (0, 0)


def test_a_known_prefix_goes_where_it_is() -> None:
    choice = RankChoice(4)
    prefix = list(range(200))
    owner = choice.choose(prefix, "", [0, 0, 0, 0])
    for tail in range(10):
        assert choice.choose([*prefix, tail], "", [1, 1, 1, 1]) == owner
    assert choice.choose([*prefix, 1], "", [50 if r == owner else 0 for r in range(4)]) != owner


def test_salts_share_nothing() -> None:
    choice = RankChoice(2)
    owner = choice.choose(list(range(100)), "a", [0, 0])
    assert choice.choose(list(range(100)), "b", [0, 0]) != owner


def test_short_prompts_spread() -> None:
    choice = RankChoice(3)
    loads = [0.0, 0.0, 0.0]
    for i in range(30):
        loads[choice.choose([i], "", loads)] += 1
    assert loads == [10, 10, 10]


@given(
    prompts=st.lists(st.lists(st.integers(0, 1), max_size=130), max_size=30),
    num_ranks=st.integers(1, 5),
)
def test_any_prompt_gets_a_rank(prompts: list[list[int]], num_ranks: int) -> None:
    choice = RankChoice(num_ranks)
    loads = [0.0] * num_ranks
    for prompt in prompts:
        rank = choice.choose(prompt, "", loads)
        assert 0 <= rank < num_ranks
        loads[rank] += 1
