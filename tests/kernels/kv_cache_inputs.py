"""Random inputs of ``kv_write`` and what the formula makes of them."""

from __future__ import annotations

from typing import Any

import torch

from moeserve_kernels.formulas import kv_cache as formulas

FP8 = torch.float8_e4m3fn
Tensors = tuple[torch.Tensor | None, ...]


def draw(
    *,
    d: int,
    d_v: int,
    rotated: int,
    heads: int,
    kv_heads: int,
    tokens: int = 21,
    block_size: int = 16,
    dtype: torch.dtype = torch.float32,
    cache_dtype: torch.dtype | None = None,
    strided: bool = False,
    seed: int = 0,
) -> tuple[Tensors, dict[str, Any]]:
    """``((key, value, key_cache, value_cache, slot_mapping), options)``.

    Caches are NaN. d_v 0: no values. heads 0: no query. strided: rows cut out of a joint
    projection, caches with heads before slots. Every seventh slot is negative.
    """
    generator = torch.Generator().manual_seed(seed)
    num_blocks = tokens // block_size + 2

    def rows(count: int, size: int) -> torch.Tensor | None:
        if count == 0 or size == 0:
            return None
        made = torch.randn(tokens, count + 3, size, generator=generator).to(dtype)
        return made[:, 1 : count + 1] if strided else made[:, :count].contiguous()

    def cache(size: int) -> torch.Tensor | None:
        if size == 0:
            return None
        shape = (num_blocks, block_size, kv_heads, size)
        if strided:
            made = torch.full((num_blocks, kv_heads, block_size, size), torch.nan)
            return made.to(cache_dtype or dtype).transpose(1, 2)
        return torch.full(shape, torch.nan).to(cache_dtype or dtype)

    slots = torch.randperm(num_blocks * block_size, generator=generator)[:tokens]
    slots[3::7] = -1
    options: dict[str, Any] = {"k_scale": 0.5, "v_scale": 2.5} if cache_dtype == FP8 else {}
    if rotated:
        angle = torch.randn(tokens, rotated // 2, generator=generator) * 10
        options |= {"cos": angle.cos(), "sin": angle.sin(), "query": rows(heads, d)}
    return (rows(kv_heads, d), rows(kv_heads, d_v), cache(d), cache(d_v), slots), options


def expected(inputs: Tensors, options: dict[str, Any]) -> tuple[torch.Tensor | None, Tensors]:
    """The rotated query and both caches by the formula, in float64 where caches are not fp8."""

    def exact(one: Any) -> Any:
        is_wide = isinstance(one, torch.Tensor) and one.dtype not in (FP8, torch.int64)
        return one.double() if is_wide else one

    key, value, key_cache, value_cache, slots = (exact(one) for one in inputs)
    caches = [None if one is None else one.clone() for one in (key_cache, value_cache)]
    exact_options = {name: exact(one) for name, one in options.items()}
    query = formulas.kv_write(key, value, caches[0], caches[1], slots, **exact_options)
    return query, tuple(caches)
