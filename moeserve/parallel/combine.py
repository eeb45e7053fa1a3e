"""The way home, the same for every transport between ranks: one all-to-all, then a fixed order.

Both sides know what travels, the home rank from its ``Route``, the visited rank from the rows that
it got; so no counts are exchanged.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from moeserve.parallel.groups import ParallelGroups
from moeserve.parallel.routing import Route
from moeserve_kernels.ops import Ops


@dataclass(frozen=True, kw_only=True, slots=True)
class RemoteHandle:
    """Bookkeeping between ``dispatch`` and ``combine``.

    At home: route of this rank's tokens; topk_weights: float32 [T, k].
    As a visited rank: slots: int64 [R, k] (-1: elsewhere) of the rows received, in order of the
    rank they came from; num_rows: how many came from each.
    """

    route: Route
    topk_weights: torch.Tensor
    slots: torch.Tensor
    num_rows: tuple[int, ...]


def combine(
    groups: ParallelGroups, expert_rows: torch.Tensor, handle: RemoteHandle, ops: Ops
) -> torch.Tensor:
    """[T, H] at home, from the rows computed here; see ``TokenDispatcher.combine``."""
    if expert_rows.dim() == 2:
        return _add_sums(groups, expert_rows, handle)
    return ops.weighted_sum(_bring_pairs(groups, expert_rows, handle), handle.topk_weights)


def _add_sums(groups: ParallelGroups, sums: torch.Tensor, handle: RemoteHandle) -> torch.Tensor:
    """The partial sums of each token, added up one rank after the other: [T, H]."""
    route = handle.route
    home = groups.all_to_all(sums, handle.num_rows, route.num_rows)
    total = torch.zeros(len(handle.topk_weights), home.shape[1], dtype=torch.float32)
    parts = torch.split(home, list(route.num_rows))
    tokens = torch.split(route.token_of_row, list(route.num_rows))
    for part, token in zip(parts, tokens, strict=True):
        total.index_add_(0, token, part.float())  # a token is in each part once at most
    return total.to(home.dtype)


def _bring_pairs(
    groups: ParallelGroups, expert_rows: torch.Tensor, handle: RemoteHandle
) -> torch.Tensor:
    """Every single pair, in the order of ``topk_ids``: [T, k, H]. Only pairs that exist travel."""
    route = handle.route
    is_here = handle.slots >= 0  # [R, k]
    num_pairs = [int(part.sum()) for part in torch.split(is_here, list(handle.num_rows))]
    home = groups.all_to_all(expert_rows[is_here], num_pairs, route.num_pairs)
    row, choice = route.is_pair.nonzero(as_tuple=True)
    pairs = home.new_empty(*handle.topk_weights.shape, home.shape[1])
    pairs[route.token_of_row[row], choice] = home
    return pairs
