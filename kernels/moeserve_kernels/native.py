"""Products of bfloat16 weights and caches in compiled code, for CPUs that can not multiply them.

torch's way on such a CPU is to widen a weight to float32 and to multiply then: each weight of a
decode step is read once and written once more for nothing, and each expert costs several calls.
The code in ``csrc/`` widens in registers, and does a whole MoE layer in one call. It is built with
the package where there is a C compiler; without it ``cpu_linear`` and ``cpu_moe`` do the work.

Rows of x are in bfloat16, sums in float32, results are rounded once. In a MoE layer nothing is
rounded between the two products. The bits of a row do not depend on the rows beside it.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from moeserve_kernels import _native as compiled

try:
    compiled = importlib.import_module("moeserve_kernels._native")
except ImportError:  # there was no C compiler where the package was installed
    _is_available = False
else:
    _is_available = bool(compiled.supported())

_DEPTH_STEP = 16  # both of a weight's sizes must be multiples where they are summed over


def is_available() -> bool:
    """Whether the compiled operations are there and this CPU (AVX2 and FMA) runs them."""
    return _is_available


def takes(x: torch.Tensor, *weights: torch.Tensor) -> bool:
    """Whether the operations below take these: bfloat16, contiguous, depths multiples of 16."""
    return x.dtype == torch.bfloat16 and all(
        weight.dtype == torch.bfloat16
        and weight.shape[-1] % _DEPTH_STEP == 0
        and weight.is_contiguous()
        for weight in weights
    )


def linear(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """``x [T, K] @ weight [N, K].T`` -> [T, N]; what ``takes`` says must hold."""
    x = x.contiguous()
    out = x.new_empty(x.shape[0], weight.shape[0])
    compiled.linear(
        x.data_ptr(),
        weight.data_ptr(),
        out.data_ptr(),
        x.shape[0],
        weight.shape[0],
        weight.shape[1],
        torch.get_num_threads(),
    )
    return out


def moe_ffn(
    hidden_states: torch.Tensor,
    w13: torch.Tensor,
    w2: torch.Tensor,
    slots: torch.Tensor,
    topk_weights: torch.Tensor,
) -> torch.Tensor:
    """See ``Ops.moe_ffn``; what ``takes`` says must hold.

    Raises:
        ValueError: a slot is not in [-1, S).
    """
    out = hidden_states.new_empty(hidden_states.shape)
    _experts(hidden_states, w13, w2, slots, topk_weights.float().contiguous(), out)
    return out


def moe_pairs(
    hidden_states: torch.Tensor, w13: torch.Tensor, w2: torch.Tensor, slots: torch.Tensor
) -> torch.Tensor:
    """See ``Ops.moe_pairs``; what ``takes`` says must hold.

    Raises:
        ValueError: a slot is not in [-1, S).
    """
    out = hidden_states.new_empty(*slots.shape, hidden_states.shape[1])
    _experts(hidden_states, w13, w2, slots, None, out)
    return out


def attn_decode(
    query: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    block_table: torch.Tensor,
    seq_lens: torch.Tensor,
    scale: float,
    sliding_window: int | None = None,
) -> torch.Tensor:
    """``Ops.paged_attention`` of one query token per request; what ``takes`` says must hold.

    Args:
        query: [B, heads, d].
        key_cache, value_cache: [num_blocks, block_size, kv_heads, d].
        block_table: int64 [B, max_blocks].
        seq_lens: int64 [B], at least 1.
        scale, sliding_window: as in ``Ops.paged_attention``.

    Raises:
        ValueError: a sequence is longer than its row of the block table, or the table names a block
            that is not there.
    """
    query, block_table = query.contiguous(), block_table.contiguous()
    out = torch.empty_like(query)
    compiled.attn_decode(
        query.data_ptr(),
        key_cache.data_ptr(),
        value_cache.data_ptr(),
        block_table.data_ptr(),
        seq_lens.data_ptr(),
        out.data_ptr(),
        query.shape[0],
        query.shape[1],
        key_cache.shape[2],
        query.shape[2],
        key_cache.shape[0],
        key_cache.shape[1],
        block_table.shape[1],
        scale,
        sliding_window or 0,
        torch.get_num_threads(),
    )
    return out


def _experts(
    hidden_states: torch.Tensor,
    w13: torch.Tensor,
    w2: torch.Tensor,
    slots: torch.Tensor,
    topk_weights: torch.Tensor | None,
    out: torch.Tensor,
) -> None:
    hidden_states, slots = hidden_states.contiguous(), slots.contiguous()
    compiled.moe_ffn(
        hidden_states.data_ptr(),
        w13.data_ptr(),
        w2.data_ptr(),
        slots.data_ptr(),
        0 if topk_weights is None else topk_weights.data_ptr(),
        out.data_ptr(),
        hidden_states.shape[0],
        slots.shape[1],
        w13.shape[0],
        hidden_states.shape[1],
        w2.shape[2],
        torch.get_num_threads(),
    )
