"""What the repaired interpreter must compute, against torch; no pytest, ``install`` runs it too."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

_SIZE = 32
_NUM_RESULTS = 16


@triton.jit
def _arithmetic(x_ptr, y_ptr, out_ptr, SIZE: tl.constexpr):
    """One program: row r of out [results, SIZE, SIZE] is the r-th operation on x and y."""
    index = tl.arange(0, SIZE)[:, None] * SIZE + tl.arange(0, SIZE)[None, :]
    x = tl.load(x_ptr + index)
    y = tl.load(y_ptr + index)
    area = SIZE * SIZE
    tl.store(out_ptr + 0 * area + index, x + y)
    tl.store(out_ptr + 1 * area + index, x - y)
    tl.store(out_ptr + 2 * area + index, x * y)
    tl.store(out_ptr + 3 * area + index, (x.to(tl.float32) / y.to(tl.float32)).to(tl.bfloat16))
    tl.store(out_ptr + 4 * area + index, -x)
    tl.store(out_ptr + 5 * area + index, tl.abs(x))
    tl.store(out_ptr + 6 * area + index, tl.where(x < y, x, y))
    tl.store(out_ptr + 7 * area + index, (index % 51 - 25).to(tl.bfloat16))
    tl.store(out_ptr + 8 * area + index, tl.dot(x, y.T).to(tl.bfloat16))
    tl.store(out_ptr + 9 * area + index, tl.dot(x.T, y, x.to(tl.float32)).to(tl.bfloat16))
    tl.store(out_ptr + 10 * area + index, x * 3.0 + 1)
    tl.store(out_ptr + 11 * area + index, tl.maximum(x, y).to(tl.bfloat16))
    tl.store(out_ptr + 12 * area + index, ((x >= y) & (x != 0.0)).to(tl.bfloat16))
    tl.store(out_ptr + 13 * area + index, x.to(tl.int32).to(tl.int8).to(tl.bfloat16))
    tl.store(out_ptr + 14 * area + index, x.to(tl.float16).to(tl.bfloat16))
    tl.store(
        out_ptr + 15 * area + index, tl.full((SIZE, SIZE), 1.0, tl.bfloat16) + tl.zeros_like(x)
    )


@triton.jit
def _casts(x_ptr, bf16_ptr, e4m3_ptr, e5m2_ptr, wide_ptr, SIZE: tl.constexpr):
    """One program: x float32 [SIZE] to bfloat16 and fp8; wide [4, SIZE] is what those are again."""
    index = tl.arange(0, SIZE)
    x = tl.load(x_ptr + index)
    tl.store(bf16_ptr + index, x.to(tl.bfloat16))
    tl.store(e4m3_ptr + index, x.to(tl.float8e4nv))
    tl.store(e5m2_ptr + index, x.to(tl.float8e5))
    tl.store(wide_ptr + 0 * SIZE + index, tl.load(bf16_ptr + index).to(tl.float32))
    tl.store(wide_ptr + 1 * SIZE + index, tl.load(e4m3_ptr + index).to(tl.float32))
    tl.store(wide_ptr + 2 * SIZE + index, tl.load(e5m2_ptr + index).to(tl.bfloat16).to(tl.float32))
    tl.store(wide_ptr + 3 * SIZE + index, x.to(tl.bfloat16).to(tl.float8e4nv).to(tl.float32))


def wrong_results() -> list[str]:
    """Names of the operations and casts whose results are not torch's; empty when all is well."""
    return _wrong_arithmetic() + _wrong_casts()


def _wrong_arithmetic() -> list[str]:
    generator = torch.Generator().manual_seed(5)
    x, y = (torch.randn(_SIZE, _SIZE, generator=generator).bfloat16() * 8 for _ in range(2))
    out = x.new_full((_NUM_RESULTS, _SIZE, _SIZE), torch.nan)
    _arithmetic[(1,)](x, y, out, SIZE=_SIZE)
    whole = torch.arange(_SIZE * _SIZE).view(_SIZE, _SIZE) % 51 - 25
    expected = {
        "add": x + y,
        "subtract": x - y,
        "multiply": x * y,
        "divide": (x.float() / y.float()).bfloat16(),
        "negate": -x,
        "absolute": x.abs(),
        "compare": torch.where(x < y, x, y),
        "int to bf16": whole.bfloat16(),
        "dot": (x.float() @ y.float().T).bfloat16(),
        "dot, transposed, added": (x.float().T @ y.float() + x.float()).bfloat16(),
        "with a number": x * 3.0 + 1,
        "maximum": torch.maximum(x, y),
        "condition to bf16": ((x >= y) & (x != 0)).bfloat16(),
        "bf16 to int": x.to(torch.int32).to(torch.int8).bfloat16(),
        "fp16": x.half().bfloat16(),
        "full": torch.ones_like(x),
    }
    # Sums may be taken in another order, which moves a rare value by one last place.
    return [
        name
        for got, (name, want) in zip(out, expected.items(), strict=True)
        if not torch.allclose(got.float(), want.float(), rtol=2**-7, atol=0)
        or (got != want).sum() > (got.numel() // 100 if "dot" in name else 0)
    ]


def _wrong_casts() -> list[str]:
    x = _cast_inputs()
    bf16, e4m3, e5m2 = (
        torch.full_like(x, torch.nan, dtype=dtype)
        for dtype in (torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2)
    )
    wide = x.new_full((4, x.numel()), torch.nan)
    _casts[(1,)](x, bf16, e4m3, e5m2, wide, SIZE=x.numel())
    expected_e4m3 = x.clamp(-448, 448).to(torch.float8_e4m3fn)
    expected_e5m2 = x.clamp(-57344, 57344).to(torch.float8_e5m2)
    pairs = {
        "float32 to bf16": (bf16, x.bfloat16()),
        "float32 to e4m3": (e4m3, expected_e4m3),
        "float32 to e5m2": (e5m2, expected_e5m2),
        "bf16 to float32": (wide[0], x.bfloat16().float()),
        "e4m3 to float32": (wide[1], expected_e4m3.float()),
        "e5m2 to bf16": (wide[2], expected_e5m2.float()),
        "bf16 to e4m3": (
            wide[3],
            x.bfloat16().float().clamp(-448, 448).to(torch.float8_e4m3fn).float(),
        ),
    }
    return [
        name
        for name, (got, want) in pairs.items()
        if not torch.equal(got.float().nan_to_num(nan=-7e9), want.float().nan_to_num(nan=-7e9))
    ]


def _cast_inputs() -> torch.Tensor:
    """1024 values: ties of bfloat16 and of fp8, tiny and huge ones, infinities, NaN."""
    generator = torch.Generator().manual_seed(7)
    bits = torch.arange(0x3F80, 0x3F80 + 128, dtype=torch.int32) << 16 | 0x8000
    ties = bits.view(torch.float32)
    fp8 = torch.arange(126, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    between = (fp8[1:] + fp8[:-1]) / 2
    spread = torch.randn(512, generator=generator)
    spread = spread * 2.0 ** torch.randint(-20, 20, (512,), generator=generator)
    special = torch.tensor([0.0, -0.0, torch.inf, -torch.inf, torch.nan, 1e-45, 3.4e38, -3.4e38])
    values = torch.cat([ties, -ties, between, -between, special, spread])[:1024]
    return torch.cat([values, values.new_zeros(1024 - values.numel())])
