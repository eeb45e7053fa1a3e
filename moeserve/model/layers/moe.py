"""The mixture-of-experts layer: route, send, compute, bring home."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from moeserve.experts.load import LoadCounter
from moeserve.experts.split import CopyChooser
from moeserve.experts.store import ExpertStore
from moeserve.experts.traffic import Traffic
from moeserve.model.layers.forced_router import ForcedRouting
from moeserve.model.layers.mlp import SharedExpert
from moeserve.model.layers.router import Router
from moeserve.parallel.dispatcher import Dispatched, StepSizes, TokenDispatcher
from moeserve_kernels import Ops


@dataclass(frozen=True, kw_only=True, slots=True)
class ExpertRuntime:
    """What the MoE layers of one rank share.

    dispatcher: the transport for a step, the same answer on every rank; pairs_travel_home: results
    are added up at home in the order of ``topk_ids`` instead of as partial sums, so that their
    bits do not depend on where an expert is (batch-invariant mode); forced: for benchmarks, what
    stands in for the model's gates.
    """

    store: ExpertStore
    chooser: CopyChooser
    load: LoadCounter
    traffic: Traffic
    dispatcher: Callable[[StepSizes], TokenDispatcher]
    pairs_travel_home: bool
    forced: ForcedRouting | None = None


class MoeLayer:
    """The experts of one model layer, over all ranks."""

    def __init__(
        self,
        layer: int,
        router: Router,
        shared_expert: SharedExpert | None,
        runtime: ExpertRuntime,
        ops: Ops,
    ) -> None:
        self._layer = layer
        self._router = router
        self._shared_expert = shared_expert
        self._runtime = runtime
        self._ops = ops

    def __call__(self, hidden_states: torch.Tensor, sizes: StepSizes) -> torch.Tensor:
        """[T, H] -> [T, H]. All ranks call this together, those without tokens too (T = 0)."""
        runtime = self._runtime
        topk_weights, topk_ids = self._router(hidden_states)
        runtime.load.count(self._layer, topk_ids)
        physical_ids = runtime.chooser.select(self._layer, topk_ids, sizes.total)
        dispatcher = runtime.dispatcher(sizes)
        sent = dispatcher.dispatch(hidden_states, physical_ids, topk_weights, sizes)
        start = time.perf_counter()
        computed = self._compute(sent)
        seconds = time.perf_counter() - start
        runtime.traffic.count(self._layer, dispatcher.name, sent.slots, seconds)
        output = dispatcher.combine(computed, sent.handle)
        if self._shared_expert is not None:
            output = output + self._shared_expert(hidden_states)
        return output

    def _compute(self, sent: Dispatched) -> torch.Tensor:
        """This rank's share: [R, H] summed over its pairs, or [R, k, H] pair by pair."""
        w13 = self._runtime.store.w13(self._layer)
        w2 = self._runtime.store.w2(self._layer)
        if self._runtime.pairs_travel_home:
            return self._ops.moe_pairs(sent.hidden_states, w13, w2, sent.slots)
        return self._ops.moe_ffn(sent.hidden_states, w13, w2, sent.slots, sent.topk_weights)
