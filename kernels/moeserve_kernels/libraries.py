"""Operations by libraries, behind the signatures of ours: to compare with, or to be preferred.

None is needed. Each is tried before it is offered: ``available`` runs it on a small case against
the formula and says why one can not be used here.
"""

from __future__ import annotations

import torch
from torch.nn import functional

from moeserve_kernels.alignment import Alignment
from moeserve_kernels.weights import ExpertWeights

_TOLERANCE = 1e-2  # bfloat16, three roundings


def available(device: torch.device) -> dict[str, str | None]:
    """Libraries by name, with the reason why each can not be used on ``device``; None: it can."""
    return {"grouped_mm": _why_not_grouped_mm(device)}


def moe_up(
    hidden_states: torch.Tensor,
    w13: ExpertWeights,
    alignment: Alignment,
    *,
    activation: str = "silu",
    alpha: float = 1.702,
    limit: float = 7.0,
) -> torch.Tensor:
    """``operations.moe.moe_up`` by ``torch.nn.functional.grouped_mm``; plain weights only.

    Rows are copied into the order of the slots first, as grouped_mm does not gather.
    """
    order, ends = _order_and_ends(alignment, w13.num_slots)
    last = max(alignment.num_pairs - 1, 0)
    tokens = order.clamp(max=last) // alignment.top_k
    both = _grouped(hidden_states[tokens], w13, ends)
    gate, up = both.chunk(2, dim=-1)
    if activation == "silu":
        return functional.silu(gate) * up
    if activation == "gelu":
        return functional.gelu(gate, approximate="tanh") * up
    gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
    return (up + 1) * gate * torch.sigmoid(alpha * gate)


def moe_down(
    h: torch.Tensor,
    w2: ExpertWeights,
    alignment: Alignment,
    *,
    topk_weights: torch.Tensor | None = None,
) -> torch.Tensor:
    """``operations.moe.moe_down`` by grouped_mm, of what ``moe_up`` here gave."""
    order, ends = _order_and_ends(alignment, w2.num_slots)
    rows = _grouped(h, w2, ends)
    # Padding goes to one more row. So do rows past the last slot's, which grouped_mm leaves unset.
    unset = torch.arange(order.shape[0], device=order.device) >= ends[-1]
    places = torch.where(unset, alignment.num_pairs, order)
    pairs = h.new_empty(alignment.num_pairs + 1, w2.num_outputs)
    pairs.index_copy_(0, places, rows)
    pairs = pairs[:-1].view(-1, alignment.top_k, w2.num_outputs)
    return pairs if topk_weights is None else pairs * topk_weights[..., None].to(pairs.dtype)


def self_test(device: torch.device, dtype: torch.dtype = torch.bfloat16) -> str | None:
    """Why grouped_mm gives wrong results on ``device``, or None."""
    generator = torch.Generator().manual_seed(3)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator).to(dtype)

    num_tokens, top_k, slots, hidden, inner = 24, 2, 4, 64, 32
    x, w13, w2 = (
        draw(num_tokens, hidden),
        draw(slots, 2 * inner, hidden),
        draw(slots, hidden, inner),
    )
    ids = torch.randint(-1, slots, (num_tokens, top_k), generator=generator, dtype=torch.int32)
    try:
        got = _ffn(*(one.to(device) for one in (x, w13, w2, ids))).double().cpu()
    except (RuntimeError, NotImplementedError, AttributeError, TypeError) as error:
        return f"fails: {str(error).splitlines()[0]}"
    ref = torch.zeros(num_tokens, top_k, hidden, dtype=torch.float64)
    for token, choice in (ids >= 0).nonzero().tolist():
        slot = int(ids[token, choice])
        gate, up = (w13[slot].double() @ x[token].double()).chunk(2)
        ref[token, choice] = w2[slot].double() @ (functional.silu(gate) * up)
    here = ids >= 0
    relative = float((got[here] - ref[here]).norm() / ref[here].norm())
    return None if relative <= _TOLERANCE else f"wrong: relative error {relative:.3g}"


def _ffn(x: torch.Tensor, w13: torch.Tensor, w2: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """Both products of pairs that nobody has sorted."""
    alignment = Alignment(
        None, ids.flatten(), None, None, ids.numel(), ids.shape[1], 1, is_identity=True
    )
    # The identity's rows are pairs; sorted here, they are in the order that both products take.
    h = moe_up(x, ExpertWeights("plain", w13), alignment)
    return moe_down(h, ExpertWeights("plain", w2), alignment)


def _why_not_grouped_mm(device: torch.device) -> str | None:
    if not hasattr(functional, "grouped_mm"):
        return "this torch has no torch.nn.functional.grouped_mm"
    if device.type != "cuda":
        return "a loop of products on a CPU"
    if torch.version.hip is None and torch.cuda.get_device_capability(device)[0] < 9:
        return "a loop that waits for the device before sm_90"
    return self_test(device)


def _grouped(rows: torch.Tensor, weights: ExpertWeights, ends: torch.Tensor) -> torch.Tensor:
    if weights.format != "plain" or weights.bias is not None:
        raise ValueError(f"weights: {weights.format}, must be plain without bias for grouped_mm")
    product: torch.Tensor = functional.grouped_mm(rows, weights.data.transpose(1, 2), offs=ends)
    return product


def _order_and_ends(alignment: Alignment, num_slots: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The pair of each row, ``num_pairs`` for padding, and int32 [S]: where each slot's rows end.

    Pairs that nobody has sorted are sorted here, those of other ranks last.
    """
    if alignment.sorted_pairs is not None and alignment.counts is not None:
        block_m = alignment.block_m
        padded = (alignment.counts + block_m - 1) // block_m * block_m
        return alignment.sorted_pairs.long(), padded.cumsum(0).to(torch.int32)
    slots = torch.where(alignment.block_slots < 0, num_slots, alignment.block_slots)
    order = torch.argsort(slots, stable=True)
    every = torch.arange(num_slots, device=slots.device)
    counts = (slots[None, :] == every[:, None]).sum(1)
    return order, counts.cumsum(0).to(torch.int32)
