"""The expert FFN: two grouped products over aligned pairs, and the sum over a token's pairs."""

from __future__ import annotations

import torch

from moeserve_kernels import backend, check
from moeserve_kernels.alignment import Alignment
from moeserve_kernels.device.histogram import HistogramTracker
from moeserve_kernels.host.quant import scales_shape
from moeserve_kernels.operations.align import align
from moeserve_kernels.weights import FORMATS, GROUP, STORED_DTYPES, ExpertWeights

ACTIVATIONS = ("silu", "gelu", "swiglu_clamped")
_FLOATS = (torch.float32, torch.float16, torch.bfloat16)


def moe_up(
    hidden_states: torch.Tensor,
    w13: ExpertWeights,
    alignment: Alignment,
    *,
    activation: str = "silu",
    alpha: float = 1.702,
    limit: float = 7.0,
) -> torch.Tensor:
    """Return the activated first product of each aligned pair, in the order of the alignment.

    hidden_states: [T, H], float32, float16 or bfloat16; rows may have any stride.
    w13: [S, 2 I, H], rows 0..I-1 of a slot gate, the others up; plain weights have the dtype of
        ``hidden_states``, others are taken into it and multiplied by their scales in float32.
    alignment: of [T, k] ids over S slots.
    activation: with ``g = w_gate x + b_gate`` and ``u = w_up x + b_up``, sums in float32:
        "silu": ``silu(g) u``; "gelu": ``gelu_tanh(g) u``; "swiglu_clamped" (gpt-oss):
        ``(u + 1) g sigmoid(alpha g)`` with g at most ``limit`` and u within ``-limit .. limit``.

    The result is [alignment.num_rows, I] in the dtype of ``hidden_states``; rows that hold no pair,
    or one that is not here, hold anything.

    Raises ValueError for a wrong shape or dtype, an unknown activation, a format that the chip has
    no kernel for (fp8 on sm_80), and a ``block_m`` that it has no tile for.
    """
    check.dtype("hidden_states", hidden_states, *_FLOATS)
    check.shape("hidden_states", hidden_states, ("T", "H"))
    check.rows_contiguous("hidden_states", hidden_states)
    check.one_of("activation", activation, ACTIVATIONS)
    _check_weights("w13", w13, hidden_states, hidden_states.shape[1])
    _check_even(w13)
    if alignment.num_pairs != hidden_states.shape[0] * alignment.top_k:
        raise ValueError(
            f"alignment: of {alignment.num_pairs} pairs, must be of T * top_k = "
            f"{hidden_states.shape[0]} * {alignment.top_k}"
        )
    _check_alignment(alignment, w13, hidden_states)
    family = backend.implementation("moe", hidden_states)
    h: torch.Tensor = family.moe_up(
        hidden_states, w13, alignment, activation=activation, alpha=alpha, limit=limit
    )
    return h


