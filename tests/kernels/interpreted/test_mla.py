"""The kernel over latent caches in the interpreter, against the formula in float64."""

from __future__ import annotations

import pytest
import torch

from moeserve_kernels import backend
from moeserve_kernels.formulas import mla as formulas
from moeserve_kernels.operations.mla import mla_decode

from .. import guards
from ..attention_inputs import Inputs, draw


def latent(seq_lens: list[int], heads: int, width: int, dtype: torch.dtype, **sizes: int) -> Inputs:
    """One kv head, whose key cache is the latent cache."""
    return draw(seq_lens, heads=heads, kv_heads=1, d=width, d_v=16, dtype=dtype, **sizes)


def check(inputs: Inputs, value_dim: int, num_splits: int | None, scale: float = 0.1) -> None:
    tensors = [
        inputs.query,
        inputs.key_cache[:, :, 0],
        inputs.block_table,
        inputs.seq_lens,
    ]
    tensors = [guards.inside_nan(one) for one in tensors]
    longest = int(inputs.seq_lens.max())
    results = []
    for _ in range(2):
        with backend.forced("triton-interpret"), guards.poisoned_empty():
            out = mla_decode(
                *tensors, scale, value_dim=value_dim, max_seq_len=longest, num_splits=num_splits
            )
            results.append(out)
    guards.assert_same_bits(*results)
    query, cache, table, lengths = tensors
    expected = formulas.mla_decode(
        query.double(),
        cache.double(),
        table,
        lengths,
        scale,
        value_dim=value_dim,
        max_seq_len=longest,
    )
    assert results[0].dtype == query.dtype
    guards.assert_close(results[0], expected)


@pytest.mark.parametrize("num_splits", [1, 3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_mla_of_deepseek_sizes(dtype: torch.dtype, num_splits: int | None) -> None:
    check(latent([100, 1, 16], 16, 576, dtype, block_size=64), 512, num_splits)


@pytest.mark.parametrize(("heads", "num_splits"), [(1, 4), (20, 1), (17, 3)])
def test_short_and_empty_sequences_and_any_heads(heads: int, num_splits: int) -> None:
    check(latent([130, 0, 64, 65], heads, 48, torch.float32), 32, num_splits)


def test_sizes_that_are_no_powers_of_two() -> None:
    check(latent([33, 5], 5, 124, torch.float32, block_size=7), 100, 2)


def test_splits_are_chosen_by_length() -> None:
    check(latent([600], 2, 48, torch.float32), 32, None)
