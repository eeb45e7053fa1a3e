"""Products of bfloat16 weights in compiled code, for CPUs that can not multiply bfloat16.

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
