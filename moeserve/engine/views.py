"""What may be asked of a rank, and how the answer is made: functions without state of their own."""

from __future__ import annotations

from collections.abc import Callable

from moeserve import messages
from moeserve.engine.runner import ModelRunner
from moeserve.engine.scheduler import Scheduler
from moeserve.experts.load import LoadCounter
from moeserve.experts.store import ExpertStore
from moeserve.experts.traffic import Traffic


def stats(rank: int, scheduler: Scheduler, traffic: Traffic) -> Callable[[int], messages.RankStats]:
    """The rank's gauges and counters, given the step number."""

    def view(step: int) -> messages.RankStats:
        now = scheduler.stats()
        return messages.RankStats(
            rank=rank,
            step=step,
            num_running=now.num_running,
            num_waiting=now.num_waiting,
            num_waiting_tokens=now.num_waiting_tokens,
            kv_usage=now.kv_usage,
            num_preemptions=now.num_preemptions,
            prefix_cache_queries=now.prefix_cache_queries,
            prefix_cache_hits=now.prefix_cache_hits,
            iteration_tokens=now.iteration_tokens,
            rank_tokens=traffic.num_pairs,
            dispatches=dict(traffic.dispatches),
        )

    return view


def placement(store: ExpertStore) -> Callable[[], object]:
    """Which expert is in which slot now: by layer, by rank, the experts of its slots."""
    return lambda: {
        "num_experts": store.slot_map.num_experts,
        "layers": {str(layer): ranks for layer, ranks in store.slot_map.layers.items()},
    }


def load(counter: LoadCounter, traffic: Traffic) -> Callable[[], object]:
    """Tokens that this rank's requests sent to each logical expert, by layer; what it computed.

    ``pairs``: (token, expert) pairs that this rank's experts computed, by layer; ``compute_s``:
    seconds that took; ``steps``: forward passes, the same number on all ranks.
    """
    return lambda: {
        "layers": dict(zip(map(str, counter.layers), counter.snapshot().tolist(), strict=True)),
        "pairs": traffic.pairs.tolist(),
        "compute_s": traffic.compute_s,
        "steps": traffic.dispatches.total() // len(counter.layers),
    }


def check(scheduler: Scheduler, runner: ModelRunner) -> Callable[[], str | None]:
    """What is wrong with the accounts, or None. Blocks in use without a request are wrong too."""

    def view() -> str | None:
        try:
            scheduler.check()
            runner.check()
        except (RuntimeError, AssertionError) as error:
            return str(error)
        now = scheduler.stats()
        if now.num_running == now.num_waiting == 0 and now.kv_usage > 0:
            return f"no request, but {now.kv_usage:.2%} of the KV blocks are in use"
        return None

    return view
