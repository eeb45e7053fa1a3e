"""Writing the paged cache on a CPU: rotation and one scattered copy."""

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
    tokens = (slot_mapping >= 0).nonzero()[:, 0]
    slots = slot_mapping[tokens]
    angles = None if cos is None or sin is None else (cos, sin)
    chosen = None if angles is None else (angles[0][tokens], angles[1][tokens])
    _scatter(key_cache, slots, _rotate(key[tokens], chosen), k_scale)
    if value is not None and value_cache is not None:
        _scatter(value_cache, slots, value[tokens], v_scale)
    return None if query is None else _rotate(query, angles).to(query.dtype)


def _rotate(x: torch.Tensor, angles: tuple[torch.Tensor, torch.Tensor] | None) -> torch.Tensor:
    """In float32 at least; without angles x as it is."""
    if angles is None:
        return x
    cos, sin = (one.unsqueeze(1) for one in angles)
    half = cos.shape[-1]
    out = x.to(torch.promote_types(x.dtype, torch.float32), copy=True)
    first, second = x[..., :half], x[..., half : 2 * half]
    out[..., :half] = first * cos - second * sin
    out[..., half : 2 * half] = second * cos + first * sin
    return out


def _scatter(cache: torch.Tensor, slots: torch.Tensor, rows: torch.Tensor, scale: float) -> None:
    block_size = cache.shape[1]
    stored = rows
    if cache.dtype == _FP8:
        wide = rows.to(torch.promote_types(rows.dtype, torch.float32))
        stored = (wide / scale).clamp(-448, 448).to(_FP8).view(torch.uint8)
        cache = cache.view(torch.uint8)
    cache[slots // block_size, slots % block_size] = stored.to(cache.dtype)
