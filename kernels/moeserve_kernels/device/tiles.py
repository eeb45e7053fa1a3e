"""Tiles of the grouped products, and which to take: by how pairs spread over slots, not their sum.

A table holds, for each format of weights, tiles of growing ``block_m``. One ``block_m`` serves both
products, as pairs are padded once.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch

from moeserve_kernels import tables
from moeserve_kernels.weights import FORMATS

# Bytes of a weight with its share of scales, where activations have 16 bits.
WEIGHT_BYTES = {"plain": 2.0, "fp8_channel": 1.0, "fp8_block": 1.0, "int8": 1.0, "int4": 0.53}
# Estimates, in the time that memory takes for a byte:
UNPACK = 0.3  # to take a quantised weight into the dtype of the rows, anew for each block
L2_SPEED = 2.5  # bytes that L2 delivers
OVERLAP = 0.1  # share of the two lesser costs that the greatest does not hide


@dataclass(frozen=True)
class Tile:
    """How one grouped product is cut up.

    block_n: columns of a tile; of gate and of up each. block_k: inputs a step.
    group_m: blocks of rows whose tiles stand next to each other, so that weights come from L2.
    swap: weights are the first operand. tma_weights, tma_rows: that operand comes through a tensor
    descriptor. persistent: a fixed number of programs steps through all tiles.
    """

    block_n: int
    block_k: int
    num_warps: int
    num_stages: int
    group_m: int = 1
    swap: bool = False
    tma_weights: bool = False
    tma_rows: bool = False
    persistent: bool = False


@dataclass(frozen=True)
class MoeTile:
    """The tiles of both products for blocks of ``block_m`` rows."""

    block_m: int
    up: Tile
    down: Tile


@dataclass(frozen=True)
class Table:
    """What is shipped for one chip.

    flops_per_byte: products and sums in 16 bits in the time that memory takes for a byte.
    formats: tiles by format, of growing ``block_m``; "float32" is for activations of that dtype.
    combine_block, combine_warps: of ``combine``.
    """

    target: str
    flops_per_byte: float
    formats: Mapping[str, tuple[MoeTile, ...]]
    combine_block: int
    combine_warps: int

    def of(self, format: str, dtype: torch.dtype = torch.bfloat16) -> tuple[MoeTile, ...]:
        """The tiles for weights in ``format`` and activations of ``dtype``.

        Raises:
            ValueError: the chip has no kernel for the format.
        """
        if format not in self.formats:
            raise ValueError(
                f"format = {format!r}: there is no kernel for {self.target}, must be one of "
                f"{', '.join(one for one in FORMATS if one in self.formats)}"
            )
        return self.formats["float32" if dtype == torch.float32 else format]

    def tile(self, format: str, dtype: torch.dtype, block_m: int) -> MoeTile:
        """The tile with ``block_m`` rows.

        Raises:
            ValueError: there is none.
        """
        tiles = self.of(format, dtype)
        for tile in tiles:
            if tile.block_m == block_m:
                return tile
        raise ValueError(
            f"block_m = {block_m}: {format} weights on {self.target} take blocks of "
            f"{', '.join(str(tile.block_m) for tile in tiles)} rows"
        )


@cache
def load(target: str) -> Table:
    """The table of the chip ``target``.

    Raises:
        ValueError: there is none, or it is not well formed.
    """
    return parse(target, tables.load("moe", target))


def parse(target: str, data: Mapping[str, Any]) -> Table:
    """A table from its JSON; a format given as a string has the tiles of the format it names.

    Raises:
        ValueError: a key is missing or unknown, or block sizes do not grow.
    """
    try:
        formats = {}
        for name, tiles in data["formats"].items():
            if name not in (*FORMATS, "float32"):
                raise ValueError(f"formats: {name!r}, must be one of {', '.join(FORMATS)}, float32")
            tiles = data["formats"][tiles] if isinstance(tiles, str) else tiles
            formats[name] = tuple(
                MoeTile(one["block_m"], Tile(**one["up"]), Tile(**one["down"])) for one in tiles
            )
            sizes = [tile.block_m for tile in formats[name]]
            if not sizes or sizes != sorted(set(sizes)):
                raise ValueError(f"formats.{name}: block_m is {sizes}, must grow")
        combine = data["combine"]
        return Table(
            target, float(data["flops_per_byte"]), formats, combine["block"], combine["num_warps"]
        )
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"moe-{target}.json: {error}") from None


def choose(
    table: Table,
    format: str,
    counts: Sequence[float] | None,
    num_pairs: int,
    num_slots: int,
    *,
    dtype: torch.dtype = torch.bfloat16,
) -> MoeTile:
    """The tile with the least estimated time.

    counts: pairs of each slot, may be averages; None: ``num_pairs`` spread evenly over the slots.

    Few rows a slot leave the products waiting for weights, and padding costs nothing; above
    ``flops_per_byte * bytes of a weight / 2`` rows a slot every padded row costs. In between, small
    blocks read the weights of a slot more often from L2.
    """
    tiles = table.of(format, dtype)
    if counts is None:
        counts = [num_pairs / max(num_slots, 1)]  # one slot stands for all
    width = 4.0 if format == "plain" and dtype == torch.float32 else WEIGHT_BYTES[format]
    x_width = 4.0 if dtype == torch.float32 else 2.0
    unpack = 0.0 if format == "plain" else UNPACK

    def cost(tile: MoeTile) -> float:
        arithmetic = tile.block_m * 2 / table.flops_per_byte + unpack
        return _cost(tile, counts, width, x_width, arithmetic)

    return min(tiles, key=cost)


def _cost(
    tile: MoeTile, counts: Sequence[float], width: float, x_width: float, per_block: float
) -> float:
    """Estimated time of the first product, in the time that memory takes for a byte, divided by
    the size of one slot's weights.

    per_block: arithmetic of a block, padding included, for one weight.

    The greatest of the times of memory (each slot's weights once), L2 (a block's weights, and its
    rows for every tile of columns) and arithmetic, and a little of the others.
    """
    slots = sum(min(count, 1.0) for count in counts)
    # A slot that has less than one pair on average is hit that often.
    blocks = sum(
        math.ceil(count / tile.block_m) if count >= 1 else count for count in counts if count > 0
    )
    memory = slots * width
    l2 = blocks * (width + x_width * tile.block_m / (2 * tile.up.block_n)) / L2_SPEED
    arithmetic = blocks * per_block
    greatest = max(memory, l2, arithmetic)
    return greatest + OVERLAP * (memory + l2 + arithmetic - greatest)
