"""Writing the paged cache, token by token."""

from __future__ import annotations

import torch

_FP8 = torch.float8_e4m3fn


def kv_write(
    key: torch.Tensor,
    value: torch.Tensor | None,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor | None,
    slot_mapping: torch.Tensor,
    *,
    cos: torch.Tensor | None = None,
    sin: torch.Tensor | None = None,
    query: torch.Tensor | None = None,
    k_scale: float = 1.0,
    v_scale: float = 1.0,
) -> torch.Tensor | None:
    """See ``operations.kv_cache.kv_write``."""
    wide = torch.promote_types(key.dtype, torch.float32)
    rotated_key = _rotated(key.to(wide), cos, sin)
    for token, slot in enumerate(slot_mapping.tolist()):
        if slot >= 0:
            where = divmod(slot, key_cache.shape[1])
            key_cache[where] = _stored(rotated_key[token], key_cache.dtype, k_scale)
            if value is not None and value_cache is not None:
                value_cache[where] = _stored(value[token].to(wide), value_cache.dtype, v_scale)
    return None if query is None else _rotated(query.to(wide), cos, sin).to(query.dtype)


def _rotated(x: torch.Tensor, cos: torch.Tensor | None, sin: torch.Tensor | None) -> torch.Tensor:
    if cos is None or sin is None:
        return x
    half = cos.shape[1]
    first, second, rest = torch.split(x, [half, half, x.shape[2] - 2 * half], -1)
    cos, sin = cos[:, None], sin[:, None]
    return torch.cat([first * cos - second * sin, second * cos + first * sin, rest], -1)


def _stored(x: torch.Tensor, dtype: torch.dtype, scale: float) -> torch.Tensor:
    return (x / scale).clamp(-448, 448).to(dtype) if dtype == _FP8 else x.to(dtype)
