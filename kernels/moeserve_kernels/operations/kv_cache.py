"""Writing keys and values into the paged cache, with the rotary embedding on the way."""

from __future__ import annotations

import torch

from moeserve_kernels import backend, check

_FLOATS = (torch.float32, torch.float16, torch.bfloat16, torch.float64)
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
    """Write each token's key and value to its slot; return the rotated query, None without one.

    key: [T, kv_heads, d], float32, float16 or bfloat16; tokens and heads with any stride.
    value: [T, kv_heads, d_v], dtype of key.
    key_cache: [num_blocks, block_size, kv_heads, d], value_cache: [.., d_v]; dtype of key, or
        float8_e4m3fn, which gets ``clamp(x / scale, -448, 448)``. Values and their cache are None
        for a latent cache, which is a key cache with one kv head.
    slot_mapping: int64 [T], ``block * block_size + slot in it``, all different; a negative one
        skips the token's key and value.
    cos, sin: float32 [T, r / 2], of each token's position. The first r values of every key head
        are rotated, the i-th with the (i + r / 2)-th, the others are left (NeoX order).
    query: [T, heads, d], dtype of key, rotated into a new tensor; key itself is not changed.

    Computed in float32, rounded once.

    Raises ValueError for a wrong shape or dtype, and for fp8 on a GPU that can not write it.

    Source: Su et al., "RoFormer" (arXiv 2104.09864).
    """
    _check_caches(key, value, key_cache, value_cache, k_scale, v_scale)
    _check_slots(slot_mapping, key, key_cache)
    _check_angles(key, cos, sin, query)
    check.same_device(
        key=key,
        value=value,
        key_cache=key_cache,
        value_cache=value_cache,
        slot_mapping=slot_mapping,
        cos=cos,
        sin=sin,
        query=query,
    )
    family = backend.implementation("kv_cache", key)
    angles = {"cos": cos, "sin": sin, "query": query}
    result: torch.Tensor | None = family.kv_write(
        key, value, key_cache, value_cache, slot_mapping, k_scale=k_scale, v_scale=v_scale, **angles
    )
    return result


def _check_caches(
    key: torch.Tensor,
    value: torch.Tensor | None,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor | None,
    k_scale: float,
    v_scale: float,
) -> None:
    _check_rows(key, value)
    _check_cache("key", key, "key_cache", key_cache, k_scale)
    if (value is None) != (value_cache is None):
        raise ValueError("value, value_cache: one is None, must be both or none")
    if value is not None and value_cache is not None:
        _check_cache("value", value, "value_cache", value_cache, v_scale)
        check.shape("value_cache", value_cache, (*key_cache.shape[:3], "d_v"))
        check.dtype("value_cache", value_cache, key_cache.dtype)


def _check_slots(slot_mapping: torch.Tensor, key: torch.Tensor, key_cache: torch.Tensor) -> None:
    check.dtype("slot_mapping", slot_mapping, torch.int64)
    check.shape("slot_mapping", slot_mapping, (key.shape[0],))
    check.rows_contiguous("slot_mapping", slot_mapping)
    check.values("slot_mapping", slot_mapping, -(1 << 63), key_cache.shape[0] * key_cache.shape[1])


def _check_rows(key: torch.Tensor, value: torch.Tensor | None) -> None:
    check.dtype("key", key, *_FLOATS)
    check.shape("key", key, ("T", "kv_heads", "d"))
    check.at_least("d", key.shape[2], 1)
    check.rows_contiguous("key", key)
    if value is not None:
        check.dtype("value", value, key.dtype)
        check.shape("value", value, (*key.shape[:2], "d_v"))
        check.at_least("d_v", value.shape[2], 1)
        check.rows_contiguous("value", value)


def _check_cache(
    name: str, rows: torch.Tensor, cache_name: str, cache: torch.Tensor, scale: float
) -> None:
    check.dtype(cache_name, cache, rows.dtype, _FP8)
    check.shape(cache_name, cache, ("num_blocks", "block_size", *rows.shape[1:]))
    check.rows_contiguous(cache_name, cache)
    if not scale > 0:
        raise ValueError(f"{name[0]}_scale = {scale}: must be over 0")
    if scale != 1.0 and cache.dtype != _FP8:
        raise ValueError(
            f"{name[0]}_scale = {scale}: must be 1.0 unless the caches are float8_e4m3fn"
        )


def _check_angles(
    key: torch.Tensor,
    cos: torch.Tensor | None,
    sin: torch.Tensor | None,
    query: torch.Tensor | None,
) -> None:
    if (cos is None) != (sin is None):
        raise ValueError("cos, sin: one is None, must be both or none")
    if query is not None and cos is None:
        raise ValueError("query: is rotated, so cos and sin must be given")
    for name, angle in (("cos", cos), ("sin", sin)):
        if angle is not None and cos is not None:
            check.dtype(name, angle, torch.float32, torch.float64)
            check.shape(name, angle, (key.shape[0], cos.shape[-1]))
            check.rows_contiguous(name, angle)
            if not 2 <= 2 * angle.shape[1] <= key.shape[2]:
                raise ValueError(
                    f"{name}: {angle.shape[1]} angles, must be in 1..{key.shape[2] // 2}, half of "
                    "the values of a head at most"
                )
    if query is not None:
        check.dtype("query", query, key.dtype)
        check.shape("query", query, (key.shape[0], "heads", key.shape[2]))
        check.rows_contiguous("query", query)
