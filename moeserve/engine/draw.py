"""Random tokens, each row on its own and reproducible.

A token is drawn by inverse distribution function: the tokens that the filters leave are laid out in
a fixed order, and a number in [0, 1) says where to point. That number depends on seed and place in
the output only, so a request gets the same text in any batch and after a replay.

Rows must not influence each other's bits. A torch reduction may cut a lone row up for threads and
so add in another order; softmax, cumulative sum, top-k and search go through a row in one way, and
what is done element by element is exactly rounded. Which path a row takes is decided by that row.

Shapes: R rows, V tokens, C candidates.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from moeserve.engine.plan import SamplingInfo
from moeserve.engine.ranking import best_token_ids, rank_keys
from moeserve.messages import SamplingParams

# Filters look at this many best tokens, and at all of them only where that is not enough.
_NUM_CANDIDATES = 256

_MASK = 2**64 - 1
_GOLDEN = 0x9E3779B97F4A7C15


def uniform_number(seed: int, position: int) -> float:
    """The number in [0, 1) for the token at ``position`` of a request's output.

    splitmix64 (Steele, Lea, Flood 2014) as a counter-based generator. 52 bits, so that the product
    with a float64 mass is below that mass also after rounding.
    """
    state = _mix((_mix(seed & _MASK) + (position + 1) * _GOLDEN) & _MASK)
    return float((state >> 12) * 2.0**-52)


def draw(logits: torch.Tensor, infos: Sequence[SamplingInfo]) -> torch.Tensor:
    """A token for each row; int64 [R].

    logits: float32 [R, V], edited; -inf is banned, at least one token of a row is finite.
    """
    device, params = logits.device, [info.params for info in infos]
    # In float64, and the best logit moved to 0 first: then no temperature above 0 makes a NaN.
    scaled = logits.double() - logits.amax(dim=-1, keepdim=True).double()
    scaled /= _column([p.temperature for p in params], device)
    probs = scaled.softmax(dim=-1)
    uniform = _column([uniform_number(i.seed, i.num_output_tokens) for i in infos], device)
    token_ids = torch.empty(len(infos), dtype=torch.int64, device=device)
    plain = [row for row, p in enumerate(params) if not _has_filter(p)]
    if plain:
        token_ids[plain] = _point(_row_cumsum(probs[plain]), uniform[plain])
    filtered = [row for row, p in enumerate(params) if _has_filter(p)]
    for num_candidates in (_NUM_CANDIDATES, logits.shape[1]):
        if filtered:
            token_ids[filtered], is_settled = _draw_filtered(
                rank_keys(logits[filtered]),
                probs[filtered],
                uniform[filtered],
                [params[row] for row in filtered],
                min(num_candidates, logits.shape[1]),
            )
            filtered = [r for r, done in zip(filtered, is_settled, strict=True) if not done]
    return token_ids


def _draw_filtered(
    keys: torch.Tensor,
    probs: torch.Tensor,
    uniform: torch.Tensor,
    params: Sequence[SamplingParams],
    num_candidates: int,
) -> tuple[torch.Tensor, list[bool]]:
    """Tokens of rows with top_k, min_p or top_p, and whether the candidates sufficed to tell.

    In falling order of probability each filter leaves a front part; together they leave the
    shortest. top_p is a share of the mass that top_k and min_p leave.
    """
    vocab_size, device = probs.shape[1], probs.device
    top_k = _column([p.top_k if 0 < p.top_k < vocab_size else vocab_size for p in params], device)
    min_p = _column([p.min_p for p in params], device)
    top_p = _column([p.top_p for p in params], device)
    candidates = best_token_ids(keys, num_candidates)  # [R, C]
    probs = probs.gather(1, candidates)
    cumulative = _row_cumsum(probs)
    before = torch.nn.functional.pad(cumulative, (1, 0))[:, :-1]

    is_kept = torch.arange(num_candidates, device=device) < top_k
    is_kept &= probs >= min_p * probs[:, :1]
    num_kept = is_kept.sum(dim=-1, keepdim=True)  # [R, 1], at least 1
    is_all = (top_k == vocab_size) & (min_p == 0.0)
    mass = torch.where(is_all, 1.0, cumulative.gather(1, num_kept - 1))
    is_kept &= (before < top_p * mass) | (top_p == 1.0)
    num_left = is_kept.sum(dim=-1, keepdim=True).clamp_(min=1)

    has_mass = is_all | (top_k <= num_candidates) | (num_kept < num_candidates)
    has_end = (top_k <= num_candidates) | (num_left < num_candidates)
    is_settled = (has_mass & has_end)[:, 0] | (num_candidates == vocab_size)
    index = _point(cumulative, uniform, num_left)
    return candidates.gather(1, index[:, None])[:, 0], is_settled.tolist()


def _point(
    cumulative: torch.Tensor, uniform: torch.Tensor, num_left: torch.Tensor | None = None
) -> torch.Tensor:
    """Index of the entry that ``uniform`` points at, among the first ``num_left``; int64 [R].

    cumulative: float64 [R, C], ascending; uniform: float64 [R, 1]; num_left: int64 [R, 1].
    """
    mass = cumulative[:, -1:] if num_left is None else cumulative.gather(1, num_left - 1)
    return torch.searchsorted(cumulative, uniform * mass, right=True)[:, 0]


def _row_cumsum(values: torch.Tensor) -> torch.Tensor:
    """Cumulative sums along each row; [R, C]."""
    if values.is_cuda and values.shape[0] == 1:
        # A lone row would be scanned by another CUDA algorithm, whose sums differ in the last bits.
        return values.expand(2, -1).cumsum(dim=-1)[:1]
    return values.cumsum(dim=-1)


def _has_filter(params: SamplingParams) -> bool:
    return params.top_k > 0 or params.top_p < 1.0 or params.min_p > 0.0


def _column(values: Sequence[float], device: torch.device) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64, device=device)[:, None]


def _mix(value: int) -> int:
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK
    return value ^ (value >> 31)
