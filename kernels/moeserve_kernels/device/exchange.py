"""Rows for the exchange between ranks on a GPU: order the tokens, then copy or quantise."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
import triton

from moeserve_kernels import tables
from moeserve_kernels.device.align import scan_launch
from moeserve_kernels.device.kernels import exchange as kernels
from moeserve_kernels.device.launch import Launch
from moeserve_kernels.device.quant import quant_rows_launch
from moeserve_kernels.device.targets import Target, target_of
from moeserve_kernels.packed import Packed


def ep_pack(
    hidden_states: torch.Tensor,
    pair_ranks: torch.Tensor,
    num_ranks: int,
    *,
    quantize: torch.dtype | None = None,
) -> Packed:
    """See ``operations.exchange.ep_pack``."""
    target = target_of(hidden_states.device)
    packed, launches = ep_pack_launches(
        hidden_states, pair_ranks, num_ranks, quantize=quantize, target=target
    )
    for launch in launches:
        launch.run()
    return packed


def ep_pack_launches(
    hidden_states: torch.Tensor,
    pair_ranks: torch.Tensor,
    num_ranks: int,
    *,
    quantize: torch.dtype | None,
    target: Target,
    tile: Mapping[str, int] | None = None,
) -> tuple[Packed, list[Launch]]:
    """The packed rows with their tensors unwritten, and what writes them."""
    tile = tables.load("rows", target.name)["ep_pack"] if tile is None else tile
    num_tokens, top_k = pair_ranks.shape
    device, dtype = hidden_states.device, hidden_states.dtype
    most = num_tokens * min(top_k, num_ranks)
    packed = Packed(
        torch.empty(most, hidden_states.shape[1], dtype=quantize or dtype, device=device),
        None if quantize is None else torch.empty(most, dtype=torch.float32, device=device),
        torch.empty(most, dtype=torch.int32, device=device),
        torch.empty(num_tokens, num_ranks, dtype=torch.int32, device=device),
        torch.empty(num_ranks, dtype=torch.int32, device=device),
    )
    launches = _order_launches(pair_ranks, packed, tile)
    if packed.scales is None:
        launches.append(_copy_launch(hidden_states, packed, tile))
    else:
        launches.append(
            quant_rows_launch(
                hidden_states,
                packed.rows,
                packed.scales.unsqueeze(1),
                group_size=None,
                target=target,
                source_rows=packed.row_tokens,
            )
        )
    return packed, launches


def ep_unpack(rows: torch.Tensor, packed: Packed) -> torch.Tensor:
    """See ``operations.exchange.ep_unpack``."""
    out, launch = ep_unpack_launch(rows, packed, target=target_of(rows.device))
    launch.run()
    return out


def ep_unpack_launch(
    rows: torch.Tensor, packed: Packed, *, target: Target, tile: Mapping[str, int] | None = None
) -> tuple[torch.Tensor, Launch]:
    """The sums, unwritten, and what writes them."""
    tile = tables.load("rows", target.name)["ep_unpack"] if tile is None else tile
    num_tokens, num_ranks = packed.row_of.shape
    width = rows.shape[1]
    out = torch.empty(num_tokens, width, dtype=rows.dtype, device=rows.device)
    block_h = min(tile["block_h"], triton.next_power_of_2(width))
    args = {
        "rows_ptr": rows,
        "row_of_ptr": packed.row_of,
        "out_ptr": out,
        "num_ranks": num_ranks,
        "width": width,
        "stride_rows": rows.stride(0),
        "stride_out": out.stride(0),
    }
    grid = (num_tokens, triton.cdiv(width, block_h))
    options = {"num_warps": tile["num_warps"]}
    return out, Launch(kernels.sum_rows_kernel, grid, args, {"BLOCK_H": block_h}, options)


def _order_launches(
    pair_ranks: torch.Tensor, packed: Packed, tile: Mapping[str, int]
) -> list[Launch]:
    """What writes ``row_tokens``, ``row_of`` and ``counts``: one launch when a chunk holds all."""
    num_tokens, num_ranks = packed.row_of.shape
    block_r = triton.next_power_of_2(num_ranks)
    chunk = min(max(1, tile["elements"] // block_r), tile["max_chunk"])
    chunk = min(chunk, triton.next_power_of_2(max(1, num_tokens)))
    num_chunks = max(1, triton.cdiv(num_tokens, chunk))  # without tokens the counts are zero
    args = {
        "ranks_ptr": pair_ranks,
        "num_tokens": num_tokens,
        "num_ranks": num_ranks,
        "top_k": pair_ranks.shape[1],
        "stride_t": pair_ranks.stride(0),
        "stride_k": pair_ranks.stride(1),
    }
    chunks = torch.empty(num_chunks, num_ranks, dtype=torch.int32, device=pair_ranks.device)
    placing = args | {
        "chunk_offsets_ptr": chunks,
        "counts_ptr": packed.counts,
        "row_tokens_ptr": packed.row_tokens,
        "row_of_ptr": packed.row_of,
        "num_rows": packed.row_tokens.shape[0],
    }
    sizes = {"CHUNK": chunk, "BLOCK_R": block_r}
    constants = sizes | {"ONE_CHUNK": num_chunks == 1, "BLOCK_FILL": tile["fill_rows"]}
    options = {"num_warps": tile["num_warps"]}
    place = Launch(kernels.place_tokens_kernel, (num_chunks,), placing, constants, options)
    if num_chunks == 1:
        return [place]
    counting = args | {"chunk_counts_ptr": chunks}
    count = Launch(kernels.count_needs_kernel, (num_chunks,), counting, sizes, options)
    return [count, scan_launch(chunks, packed.counts, tile), place]


def _copy_launch(hidden_states: torch.Tensor, packed: Packed, tile: Mapping[str, int]) -> Launch:
    num_rows, width = packed.rows.shape
    block_h = min(tile["block_h"], triton.next_power_of_2(width))
    args = {
        "source_ptr": hidden_states,
        "row_tokens_ptr": packed.row_tokens,
        "rows_ptr": packed.rows,
        "width": width,
        "stride_source": hidden_states.stride(0),
        "stride_rows": packed.rows.stride(0),
    }
    grid = (num_rows, triton.cdiv(width, block_h))
    options = {"num_warps": tile["num_warps"]}
    return Launch(kernels.copy_rows_kernel, grid, args, {"BLOCK_H": block_h}, options)


def aot_cases(target: Target) -> Iterator[tuple[str, Launch]]:
    """Few and many tokens and ranks at the widths of models, on the ``meta`` device."""
    for tokens, width, top_k, num_ranks in (
        (16, 2048, 8, 8),
        (4096, 7168, 8, 64),
        (64, 4096, 2, 2),
    ):
        for quantize in (None, torch.float8_e4m3fn, torch.int8):
            x = torch.empty(tokens, width, dtype=torch.bfloat16, device="meta")
            ranks = torch.empty(tokens, top_k, dtype=torch.int32, device="meta")
            packed, launches = ep_pack_launches(
                x, ranks, num_ranks, quantize=quantize, target=target
            )
            label = f"T{tokens} H{width} k{top_k} R{num_ranks} {quantize}"
            if quantize is not None:
                launches = launches[-1:]
            else:
                launches = [*launches, ep_unpack_launch(packed.rows, packed, target=target)[1]]
            for launch in launches:
                yield f"{launch.kernel.fn.__name__} {label}", launch
