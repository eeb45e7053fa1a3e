"""Matrix products as a series of calls of one shape.

A BLAS picks its kernel, and with it the order of additions, by the shapes it is given. So rows go
in tiles of a fixed number, the last one filled up with zeros, each tile in a fresh buffer. That
inside a tile neither the place of a row nor its neighbours matter is plausible but nowhere
promised, hence it is tested for each shape at first use; a shape that fails gets smaller tiles,
down to single rows, where there is nothing left to depend on.
"""

from __future__ import annotations

import torch

_TILE_ROWS = (16, 8, 4, 2)
_ALIGNMENT = 64  # bytes; a BLAS may add up in another order where a weight is aligned otherwise


class TileLinear:
    """``x [T, K] @ weight [N, K].T`` -> [T, N] in the dtype of x, computed in float32.

    Remembers for each (N, K) the tile that passed the test.
    """

    def __init__(self) -> None:
        self._rows_by_shape: dict[tuple[int, int], int] = {}

    def __call__(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """The product; T may be 0."""
        num_rows, num_inputs = x.shape
        wide_weight = _aligned(weight.float())
        rows = self._tile_rows(wide_weight)
        padded = x.new_zeros(-(-num_rows // rows) * rows, num_inputs, dtype=torch.float32)
        padded[:num_rows] = x
        tiles = [tile.clone() @ wide_weight.T for tile in torch.split(padded, rows)]
        product = torch.cat(tiles) if num_rows else x.new_zeros(0, weight.shape[0])
        return product[:num_rows].to(x.dtype)

    def _tile_rows(self, weight: torch.Tensor) -> int:
        shape = (weight.shape[0], weight.shape[1])
        if shape not in self._rows_by_shape:
            passed = (rows for rows in _TILE_ROWS if rows_are_independent(weight, rows))
            self._rows_by_shape[shape] = next(passed, 1)
        return self._rows_by_shape[shape]


def rows_are_independent(weight: torch.Tensor, num_rows: int) -> bool:
    """Whether in a tile of ``num_rows`` a row's result depends on the row alone, bit for bit.

    Puts every row of a random tile at every place, once among the other rows and once among rows
    of other magnitude.
    """
    generator = torch.Generator().manual_seed(num_rows)
    tile = torch.randn(num_rows, weight.shape[1], generator=generator)
    expected = tile @ weight.T
    for shift in range(num_rows):
        if not torch.equal(tile.roll(shift, 0) @ weight.T, expected.roll(shift, 0)):
            return False
        alone = torch.randn(tile.shape, generator=generator) * 1e3
        alone[shift] = tile[0]
        if not torch.equal((alone @ weight.T)[shift], expected[0]):
            return False
    return True


def _aligned(weight: torch.Tensor) -> torch.Tensor:
    contiguous = weight.contiguous()
    return contiguous if contiguous.data_ptr() % _ALIGNMENT == 0 else contiguous.clone()
