"""The kernel that writes the cache in the interpreter, against the formula."""

from __future__ import annotations

import pytest
import torch

from moeserve_kernels import backend
from moeserve_kernels.device import kv_cache as device
from moeserve_kernels.device.targets import TARGETS
from moeserve_kernels.operations.kv_cache import kv_write

from .. import guards
from ..kv_cache_inputs import FP8, draw, expected


def check(**sizes: object) -> None:
    """Twice, from inputs within NaN; caches start as NaN and only slots may be written."""
    inputs, options = draw(**sizes)  # type: ignore[arg-type]
    rows = [None if one is None else guards.inside_nan(one) for one in inputs]
    options = {
        name: guards.inside_nan(one) if isinstance(one, torch.Tensor) else one
        for name, one in options.items()
    }
    want_query, want_caches = expected(inputs, options)
    key, value, key_cache, value_cache, slots = rows
    results = []
    for _ in range(2):
        caches = [
            None if one is None else guards.inside_nan(one) for one in (key_cache, value_cache)
        ]
        with backend.forced("triton-interpret"), guards.poisoned_empty():
            query = kv_write(key, value, caches[0], caches[1], slots, **options)
        results.append([one for one in (query, *caches) if one is not None])
        for cache in caches:
            if cache is not None:
                beside = cache.as_strided((64,), (1,), cache.storage_offset() - 64)
                assert beside.float().isnan().all()
    for first, second in zip(*results, strict=True):
        guards.assert_same_bits(first, second)
    wanted = [one for one in (want_query, *want_caches) if one is not None]
    for out, want in zip(results[0], wanted, strict=True):
        if out.dtype == FP8:
            # The rotation may round differently, and so land on the other side of a tie.
            same = out.view(torch.uint8) == want.view(torch.uint8)
            assert same.double().mean() > 0.99
            out, want = out.float(), want.float()
            guards.assert_close(out, want, 1e-2)
        else:
            guards.assert_close(out, want)


@pytest.mark.parametrize("cache_dtype", [torch.float32, FP8])
@pytest.mark.parametrize(("d", "d_v", "rotated"), [(64, 64, 64), (96, 96, 48), (192, 128, 20)])
def test_keys_values_and_query(cache_dtype: torch.dtype, d: int, d_v: int, rotated: int) -> None:
    check(d=d, d_v=d_v, rotated=rotated, cache_dtype=cache_dtype, heads=6, kv_heads=2)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_16_bits(dtype: torch.dtype) -> None:
    check(d=128, d_v=128, rotated=128, dtype=dtype, cache_dtype=dtype, heads=4, kv_heads=1)


def test_without_rotation_and_query() -> None:
    check(d=80, d_v=48, rotated=0, heads=0, kv_heads=3)
    check(d=80, d_v=48, rotated=80, heads=0, kv_heads=3)


def test_a_latent_cache_has_no_values() -> None:
    check(d=576, d_v=0, rotated=0, heads=0, kv_heads=1, block_size=64)


@pytest.mark.parametrize("tokens", [0, 1, 70])
def test_any_number_of_tokens(tokens: int) -> None:
    check(tokens=tokens, d=32, d_v=32, rotated=32, heads=2, kv_heads=2)


def test_strides_of_rows_and_caches() -> None:
    check(d=32, d_v=32, rotated=16, heads=2, kv_heads=2, strided=True)


def test_fp8_keeps_to_its_range_and_shows_nan() -> None:
    key = torch.tensor([1e6, -1e6, 3.0, torch.nan, torch.inf]).view(1, 1, 5)
    caches = [torch.zeros(1, 2, 1, 5, dtype=torch.float32).to(FP8) for _ in range(2)]
    with backend.forced("triton-interpret"):
        kv_write(key, key, *caches, torch.tensor([1]), k_scale=2.0, v_scale=0.5)
    torch.testing.assert_close(
        torch.stack([one[0, 1, 0].float() for one in caches]),
        torch.tensor([[448.0, -448.0, 1.5, torch.nan, 448.0], [448, -448, 6, torch.nan, 448]]),
        equal_nan=True,
    )


def test_a_chip_without_fp8_refuses_fp8_caches(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device, "target_of", lambda _: TARGETS["sm_80"])
    inputs, options = draw(d=16, d_v=16, rotated=0, heads=0, kv_heads=1, cache_dtype=FP8)
    with pytest.raises(ValueError, match="float8_e4m3fn, which sm_80 can not"):
        device.kv_write(*inputs, **options)
