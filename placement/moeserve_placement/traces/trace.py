"""Traces: which experts every token was routed to, or how many tokens each expert got.

``RoutingTrace`` keeps every choice of every token, ``CountTrace`` only sums per window. Both check
themselves, so a trace at hand is a valid one. Expert ids are logical: as in the checkpoint.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]

MAX_EXPERTS = 1 << 16
"""Experts of one layer. A bound, so that a damaged header can not ask for a giant histogram."""
MAX_LAYERS = 1 << 12
MAX_LAYER = (1 << 31) - 1
"""Highest model layer index."""
MAX_TOP_K = 1 << 10

_BLOCK_TOKENS = 1 << 14
"""Tokens checked or counted at a time: bounds the temporaries to a few megabytes."""


class TraceError(ValueError):
    """A trace, or a file that should hold one, is not valid. One line, which says what is wrong."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RoutingTrace:
    """The experts that each token of some sequences chose, layer by layer.

    topk_ids: integer [num_tokens, num_layers, top_k]; logical expert ids in [0, num_experts), no
        expert twice for one token and layer. Tokens are stored sequence by sequence.
    num_experts: logical experts of each layer.
    layer_ids: model layer index of each of the num_layers layers.
    sequence_lengths: int64 [num_sequences], each at least 1, with sum num_tokens.
    topk_weights: floating, finite, shape of topk_ids: the router's weights. None: not recorded.
    labels: one per sequence, for instance its domain. None: not recorded.
    arrival_times_s: float64 [num_sequences], seconds, any origin. None: not recorded.
    metadata: model name, source, licence and the like.

    Raises:
        TraceError: one of these does not hold; the text names the token, layer or sequence.
    """

    topk_ids: Array
    num_experts: int
    layer_ids: tuple[int, ...]
    sequence_lengths: Array
    topk_weights: Array | None = None
    labels: tuple[str, ...] | None = None
    arrival_times_s: Array | None = None
    metadata: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        check_num_experts(self.num_experts)
        _check_topk_ids(self.topk_ids, self.num_experts)
        check_layer_ids(self.layer_ids, self.topk_ids.shape[1])
        lengths = checked_lengths(self.sequence_lengths, self.num_tokens)
        object.__setattr__(self, "sequence_lengths", lengths)
        if self.topk_weights is not None:
            _check_weights(self.topk_weights, self.topk_ids)
        if self.arrival_times_s is not None:
            times = _arrival_times(self.arrival_times_s, self.num_sequences)
            object.__setattr__(self, "arrival_times_s", times)
        _check_labels(self.labels, self.num_sequences)
        check_metadata(self.metadata)

    @property
    def num_tokens(self) -> int:
        """Tokens of all sequences."""
        return int(self.topk_ids.shape[0])

    @property
    def num_layers(self) -> int:
        """Recorded MoE layers."""
        return int(self.topk_ids.shape[1])

    @property
    def top_k(self) -> int:
        """Experts that each token chose in each layer."""
        return int(self.topk_ids.shape[2])

    @property
    def num_sequences(self) -> int:
        """Sequences, one after the other in ``topk_ids``."""
        return int(self.sequence_lengths.shape[0])

    @property
    def sequence_starts(self) -> Array:
        """int64 [num_sequences]: index of the first token of each sequence."""
        return np.asarray(np.cumsum(self.sequence_lengths) - self.sequence_lengths)

    def counts(self, start: int = 0, stop: int | None = None) -> Array:
        """Tokens per expert among tokens [start, stop): int64 [num_layers, num_experts]."""
        return count_experts(self.topk_ids[start:stop], self.num_experts)

    def select(self, labels: Collection[str]) -> RoutingTrace:
        """The sequences that carry one of ``labels``, in their order.

        Raises:
            TraceError: the trace has no labels, or none of its sequences carries a label asked for.
        """
        if self.labels is None:
            raise TraceError("labels: this trace has none, so none can be selected")
        wanted = {labels} if isinstance(labels, str) else set(labels)
        unknown = wanted - set(self.labels)
        if unknown:
            have = ", ".join(sorted(set(self.labels))[:12])
            raise TraceError(f"label {min(unknown)!r}: no sequence has it; there are {have}")
        return self.sequences([i for i, label in enumerate(self.labels) if label in wanted])

    def sequences(self, indices: Sequence[int] | Array) -> RoutingTrace:
        """The sequences at ``indices``, in that order; an index may come more than once.

        Raises:
            TraceError: no index at all, or one outside [0, num_sequences).
        """
        chosen = np.asarray(indices, dtype=np.int64)
        if chosen.size == 0 or chosen.min() < 0 or chosen.max() >= self.num_sequences:
            raise TraceError(
                f"sequences: indices must be in [0, {self.num_sequences}), one or more"
            )
        starts, lengths = self.sequence_starts[chosen], self.sequence_lengths[chosen]
        # Position of each wanted token: its place in the new order, shifted to the old start.
        new_starts = np.cumsum(lengths) - lengths
        tokens = np.arange(int(lengths.sum())) + np.repeat(starts - new_starts, lengths)
        return replace(
            self,
            topk_ids=self.topk_ids[tokens],
            sequence_lengths=lengths,
            topk_weights=None if self.topk_weights is None else self.topk_weights[tokens],
            labels=None if self.labels is None else tuple(self.labels[i] for i in chosen.tolist()),
            arrival_times_s=None if self.arrival_times_s is None else self.arrival_times_s[chosen],
        )

    def tokens(self, start: int, stop: int) -> RoutingTrace:
        """Tokens [start, stop) as a trace; sequences are cut at the ends. Arrays are views.

        Raises:
            TraceError: the range is empty or not within the trace.
        """
        if not 0 <= start < stop <= self.num_tokens:
            raise TraceError(f"tokens [{start}, {stop}): must be within [0, {self.num_tokens})")
        first, last, lengths = cut_sequences(self.sequence_lengths, start, stop)
        times = self.arrival_times_s
        return replace(
            self,
            topk_ids=self.topk_ids[start:stop],
            sequence_lengths=lengths,
            topk_weights=None if self.topk_weights is None else self.topk_weights[start:stop],
            labels=None if self.labels is None else self.labels[first:last],
            arrival_times_s=None if times is None else times[first:last],
        )


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class CountTrace:
    """Tokens per expert, summed over windows of a run.

    counts: int64 [num_windows, num_layers, num_experts], 0 or more, 2^62 in sum at most.
    layer_ids: model layer index of each layer.
    tokens_per_window: int64 [num_windows], tokens that each window served, 2^62 in sum at most.
    None: not recorded.
    metadata: model name, source, licence and the like.

    Raises:
        TraceError: one of these does not hold.
    """

    counts: Array
    layer_ids: tuple[int, ...]
    tokens_per_window: Array | None = None
    metadata: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        counts = _integers("counts", self.counts, num_dims=3)
        if min(counts.shape) < 1:
            raise TraceError(f"counts: shape {counts.shape} has an empty dimension")
        if int(counts.min()) < 0:
            window, layer, expert = np.argwhere(counts < 0)[0].tolist()
            raise TraceError(f"counts: window {window}, layer {layer}, expert {expert} is negative")
        _check_sum("counts", counts)
        object.__setattr__(self, "counts", counts)
        check_num_experts(self.num_experts)
        check_layer_ids(self.layer_ids, self.num_layers)
        if self.tokens_per_window is not None:
            tokens = _integers("tokens_per_window", self.tokens_per_window)
            if tokens.shape != (self.num_windows,) or int(tokens.min()) < 0:
                raise TraceError(f"tokens_per_window: must be {self.num_windows} counts, 0 or more")
            _check_sum("tokens_per_window", tokens)
            object.__setattr__(self, "tokens_per_window", tokens)
        check_metadata(self.metadata)

    @property
    def num_windows(self) -> int:
        """Windows, in order of time."""
        return int(self.counts.shape[0])

    @property
    def num_layers(self) -> int:
        """Recorded MoE layers."""
        return int(self.counts.shape[1])

    @property
    def num_experts(self) -> int:
        """Logical experts of each layer."""
        return int(self.counts.shape[2])


