"""The launches of the grouped products and of combine, for tensors of any device, ``meta`` too."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from triton.tools.tensor_descriptor import TensorDescriptor

from moeserve_kernels.alignment import Alignment
from moeserve_kernels.device.kernels.combine import combine_kernel
from moeserve_kernels.device.kernels.moe_down import moe_down_kernel
from moeserve_kernels.device.kernels.moe_up import moe_up_kernel
from moeserve_kernels.device.launch import Launch
from moeserve_kernels.device.targets import Target
from moeserve_kernels.device.tiles import MoeTile, Tile
from moeserve_kernels.weights import ExpertWeights


def moe_up_launch(
    hidden_states: torch.Tensor,
    w13: ExpertWeights,
    alignment: Alignment,
    h: torch.Tensor,
    *,
    activation: str,
    alpha: float,
    limit: float,
    tile: MoeTile,
) -> Launch:
    """Writes ``h`` [num_rows, I]; see ``operations.moe.moe_up``."""
    num_columns, num_inputs = w13.num_outputs // 2, w13.num_inputs
    cut = _fit(tile.up, w13.format)
    args = {
        "x_ptr": hidden_states,
        "w_ptr": w13.data,
        "w_desc": _weights_descriptor(w13, cut),
        **_weights_args(w13),
        "h_ptr": h,
        **_alignment_args(alignment),
        "N": num_columns,
        "K": num_inputs,
        "alpha": alpha,
        "limit": limit,
        "stride_xt": hidden_states.stride(0),
        "stride_hr": h.stride(0),
    }
    constants = {
        "ACTIVATION": activation,
        **_constants(w13.format, alignment, cut, num_inputs),
    }
    grid = _grid(alignment, num_columns, cut)
    return Launch(moe_up_kernel, grid, args, constants, _options(cut))


def moe_down_launch(
    h: torch.Tensor,
    w2: ExpertWeights,
    alignment: Alignment,
    pairs: torch.Tensor,
    *,
    topk_weights: torch.Tensor | None,
    tile: MoeTile,
    target: Target,
) -> Launch:
    """Writes rows of ``pairs`` [T, k, H], contiguous; see ``operations.moe.moe_down``."""
    num_columns, num_inputs = w2.num_outputs, w2.num_inputs
    cut = _fit(tile.down, w2.format)
    weight_strides = (0, 0) if topk_weights is None else topk_weights.stride()
    args = {
        "h_ptr": h,
        "h_desc": _rows_descriptor(h, alignment, cut),
        "w_ptr": w2.data,
        "w_desc": _weights_descriptor(w2, cut),
        **_weights_args(w2),
        "topk_weights_ptr": topk_weights,
        "y_ptr": pairs,
        **_alignment_args(alignment),
        "num_padded_rows_ptr": alignment.num_padded_rows,
        "N": num_columns,
        "K": num_inputs,
        "stride_hr": h.stride(0),
        "stride_kt": weight_strides[0],
        "stride_kj": weight_strides[1],
        "stride_yp": pairs.stride(1),
    }
    # With a bias the persistent form of the largest tile runs out of registers (triton 3.9).
    is_persistent = cut.persistent and not alignment.is_identity and w2.bias is None
    constants = {
        "PERSISTENT": is_persistent,
        **_constants(w2.format, alignment, cut, num_inputs),
    }
    grid = _grid(alignment, num_columns, cut)
    if is_persistent:
        grid = (min(*grid, target.num_sms * max(1, 8 // cut.num_warps)),)
    return Launch(moe_down_kernel, grid, args, constants, _options(cut))


def combine_launch(
    pairs: torch.Tensor,
    out: torch.Tensor,
    *,
    topk_weights: torch.Tensor | None,
    topk_ids: torch.Tensor | None,
    expert_map: torch.Tensor | None,
    shared: torch.Tensor | None,
    residual: torch.Tensor | None,
    block: int,
    num_warps: int,
) -> Launch:
    """Writes ``out`` [T, H]; see ``operations.moe.combine``."""
    num_tokens, top_k, hidden_size = pairs.shape
    args = {
        "pairs_ptr": pairs,
        "topk_weights_ptr": topk_weights,
        "topk_ids_ptr": topk_ids,
        "expert_map_ptr": expert_map,
        "shared_ptr": shared,
        "residual_ptr": residual,
        "out_ptr": out,
        "top_k": top_k,
        "H": hidden_size,
        "stride_pt": pairs.stride(0),
        "stride_pj": pairs.stride(1),
        **_strides(topk_weights, "stride_wt", "stride_wj"),
        **_strides(topk_ids, "stride_it", "stride_ij"),
        **_strides(shared, "stride_st"),
        **_strides(residual, "stride_rt"),
        "stride_ot": out.stride(0),
    }
    grid = (num_tokens, -(-hidden_size // block))
    return Launch(combine_kernel, grid, args, {"BLOCK_H": block}, {"num_warps": num_warps})


def _strides(tensor: torch.Tensor | None, *names: str) -> dict[str, int]:
    """The first strides of a tensor by name; zeros without one."""
    return {name: 0 if tensor is None else tensor.stride(dim) for dim, name in enumerate(names)}


def _fit(cut: Tile, format: str) -> Tile:
    """The tile as the format allows it: a step of int4 is two products, of 16 inputs at least."""
    return replace(cut, block_k=max(cut.block_k, 32)) if format == "int4" else cut


def _weights_args(weights: ExpertWeights) -> dict[str, Any]:
    scales, bias = weights.scales, weights.bias
    by_input = scales is not None and scales.dim() == 3
    return {
        "scales_ptr": scales,
        "bias_ptr": bias,
        **_strides(weights.data, "stride_ws", "stride_wn"),
        **_strides(scales, "stride_ss", "stride_sn"),
        "stride_sk": scales.stride(2) if scales is not None and by_input else 0,
        **_strides(bias, "stride_bs"),
    }


def _alignment_args(alignment: Alignment) -> dict[str, Any]:
    return {
        "sorted_pairs_ptr": alignment.sorted_pairs,
        "block_slots_ptr": alignment.block_slots,
        "num_pairs": alignment.num_pairs,
        "num_blocks": alignment.block_slots.shape[0],
        "top_k": alignment.top_k,
    }


def _constants(format: str, alignment: Alignment, cut: Tile, num_inputs: int) -> dict[str, Any]:
    return {
        "FORMAT": format,
        "IDENTITY": alignment.is_identity,
        "EVEN_K": num_inputs % cut.block_k == 0,
        "SWAP": cut.swap,
        "GROUP_M": cut.group_m,
        "BLOCK_M": alignment.block_m,
        "BLOCK_N": cut.block_n,
        "BLOCK_K": cut.block_k,
    }


def _options(cut: Tile) -> dict[str, int]:
    return {"num_warps": cut.num_warps, "num_stages": cut.num_stages}


def _grid(alignment: Alignment, num_columns: int, cut: Tile) -> tuple[int]:
    """A program for each tile that there may be."""
    return (alignment.block_slots.shape[0] * -(-num_columns // cut.block_n),)


def _weights_descriptor(weights: ExpertWeights, cut: Tile) -> TensorDescriptor | None:
    """All slots' weights as one matrix [S * N, K], if the tile and their layout allow it."""
    data = weights.data
    slots, outputs, inputs = data.shape
    if not cut.tma_weights or weights.format != "plain":
        return None
    if data.stride(0) != outputs * data.stride(1) or not _is_aligned(data, data.stride(1)):
        return None
    shape, strides = [slots * outputs, inputs], [data.stride(1), 1]
    return TensorDescriptor(data, shape, strides, [cut.block_n, cut.block_k])


def _rows_descriptor(h: torch.Tensor, alignment: Alignment, cut: Tile) -> TensorDescriptor | None:
    """The sorted rows, if the tile and their layout allow it."""
    if not cut.tma_rows or alignment.is_identity or not _is_aligned(h, h.stride(0)):
        return None
    block = [alignment.block_m, cut.block_k]
    return TensorDescriptor(h, list(h.shape), [h.stride(0), 1], block)


def _is_aligned(tensor: torch.Tensor, row_stride: int) -> bool:
    """Whether rows start where a descriptor needs it: at multiples of 16 bytes."""
    return (
        tensor.numel() > 0
        and tensor.data_ptr() % 16 == 0
        and row_stride * tensor.element_size() % 16 == 0
    )
