"""The expert FFN on a GPU: allocates outputs, takes the tile, launches."""

from __future__ import annotations

from functools import cache

import torch

from moeserve_kernels.alignment import Alignment
from moeserve_kernels.device import tiles
from moeserve_kernels.device.histogram import HistogramTracker
from moeserve_kernels.device.moe_cases import aot_cases
from moeserve_kernels.device.moe_launch import combine_launch, moe_down_launch, moe_up_launch
from moeserve_kernels.device.targets import Target, target_of
from moeserve_kernels.weights import ExpertWeights

__all__ = ["aot_cases", "choose_block_m", "combine", "moe_down", "moe_up"]

_target = cache(target_of)


def moe_up(
    hidden_states: torch.Tensor,
    w13: ExpertWeights,
    alignment: Alignment,
    *,
    activation: str = "silu",
    alpha: float = 1.702,
    limit: float = 7.0,
) -> torch.Tensor:
    """See ``operations.moe.moe_up``."""
    _, tile = _target_and_tile(hidden_states, w13, alignment)
    shape = (alignment.num_rows, w13.num_outputs // 2)
    h = torch.empty(shape, dtype=hidden_states.dtype, device=hidden_states.device)
    moe_up_launch(
        hidden_states,
        w13,
        alignment,
        h,
        activation=activation,
        alpha=alpha,
        limit=limit,
        tile=tile,
    ).run()
    return h


def moe_down(
    h: torch.Tensor,
    w2: ExpertWeights,
    alignment: Alignment,
    *,
    topk_weights: torch.Tensor | None = None,
) -> torch.Tensor:
    """See ``operations.moe.moe_down``."""
    target, tile = _target_and_tile(h, w2, alignment)
    top_k = alignment.top_k
    pairs = torch.empty(
        (alignment.num_pairs // top_k, top_k, w2.num_outputs), dtype=h.dtype, device=h.device
    )
    moe_down_launch(
        h, w2, alignment, pairs, topk_weights=topk_weights, tile=tile, target=target
    ).run()
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
    """See ``operations.moe.combine``."""
    table = tiles.load(_target(pairs.device).name)
    out = torch.empty((pairs.shape[0], pairs.shape[2]), dtype=pairs.dtype, device=pairs.device)
    combine_launch(
        pairs,
        out,
        topk_weights=topk_weights,
        topk_ids=topk_ids,
        expert_map=expert_map,
        shared=shared,
        residual=residual,
        block=table.combine_block,
        num_warps=table.combine_warps,
    ).run()
    return out


def choose_block_m(
    hidden_states: torch.Tensor,
    w13: ExpertWeights,
    w2: ExpertWeights,
    num_pairs: int,
    tracker: HistogramTracker | None,
) -> int:
    """Rows of a block for both products; of two formats, the smaller that either would take."""
    table = tiles.load(_target(hidden_states.device).name)
    counts = None if tracker is None else tracker.expected(num_pairs)
    dtype, num_slots = hidden_states.dtype, w13.num_slots
    return min(
        tiles.choose(table, format, counts, num_pairs, num_slots, dtype=dtype).block_m
        for format in {w13.format, w2.format}
    )


def _target_and_tile(
    rows: torch.Tensor, weights: ExpertWeights, alignment: Alignment
) -> tuple[Target, tiles.MoeTile]:
    target = _target(rows.device)
    table = tiles.load(target.name)
    return target, table.tile(weights.format, rows.dtype, alignment.block_m)
