"""From a step's plan to the tensors of a forward pass: once, complete, frozen."""

from __future__ import annotations

import itertools

import torch

from moeserve.engine.plan import StepPlan
from moeserve.model.batch import Batch
from moeserve.parallel.dispatcher import StepSizes


class BatchBuilder:
    """Makes batches for a KV cache with blocks of ``block_size`` tokens."""

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size

    def build(self, plan: StepPlan, sizes: StepSizes) -> Batch:
        """The plan as tensors; an empty plan gives tensors of length 0."""
        positions: list[int] = []
        slots: list[int] = []
        is_decode: list[bool] = []
        logits_indices: list[int] = []
        size = self._block_size
        for scheduled in plan.requests:
            blocks = scheduled.block_ids
            logits_indices += [len(positions) + offset for offset in scheduled.logits_offsets]
            num_prompt_tokens = scheduled.request.num_prompt_tokens
            for position in range(scheduled.start, scheduled.seq_len):
                positions.append(position)
                is_decode.append(position >= num_prompt_tokens)
                slots.append(blocks[position // size] * size + position % size)
        token_ids = list(itertools.chain.from_iterable(r.token_ids for r in plan.requests))
        return Batch(
            input_ids=torch.tensor(token_ids, dtype=torch.int64),
            positions=torch.tensor(positions, dtype=torch.int64),
            is_decode=torch.tensor(is_decode, dtype=torch.bool),
            slot_mapping=torch.tensor(slots, dtype=torch.int64),
            block_table=self._block_table(plan),
            query_lens=tuple(r.num_tokens for r in plan.requests),
            seq_lens=tuple(r.seq_len for r in plan.requests),
            logits_indices=torch.tensor(logits_indices, dtype=torch.int64),
            sizes=sizes,
        )

    def _block_table(self, plan: StepPlan) -> torch.Tensor:
        """int64 [B, most blocks in use], padded with block 0, which is then never read."""
        used = [r.block_ids[: -(-r.seq_len // self._block_size)] for r in plan.requests]
        width = max(map(len, used), default=0)
        rows = [[*blocks, *itertools.repeat(0, width - len(blocks))] for blocks in used]
        return torch.tensor(rows, dtype=torch.int64).reshape(len(rows), width)