def count_experts(topk_ids: Array, num_experts: int) -> Array:
    """Tokens per expert of ids [num_tokens, num_layers, top_k]: int64 [num_layers, num_experts]."""
    num_layers = topk_ids.shape[1]
    offsets = np.arange(num_layers, dtype=np.int64)[None, :, None] * num_experts
    total = np.zeros(num_layers * num_experts, dtype=np.int64)
    for start in range(0, topk_ids.shape[0], _BLOCK_TOKENS):
        flat = (topk_ids[start : start + _BLOCK_TOKENS].astype(np.int64) + offsets).ravel()
        total += np.bincount(flat, minlength=total.size)
    return total.reshape(num_layers, num_experts)


def cut_sequences(lengths: Array, start: int, stop: int) -> tuple[int, int, Array]:
    """Sequences that tokens [start, stop) touch: (first, last + 1, their lengths inside it)."""
    ends = np.cumsum(lengths)
    first = int(np.searchsorted(ends, start, side="right"))
    last = int(np.searchsorted(ends, stop, side="left")) + 1
    inside = np.minimum(ends[first:last], stop)
    inside = inside - np.maximum(ends[first:last] - lengths[first:last], start)
    return first, last, inside


def check_num_experts(num_experts: int) -> None:
    """Raises TraceError unless it is an int in [1, MAX_EXPERTS]."""
    if not isinstance(num_experts, int) or not 1 <= num_experts <= MAX_EXPERTS:
        raise TraceError(f"num_experts = {num_experts!r}: must be an integer in [1, {MAX_EXPERTS}]")


