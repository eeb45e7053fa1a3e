"""Decode steps: the sequences of a trace as an engine would decode them, several at a time.

A batch of B has B lanes. A lane decodes one sequence token by token, then takes the next one of
the trace; a step is one token of every busy lane. Towards the end lanes run dry, so the mean
number of tokens per step is lower than B: it is reported with every result.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass
from typing import Any

import numpy as np

from moeserve_placement.traces.trace import RoutingTrace

Array = np.ndarray[Any, Any]

MAX_BATCH = 1 << 14
_MAX_USED_BYTES = 2 << 30


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class DecodeSteps:
    """Tokens grouped into steps.

    topk_ids: integer [num_tokens, num_layers, top_k], in step order, lanes ascending in a step.
    offsets: int64 [num_steps + 1]; step s is the tokens [offsets[s], offsets[s + 1]).
    lanes: int64 [num_tokens], the lane of each token, in [0, batch).
    is_first: bool [num_tokens], whether the token begins its sequence.
    used: bool [num_steps, num_layers, num_experts], the experts that a step needs.
    """

    topk_ids: Array
    offsets: Array
    lanes: Array
    is_first: Array
    used: Array
    batch: int

    @property
    def num_steps(self) -> int:
        """Steps, each with at least one token."""
        return int(self.used.shape[0])

    @property
    def num_tokens(self) -> int:
        """Tokens of all steps."""
        return int(self.topk_ids.shape[0])

    @property
    def num_layers(self) -> int:
        """Layers of a step."""
        return int(self.used.shape[1])

    @property
    def num_experts(self) -> int:
        """Logical experts of each layer."""
        return int(self.used.shape[2])

    @property
    def top_k(self) -> int:
        """Experts that each token chose in each layer."""
        return int(self.topk_ids.shape[2])

    def tokens(self, step: int) -> slice:
        """Where the tokens of ``step`` are."""
        return slice(int(self.offsets[step]), int(self.offsets[step + 1]))


def decode_steps(trace: RoutingTrace, *, batch: int = 1) -> DecodeSteps:
    """The steps that decode the sequences of ``trace`` in their order, ``batch`` at a time.

    Raises:
        ValueError: ``batch`` is out of range, or the trace too large for a table of all uses.
    """
    if not 1 <= batch <= MAX_BATCH:
        raise ValueError(f"batch = {batch}: must be in [1, {MAX_BATCH}]")
    lane_of, start_of = _schedule(trace.sequence_lengths, batch)
    lengths = trace.sequence_lengths
    position = np.arange(trace.num_tokens) - np.repeat(trace.sequence_starts, lengths)
    step = np.repeat(start_of, lengths) + position
    lane = np.repeat(lane_of, lengths)
    order = np.lexsort((lane, step))
    step, topk_ids = step[order], trace.topk_ids[order]
    # Lanes are never idle while sequences wait, so every step up to the last has a token.
    num_steps = int(step[-1]) + 1
    num_bytes = num_steps * trace.num_layers * trace.num_experts
    if num_bytes > _MAX_USED_BYTES:
        raise ValueError(
            f"trace: {num_steps:,} steps, {trace.num_layers} layers, {trace.num_experts} experts "
            f"need {num_bytes:,} bytes, must be at most {_MAX_USED_BYTES:,}; take fewer sequences"
        )
    used = np.zeros((num_steps, trace.num_layers, trace.num_experts), dtype=np.bool_)
    used[step[:, None, None], np.arange(trace.num_layers)[:, None], topk_ids] = True
    return DecodeSteps(
        topk_ids=topk_ids,
        offsets=np.searchsorted(step, np.arange(num_steps + 1)).astype(np.int64),
        lanes=lane[order],
        is_first=(position == 0)[order],
        used=used,
        batch=batch,
    )


def split_sequences(
    trace: RoutingTrace, *, train_share: float = 0.5, seed: int = 0
) -> tuple[RoutingTrace, RoutingTrace]:
    """Training and scored sequences: disjoint, drawn at random, each in the order of the trace.

    Raises:
        ValueError: the share is not within (0, 1), the seed is negative, or the trace has fewer
            than two sequences.
    """
    if seed < 0:
        raise ValueError(f"seed = {seed}: must be 0 or more")
    if not 0 < train_share < 1:
        raise ValueError(f"train_share = {train_share}: must be above 0 and below 1")
    if trace.num_sequences < 2:
        raise ValueError(
            "the trace has one sequence: at least two are needed, to learn on some and score others"
        )
    num_train = min(max(round(train_share * trace.num_sequences), 1), trace.num_sequences - 1)
    order = np.random.default_rng(seed).permutation(trace.num_sequences)
    train, scored = np.sort(order[:num_train]), np.sort(order[num_train:])
    return trace.sequences(train), trace.sequences(scored)


def _schedule(lengths: Array, batch: int) -> tuple[Array, Array]:
    """Lane and first step of each sequence: the next sequence goes to the lane that is free first.

    Both int64 [num_sequences].
    """
    free = [(0, lane) for lane in range(batch)]
    lanes, starts = [], []
    for length in lengths.tolist():
        start, lane = heapq.heappop(free)
        lanes.append(lane)
        starts.append(start)
        heapq.heappush(free, (start + length, lane))
    return np.array(lanes, dtype=np.int64), np.array(starts, dtype=np.int64)