def moe_down(
    h: torch.Tensor,
    w2: ExpertWeights,
    alignment: Alignment,
    *,
    topk_weights: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return the second product of each pair, ``w2 h + b``, in the order of the pairs.

    h: [alignment.num_rows, I], what ``moe_up`` gave.
    w2: [S, H, I]; formats and dtypes as for ``moe_up``.
    topk_weights: float32 [T, k], a factor of each pair, applied in float32; None: none.

    The result is [T, k, H] in the dtype of ``h``. Rows of pairs that are not here are left
    unwritten: give ``combine`` the ids, and it does not read them.

    Raises ValueError as ``moe_up`` does.
    """
    check.dtype("h", h, *_FLOATS)
    check.shape("h", h, (alignment.num_rows, "I"))
    check.rows_contiguous("h", h)
    _check_weights("w2", w2, h, h.shape[1])
    _check_alignment(alignment, w2, h)
    if topk_weights is not None:
        num_tokens = alignment.num_pairs // alignment.top_k
        check.dtype("topk_weights", topk_weights, torch.float32)
        check.shape("topk_weights", topk_weights, (num_tokens, alignment.top_k))
        check.same_device(h=h, topk_weights=topk_weights)
    family = backend.implementation("moe", h)
    pairs: torch.Tensor = family.moe_down(h, w2, alignment, topk_weights=topk_weights)
    return pairs


def combine(
    pairs: torch.Tensor,
    *,
    topk_weights: torch.Tensor | None = None,
    topk_ids: torch.Tensor | None = None,
    expert_map: torch.Tensor | None = None,
    shared: torch.Tensor | None = None,
    residual: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return ``sum_j topk_weights[t, j] * pairs[t, j] + shared[t] + residual[t]``, [T, H].

    pairs: [T, k, H], any float dtype of at most 32 bits; also the dtype of the result.
    topk_weights: float32 [T, k]; None: 1, for weights that ``moe_down`` has applied.
    topk_ids: int32 or int64 [T, k]: pairs with a negative id are skipped, and never read. None:
        all are there.
    expert_map: int32 [E], with ``topk_ids``: pairs whose expert maps to -1 are skipped too.
    shared, residual: [T, H] of the dtype of ``pairs``.

    Sums run in float32, in the order of j, then ``shared``, then ``residual``: equal inputs give
    equal bits. A token without any pair gets zeros.

    Raises ValueError for a wrong shape or dtype, and a map without ids.
    """
    check.dtype("pairs", pairs, *_FLOATS)
    check.shape("pairs", pairs, ("T", "k", "H"))
    check.rows_contiguous("pairs", pairs)
    num_tokens, top_k, hidden_size = pairs.shape
    if topk_weights is not None:
        check.dtype("topk_weights", topk_weights, torch.float32)
        check.shape("topk_weights", topk_weights, (num_tokens, top_k))
    _check_ids(topk_ids, expert_map, (num_tokens, top_k))
    for name, tensor in (("shared", shared), ("residual", residual)):
        if tensor is not None:
            check.dtype(name, tensor, pairs.dtype)
            check.shape(name, tensor, (num_tokens, hidden_size))
            check.rows_contiguous(name, tensor)
    check.same_device(
        pairs=pairs,
        topk_weights=topk_weights,
        topk_ids=topk_ids,
        expert_map=expert_map,
        shared=shared,
        residual=residual,
    )
    family = backend.implementation("moe", pairs)
    out: torch.Tensor = family.combine(
        pairs,
        topk_weights=topk_weights,
        topk_ids=topk_ids,
        expert_map=expert_map,
        shared=shared,
        residual=residual,
    )
    return out


def moe_ffn(
    hidden_states: torch.Tensor,
    w13: ExpertWeights,
    w2: ExpertWeights,
    topk_weights: torch.Tensor,
    topk_ids: torch.Tensor,
    *,
    expert_map: torch.Tensor | None = None,
    activation: str = "silu",
    alpha: float = 1.702,
    limit: float = 7.0,
    shared: torch.Tensor | None = None,
    residual: torch.Tensor | None = None,
    tracker: HistogramTracker | None = None,
) -> torch.Tensor:
    """Return each token's weighted sum over those of its experts that are here, [T, H].

    ``align``, ``moe_up``, ``moe_down`` and ``combine`` in one, which say what the arguments are.
    topk_weights: float32 [T, k]. topk_ids: int32 or int64 [T, k].
    tracker: the share of pairs of each slot so far, to choose tiles by; this step's is added. Keep
        one a layer. None: tiles are chosen as if experts were chosen evenly.

    Raises ValueError as they do, and for two weights that do not fit each other.
    """
    _check_ffn(hidden_states, w13, w2, topk_weights, topk_ids, activation)
    _check_ids(topk_ids, expert_map, tuple(topk_ids.shape))
    family = backend.implementation("moe", hidden_states)
    num_pairs = topk_ids.numel()
    block_m = family.choose_block_m(hidden_states, w13, w2, num_pairs, tracker)
    alignment = align(topk_ids, w13.num_slots, block_m, expert_map=expert_map)
    if tracker is not None and alignment.counts is not None:
        tracker.observe(alignment.counts, num_pairs)
    h = family.moe_up(
        hidden_states, w13, alignment, activation=activation, alpha=alpha, limit=limit
    )
    pairs = family.moe_down(h, w2, alignment, topk_weights=topk_weights)
    return combine(
        pairs, topk_ids=topk_ids, expert_map=expert_map, shared=shared, residual=residual
    )


def _check_ffn(
    hidden_states: torch.Tensor,
    w13: ExpertWeights,
    w2: ExpertWeights,
    topk_weights: torch.Tensor,
    topk_ids: torch.Tensor,
    activation: str,
) -> None:
    check.dtype("hidden_states", hidden_states, *_FLOATS)
    check.shape("hidden_states", hidden_states, ("T", "H"))
    check.rows_contiguous("hidden_states", hidden_states)
    check.one_of("activation", activation, ACTIVATIONS)
    check.shape("topk_ids", topk_ids, (hidden_states.shape[0], "k"))
    check.dtype("topk_weights", topk_weights, torch.float32)
    check.shape("topk_weights", topk_weights, tuple(topk_ids.shape))
    check.same_device(hidden_states=hidden_states, topk_weights=topk_weights, topk_ids=topk_ids)
    hidden_size = hidden_states.shape[1]
    _check_weights("w13", w13, hidden_states, hidden_size)
    _check_weights("w2", w2, hidden_states, w13.num_outputs // 2)
    _check_even(w13)
    if (w2.num_slots, w2.num_outputs) != (w13.num_slots, hidden_size):
        raise ValueError(
            f"w2: has {w2.num_slots} slots of {w2.num_outputs} outputs, must have "
            f"{w13.num_slots} of {hidden_size}"
        )


def _check_even(w13: ExpertWeights) -> None:
    if w13.num_outputs % 2 != 0:
        raise ValueError(f"w13: has {w13.num_outputs} rows a slot, must be even (gate, then up)")


def _check_ids(
    topk_ids: torch.Tensor | None, expert_map: torch.Tensor | None, expected: tuple[int, ...]
) -> None:
    if topk_ids is None:
        if expert_map is not None:
            raise ValueError("expert_map: given without topk_ids, must go with them")
        return
    check.dtype("topk_ids", topk_ids, torch.int32, torch.int64)
    check.shape("topk_ids", topk_ids, expected)
    check.at_least("top_k", expected[1], 1)
    if expert_map is not None:
        check.dtype("expert_map", expert_map, torch.int32)
        check.shape("expert_map", expert_map, ("E",))
        check.rows_contiguous("expert_map", expert_map)


def _check_weights(name: str, weights: ExpertWeights, rows: torch.Tensor, num_inputs: int) -> None:
    """Raises ValueError unless the weights are well formed and fit ``rows`` of ``num_inputs``."""
    check.one_of(f"{name}.format", weights.format, FORMATS)
    check.dtype(f"{name}.data", weights.data, STORED_DTYPES.get(weights.format, rows.dtype))
    check.shape(f"{name}.data", weights.data, ("S", "N", "K"))
    check.rows_contiguous(f"{name}.data", weights.data)
    if weights.num_inputs != num_inputs:
        raise ValueError(f"{name}: takes {weights.num_inputs} inputs, must take {num_inputs}")
    if weights.format == "int4" and num_inputs % GROUP != 0:
        raise ValueError(f"{name}: int4 with {num_inputs} inputs, must be a multiple of {GROUP}")
    expected = scales_shape(weights)
    if (expected is None) != (weights.scales is None):
        wanted = "None" if expected is None else str(list(expected))
        raise ValueError(f"{name}.scales: must be {wanted} for {weights.format}")
    if weights.scales is not None and expected is not None:
        check.dtype(f"{name}.scales", weights.scales, torch.float32)
        check.shape(f"{name}.scales", weights.scales, expected)
    if weights.bias is not None:
        check.dtype(f"{name}.bias", weights.bias, *_FLOATS)
        check.shape(f"{name}.bias", weights.bias, weights.data.shape[:2])
        check.rows_contiguous(f"{name}.bias", weights.bias)
    check.same_device(rows=rows, data=weights.data, scales=weights.scales, bias=weights.bias)


def _check_alignment(alignment: Alignment, weights: ExpertWeights, rows: torch.Tensor) -> None:
    """Raises ValueError unless the alignment is of as many slots as the weights."""
    check.same_device(rows=rows, alignment=alignment.block_slots)
    if alignment.counts is not None and alignment.counts.shape[0] != weights.num_slots:
        raise ValueError(
            f"alignment: over {alignment.counts.shape[0]} slots, the weights have "
            f"{weights.num_slots}"
        )
