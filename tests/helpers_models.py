"""One rank with all experts at home, and stepping its model through sequences."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from pathlib import Path

import torch

from moeserve.experts.load import LoadCounter
from moeserve.experts.split import CopyChooser
from moeserve.experts.store import ExpertStore
from moeserve.experts.traffic import Traffic
from moeserve.model.batch import Batch
from moeserve.model.kv_cache import KVCache
from moeserve.model.layers.moe import ExpertRuntime
from moeserve.model.loader import load_experts, open_weights
from moeserve.model.registry import Model, build
from moeserve.model.spec import ModelSpec, read_spec
from moeserve.parallel.dispatcher import StepSizes
from moeserve.parallel.local import LocalDispatcher
from moeserve_kernels import get_ops
from moeserve_placement import Placement

BLOCK_SIZE = 4
NUM_BLOCKS = 128


@dataclass
class Rank:
    """A model with all experts at home, and one KV cache."""

    spec: ModelSpec
    model: Model
    kv: KVCache
    load: LoadCounter
    free_blocks: list[int] = field(default_factory=lambda: list(range(NUM_BLOCKS))[::-1])

    def step(
        self, *work: tuple[Sequence[int], int, Sequence[int]], last_only: bool = False
    ) -> torch.Tensor:
        """Runs one batch; logits of every token, float32 [T, vocab], or of each request's last.

        work: per request its new tokens, how many it had before, and its blocks.
        """
        lens = [len(tokens) for tokens, _, _ in work]
        positions = [range(start, start + len(tokens)) for tokens, start, _ in work]
        width = max((len(blocks) for _, _, blocks in work), default=1)
        table = [list(blocks) + [0] * (width - len(blocks)) for _, _, blocks in work]
        slots = [
            blocks[p // BLOCK_SIZE] * BLOCK_SIZE + p % BLOCK_SIZE
            for (_, _, blocks), places in zip(work, positions, strict=True)
            for p in places
        ]
        batch = Batch(
            input_ids=_ids([t for tokens, _, _ in work for t in tokens]),
            positions=_ids([p for places in positions for p in places]),
            is_decode=torch.zeros(sum(lens), dtype=torch.bool),
            slot_mapping=_ids(slots),
            block_table=torch.tensor(table, dtype=torch.int64).view(len(work), width),
            query_lens=tuple(lens),
            seq_lens=tuple(places.stop for places in positions),
            logits_indices=_ids(list(accumulate(lens))) - 1
            if last_only
            else torch.arange(sum(lens)),
            sizes=StepSizes(num_tokens=(sum(lens),), has_work=True, stop=False),
        )
        return self.model.forward(batch, self.kv)

    def blocks(self, num_tokens: int) -> list[int]:
        """Blocks for a sequence, in an order that is not that of memory."""
        return [self.free_blocks.pop() for _ in range(-(-num_tokens // BLOCK_SIZE))]


def _ids(values: list[int]) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int64)


def make_rank(
    path: Path,
    mode: str = "cpu",
    dtype: torch.dtype = torch.float32,
    *,
    load_format: str = "auto",
    placement: Placement | None = None,
) -> Rank:
    """The checkpoint at ``path``, loaded as one rank would."""
    spec = read_spec(path)
    placement = placement or Placement.linear(spec.num_experts, 1, spec.moe_layers)
    store = ExpertStore(
        placement,
        0,
        hidden_size=spec.hidden_size,
        intermediate_size=spec.moe_intermediate_size,
        dtype=dtype,
    )
    source = open_weights(path, spec, dtype, load_format=load_format)
    load_experts(source, {layer: store.logical(layer) for layer in store.layers}, store.load)
    store.check()
    ops, load = get_ops(mode), LoadCounter(spec.moe_layers, spec.num_experts)
    dispatcher = LocalDispatcher(ops)
    runtime = ExpertRuntime(
        store=store,
        chooser=CopyChooser(store, lambda rows, counts: rows, 1),
        load=load,
        traffic=Traffic(spec.moe_layers),
        dispatcher=lambda sizes: dispatcher,
        pairs_travel_home=mode == "invariant",
    )
    model = build(spec, source, ops, runtime)
    kv = KVCache.allocate(spec, NUM_BLOCKS, BLOCK_SIZE, dtype)
    return Rank(spec=spec, model=model, kv=kv, load=load)