def check_layer_ids(layer_ids: tuple[int, ...], num_layers: int) -> None:
    """Raises TraceError unless they are num_layers different model layer indices."""
    if len(layer_ids) != num_layers:
        raise TraceError(f"layer_ids: names {len(layer_ids)} layers, but there are {num_layers}")
    if not 1 <= num_layers <= MAX_LAYERS:
        raise TraceError(f"num_layers = {num_layers}: must be in [1, {MAX_LAYERS}]")
    for layer in layer_ids:
        if not isinstance(layer, int) or isinstance(layer, bool) or not 0 <= layer <= MAX_LAYER:
            raise TraceError(f"layer_ids: {str(layer)[:40]} is not a model layer index")
    if len(set(layer_ids)) != num_layers:
        raise TraceError("layer_ids: a layer comes twice")


def check_metadata(metadata: Mapping[str, str]) -> None:
    """Raises TraceError unless it maps strings to strings."""
    for key, value in metadata.items():
        if not isinstance(key, str) or not isinstance(value, str):
            raise TraceError(f"metadata: {str(key)[:40]!r} must map a string to a string")


def _integers(name: str, values: Array, *, num_dims: int = 1) -> Array:
    """``values`` as int64; TraceError unless it is an integer array of ``num_dims`` dimensions."""
    array = np.asarray(values)
    if array.dtype.kind not in "iu" or array.ndim != num_dims:
        raise TraceError(
            f"{name}: must be an integer array of {num_dims} dimensions, "
            f"not {array.dtype} of shape {array.shape}"
        )
    if array.dtype == np.uint64 and array.size and int(array.max()) > np.iinfo(np.int64).max:
        raise TraceError(f"{name}: holds {array.max()}, more than 2^63 - 1")
    return array.astype(np.int64, copy=False)


def _check_sum(name: str, counts: Array) -> None:
    """Raises TraceError where a sum over windows might not fit int64."""
    total = float(counts.sum(dtype=np.float64))
    if total > 2.0**62:
        raise TraceError(f"{name}: sums to {total:.3g}, must be at most 2^62")


