"""Tiles near the shipped ones, timed: the best of each size are written as a new table.

Both products are tuned for each ``block_m`` of bfloat16 weights, at a number of tokens where that
tile is chosen. One setting is changed at a time: few candidates, each a neighbour that may win.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from moeserve_kernels import tables
from moeserve_kernels.alignment import Alignment, max_rows
from moeserve_kernels.device import tiles
from moeserve_kernels.device.launch import Launch
from moeserve_kernels.device.moe_launch import moe_down_launch, moe_up_launch
from moeserve_kernels.device.targets import Target, target_of
from moeserve_kernels.device.tiles import MoeTile, Tile
from moeserve_kernels.gpucheck import moe_bench, report
from moeserve_kernels.gpucheck.measure import time_calls
from moeserve_kernels.gpucheck.plan import Context, Item
from moeserve_kernels.operations.align import align
from moeserve_kernels.weights import ExpertWeights

_MODEL = "qwen3-30b"
_TOKENS = {16: 64, 32: 256, 64: 1024, 128: 4096}  # by block_m: where it is likely to be chosen
_GAIN = 0.97  # a winner must need less than this part of the shipped tile's time


def items(*, dry: bool) -> list[Item]:
    """Each product at each ``block_m``, then the table of winners."""
    sizes = [16] if dry else list(_TOKENS)
    found = [
        Item("tune", f"{product} {block_m}", 8.0, partial(_tune, product, block_m))
        for block_m in sizes
        for product in ("up", "down")
    ]
    return [*found, Item("tune", "table of winners", 1.0, _write_table)]


def candidates(tile: Tile, product: str, target: Target) -> Iterator[Tile]:
    """The tile itself, then its neighbours."""
    yield tile
    if tile.block_n > 32:
        yield replace(tile, block_n=tile.block_n // 2)
    if tile.block_n < 256:
        yield replace(tile, block_n=tile.block_n * 2)
    yield replace(tile, block_k=64 if tile.block_k > 64 else 128)
    yield replace(tile, num_stages=tile.num_stages + 1)
    yield replace(tile, num_stages=max(2, tile.num_stages - 1))
    yield replace(tile, num_warps=8 if tile.num_warps == 4 else 4)
    yield replace(tile, group_m=8 if tile.group_m == 1 else 1)
    if target.tma:
        yield replace(tile, tma_weights=not tile.tma_weights)
    if product == "down":
        yield replace(tile, persistent=not tile.persistent)
        if target.tma:
            yield replace(tile, tma_rows=not tile.tma_rows)


def launches(target: Target) -> Iterator[tuple[str, Launch]]:
    """Every candidate as a launch of ``meta`` tensors, so that they can be compiled beforehand."""
    for block_m, tokens in _TOKENS.items():
        shipped = _shipped(target, block_m, torch.bfloat16)
        if shipped is None:
            continue
        shape = moe_bench.MODELS[_MODEL]
        alignment = _meta_alignment(tokens * shape.top_k, shape.top_k, shape.num_experts, block_m)
        hidden, inner = shape.hidden_size, shape.intermediate_size
        w13 = ExpertWeights("plain", _meta(shape.num_experts, 2 * inner, hidden))
        w2 = ExpertWeights("plain", _meta(shape.num_experts, hidden, inner))
        for product in ("up", "down"):
            build = partial(_launch, product, _meta(tokens, hidden), w13, w2, alignment, target)
            for index, cut in enumerate(candidates(getattr(shipped, product), product, target)):
                yield f"{product} {block_m} {index}", build(_with(shipped, product, cut))


def _tune(product: str, block_m: int, context: Context) -> None:
    target = target_of(context.device)
    shipped = _shipped(target, block_m, context.dtype)
    if shipped is None:
        context.report.skipped([f"tune {product} {block_m}"], "no such tile is shipped")
        return
    experts = moe_bench.experts_of(_MODEL, "plain", context.device, context.dry)
    tokens = 8 if context.dry else _TOKENS[block_m]
    prepared = _prepare(product, block_m, experts, tokens, target, context)
    times: list[tuple[float, Tile]] = []
    cuts = list(dict.fromkeys(candidates(getattr(shipped, product), product, target)))
    for cut in cuts[:2] if context.dry else cuts:
        tile = _with(shipped, product, cut)
        calls: list[Callable[[], object]] = [build(tile).run for build in prepared]
        try:
            times.append((time_calls(calls, seconds=0.04).microseconds, cut))
        except Exception as error:  # too much shared memory, or the compiler gives up
            what = f"{product} {block_m} {_settings(cut)}"
            context.report.failed("tune", what, error, matters=False)
    if not times:
        return
    before = times[0][0] if times[0][1] == cuts[0] else float("inf")
    best, winner = min(times, key=lambda one: one[0])
    if best > before * _GAIN:
        best, winner = times[0]
    context.report.add(
        "tune",
        f"{product} {block_m}",
        target=target.name,
        product=product,
        block_m=block_m,
        microseconds=best,
        shipped_us=before,
        changed=winner != cuts[0],
        tile=_settings(winner),
    )


def _prepare(
    product: str,
    block_m: int,
    experts: moe_bench.Experts,
    tokens: int,
    target: Target,
    context: Context,
) -> list[Callable[[MoeTile], Launch]]:
    """For each set of inputs, from a tile to a launch."""
    steps = moe_bench.draw_steps(experts, tokens, 1e8, context)
    found: list[Callable[[MoeTile], Launch]] = []
    for step in steps:
        alignment = align(step.topk_ids, experts.w13.num_slots, block_m)
        found.append(partial(_launch, product, step.x, experts.w13, experts.w2, alignment, target))
    return found


def _launch(
    product: str,
    x: torch.Tensor,
    w13: ExpertWeights,
    w2: ExpertWeights,
    alignment: Alignment,
    target: Target,
    tile: MoeTile,
) -> Launch:
    h = x.new_empty(alignment.num_rows, w2.num_inputs)
    if product == "up":
        return moe_up_launch(
            x,
            w13,
            alignment,
            h,
            activation="silu",
            alpha=1.702,
            limit=7.0,
            tile=tile,
        )
    h = h if h.is_meta else h.normal_()
    top_k = alignment.top_k
    pairs = x.new_empty(alignment.num_pairs // top_k, top_k, w2.num_outputs)
    return moe_down_launch(h, w2, alignment, pairs, topk_weights=None, tile=tile, target=target)


def _write_table(context: Context) -> None:
    """The shipped table with the winners in it, beside the lines, to be copied if it is wanted."""
    target = target_of(context.device)
    table = json.loads(json.dumps(tables.load("moe", target.name)))
    for line in report.read(context.report.path):
        if line["kind"] == "tune" and line.get("changed"):
            for tile in table["formats"]["plain"]:
                if tile["block_m"] == line["block_m"]:
                    tile[line["product"]] = line["tile"]
    tiles.parse(target.name, table)  # well formed, or an error here
    path = Path(f"{context.report.path}.moe-{target.name}.json")
    path.write_text(json.dumps(table, indent=2) + "\n")
    context.report.add("tune", "table of winners", target=target.name, path=str(path))


def _with(tile: MoeTile, product: str, cut: Tile) -> MoeTile:
    return replace(tile, up=cut) if product == "up" else replace(tile, down=cut)


def _shipped(target: Target, block_m: int, dtype: torch.dtype) -> MoeTile | None:
    table = tiles.load(target.name)
    return next((one for one in table.of("plain", dtype) if one.block_m == block_m), None)


def _settings(tile: Tile) -> dict[str, Any]:
    """What a table says of a tile: what is not the default."""
    default = asdict(Tile(0, 0, 0, 0))
    return {name: one for name, one in asdict(tile).items() if one != default[name]}


def _meta(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def _meta_alignment(num_pairs: int, top_k: int, num_slots: int, block_m: int) -> Alignment:
    rows = max_rows(num_pairs, num_slots, block_m)
    return Alignment(
        _meta(rows, dtype=torch.int32),
        _meta(rows // block_m, dtype=torch.int32),
        _meta(num_slots, dtype=torch.int32),
        _meta(1, dtype=torch.int32),
        num_pairs,
        top_k,
        block_m,
    )