def _check_topk_ids(topk_ids: Array, num_experts: int) -> None:
    if (
        not isinstance(topk_ids, np.ndarray)
        or topk_ids.ndim != 3
        or topk_ids.dtype.kind not in "iu"
    ):
        raise TraceError("topk_ids: must be an integer array [num_tokens, num_layers, top_k]")
    if min(topk_ids.shape) < 1:
        raise TraceError(f"topk_ids: shape {topk_ids.shape} has an empty dimension")
    top_k = topk_ids.shape[2]
    if top_k > min(num_experts, MAX_TOP_K):
        raise TraceError(
            f"top_k = {top_k}: must be at most num_experts = {num_experts} and {MAX_TOP_K}"
        )
    for start in range(0, topk_ids.shape[0], _BLOCK_TOKENS):
        block = topk_ids[start : start + _BLOCK_TOKENS]
        if int(block.min()) < 0 or int(block.max()) >= num_experts:
            token, layer, choice = np.argwhere((block < 0) | (block >= num_experts))[0].tolist()
            raise TraceError(
                f"topk_ids: token {start + token}, layer {layer}: expert "
                f"{block[token, layer, choice]} is not in [0, {num_experts})"
            )
        _check_distinct(block, start)


def _check_distinct(block: Array, start: int) -> None:
    ordered = np.sort(block, axis=2)
    twice = ordered[:, :, 1:] == ordered[:, :, :-1]
    if twice.any():
        token, layer, choice = np.argwhere(twice)[0].tolist()
        raise TraceError(
            f"topk_ids: token {start + token}, layer {layer} names expert "
            f"{ordered[token, layer, choice]} twice"
        )


def checked_lengths(values: Array, num_tokens: int) -> Array:
    """Lengths of sequences as int64; TraceError unless each is 1 or more, with sum num_tokens."""
    lengths = _integers("sequence_lengths", values)
    # Bounded first, so that the sum can not wrap around.
    if lengths.size == 0 or int(lengths.min()) < 1 or int(lengths.max()) > num_tokens:
        raise TraceError(f"sequence_lengths: must be one or more, each in [1, {num_tokens}]")
    total = int(lengths.sum())
    if total != num_tokens:
        raise TraceError(f"sequence_lengths: sum to {total}, but there are {num_tokens} tokens")
    return lengths


def check_counts_size(trace: RoutingTrace, tokens_per_window: int, *, max_bytes: int) -> None:
    """Raises TraceError where the counts of all windows would take more than max_bytes.

    A few tokens in tiny windows of many experts do: every window has a number per expert.
    """
    num_windows = -(-trace.num_tokens // tokens_per_window)
    num_bytes = 8 * num_windows * trace.num_layers * trace.num_experts
    if num_bytes > max_bytes:
        raise TraceError(
            f"tokens_per_window = {tokens_per_window}: counts of {num_windows:,} windows, "
            f"{trace.num_layers} layers and {trace.num_experts} experts need {num_bytes:,} bytes, "
            f"more than {max_bytes:,} (max_bytes); choose a larger window"
        )


def _check_weights(weights: Array, topk_ids: Array) -> None:
    if not isinstance(weights, np.ndarray) or weights.dtype.kind != "f":
        raise TraceError("topk_weights: must be a floating-point array")
    if weights.shape != topk_ids.shape:
        raise TraceError(
            f"topk_weights: shape {weights.shape} differs from topk_ids {topk_ids.shape}"
        )
    for start in range(0, weights.shape[0], _BLOCK_TOKENS):
        bad = ~np.isfinite(weights[start : start + _BLOCK_TOKENS])
        if bad.any():
            token, layer, _ = np.argwhere(bad)[0].tolist()
            raise TraceError(
                f"topk_weights: token {start + token}, layer {layer} has a weight that is not a "
                "finite number"
            )


def _arrival_times(times: Array, num_sequences: int) -> Array:
    array = np.asarray(times)
    if array.dtype.kind not in "fiu" or array.shape != (num_sequences,):
        raise TraceError(f"arrival_times_s: must be {num_sequences} numbers, one per sequence")
    array = array.astype(np.float64, copy=False)
    if not np.isfinite(array).all():
        raise TraceError("arrival_times_s: holds a time that is not a finite number")
    return array


def _check_labels(labels: tuple[str, ...] | None, num_sequences: int) -> None:
    if labels is None:
        return
    if len(labels) != num_sequences or not all(isinstance(label, str) for label in labels):
        raise TraceError(f"labels: must be {num_sequences} strings, one per sequence")
