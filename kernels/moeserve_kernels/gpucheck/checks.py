"""The cases: a new operation gets its lines here, and is then checked on every device."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch

from moeserve_kernels.gpucheck.correctness import Check, Draw, Package
from moeserve_kernels.operations.quant import quantize_experts
from moeserve_kernels.weights import ExpertWeights

_BLOCK = 16  # tokens of a KV cache block
_FP8 = torch.float8_e4m3fn
Inputs = dict[str, Any]


def checks() -> list[Check]:
    """All cases, the most telling ones of each family first."""
    return [*_moe(), *_attention(), *_kv_write(), *_rows(), *_routing()]


# ---- experts


def _ffn_inputs(
    draw: Draw,
    *,
    tokens: int,
    format: str = "plain",
    experts: int = 8,
    hidden: int = 256,
    inner: int = 128,
    top_k: int = 2,
    skewed: bool = False,
    remote: bool = False,
    extra: bool = False,
    **keywords: Any,
) -> Inputs:
    ids = draw.choices(tokens, top_k, experts)
    if skewed:  # all to one expert, the others stay empty
        ids = torch.zeros_like(ids) if top_k == 1 else ids % 2
    expert_map = None
    slots = experts
    if remote:  # half of the experts live on another rank
        slots = experts // 2
        order = draw.permutation(experts)
        expert_map = torch.where(order < slots, order, -1)
    w13 = _experts(draw, slots, 2 * inner, hidden, format, extra)
    w2 = _experts(draw, slots, hidden, inner, format, extra)
    inputs: Inputs = {
        "x": draw.normal(tokens, hidden),
        "w13": w13,
        "w2": w2,
        "weights": draw.positive(tokens, top_k),
        "ids": ids,
        "keywords": {"expert_map": expert_map, **keywords},
    }
    if extra:
        inputs["keywords"]["shared"] = draw.normal(tokens, hidden)
        inputs["keywords"]["residual"] = draw.normal(tokens, hidden)
    return inputs


def _experts(
    draw: Draw, slots: int, outputs: int, inputs: int, format: str, with_bias: bool
) -> ExpertWeights:
    bias = draw.normal(slots, outputs) if with_bias else None
    weights = draw.normal(slots, outputs, inputs, scale=inputs**-0.5)
    return quantize_experts(weights, format, bias)


def _ffn(package: Package, inputs: Inputs) -> tuple[torch.Tensor, ...]:
    args = (inputs[name] for name in ("x", "w13", "w2", "weights", "ids"))
    return (package.moe_ffn(*args, **inputs["keywords"]),)


def _moe() -> Iterator[Check]:
    def case(name: str, dry: bool = False, **options: Any) -> Check:
        fields = {key: options.pop(key) for key in ("judge", "dtype", "fp8") if key in options}
        return Check(f"moe_ffn {name}", partial(_ffn_inputs, **options), _ffn, dry=dry, **fields)

    tiny: dict[str, Any] = {"tokens": 5, "experts": 4, "hidden": 64, "inner": 32}
    yield case("5 tokens, small", dry=True, **tiny)
    yield case("12 tokens", tokens=12)
    yield case("1 token, 128 experts", tokens=1, experts=128, top_k=8, hidden=128, inner=64)
    yield case("0 tokens", tokens=0)
    yield case("700 tokens", tokens=700, judge="host", hidden=512, inner=384)
    yield case("3000 tokens, 64 experts", tokens=3000, experts=64, top_k=8, judge="host")
    yield case("700 tokens to one expert", tokens=700, top_k=1, skewed=True, judge="host")
    yield case("remote experts", tokens=40, remote=True)
    yield case("remote experts, 700 tokens", tokens=700, remote=True, judge="host")
    yield case("bias, shared, residual", tokens=20, extra=True)
    yield case("sizes 264 x 136", tokens=20, hidden=264, inner=136)
    yield case("gelu", tokens=20, activation="gelu")
    yield case("swiglu_clamped", tokens=20, activation="swiglu_clamped", extra=True)
    yield case("float32", tokens=20, dtype=torch.float32)
    yield case("float16", tokens=20, dtype=torch.float16)
    yield case("int8, 5 tokens, small", dry=True, format="int8", **tiny)
    for format in ("int8", "fp8_channel", "fp8_block", "int4"):
        fp8 = format.startswith("fp8")
        yield case(f"{format} 12 tokens", tokens=12, format=format, fp8=fp8)
        yield case(
            f"{format} 700 tokens", tokens=700, format=format, fp8=fp8, judge="host", hidden=512
        )


# ---- attention


def _lengths(batch: int, most: int) -> list[int]:
    """1, a full block, one more, the longest, and what lies between."""
    edges = [most, 1, _BLOCK, _BLOCK + 1, most // 2, most - 1, 3]
    return [edges[index % len(edges)] for index in range(batch)]


def _cache(
    draw: Draw, lengths: list[int], kv_heads: int, widths: tuple[int, ...], fp8: bool
) -> tuple[list[torch.Tensor], torch.Tensor, torch.Tensor]:
    """Caches of the widths, the block table and the lengths; blocks lie in random order."""
    per_request = max(-(-max(lengths) // _BLOCK), 1)
    num_blocks = len(lengths) * per_request + 3
    heads = (kv_heads,) if kv_heads > 0 else ()
    caches = [
        draw.normal(num_blocks, _BLOCK, *heads, width, dtype=_FP8 if fp8 else None)
        for width in widths
    ]
    table = draw.permutation(num_blocks)[: len(lengths) * per_request]
    seq_lens = torch.tensor(lengths, dtype=torch.int32, device=draw.device)
    return caches, table.view(len(lengths), per_request).contiguous(), seq_lens


def _decode_inputs(
    draw: Draw,
    *,
    lengths: list[int],
    heads: int = 8,
    kv_heads: int = 2,
    d: int = 128,
    fp8: bool = False,
    sinks: bool = False,
    **keywords: Any,
) -> Inputs:
    caches, table, seq_lens = _cache(draw, lengths, kv_heads, (d, d), fp8)
    query = draw.normal(len(lengths), heads, d)
    if sinks:
        keywords["sinks"] = draw.normal(heads, dtype=torch.float32)
    keywords["max_seq_len"] = max(*lengths, 1)
    return {"args": (query, *caches, table, seq_lens, d**-0.5), "keywords": keywords}


def _prefill_inputs(
    draw: Draw,
    *,
    queries: list[int],
    prefixes: list[int],
    heads: int = 8,
    kv_heads: int = 2,
    d: int = 128,
    fp8: bool = False,
    sinks: bool = False,
    **keywords: Any,
) -> Inputs:
    lengths = [sum(pair) for pair in zip(queries, prefixes, strict=True)]
    caches, table, seq_lens = _cache(draw, lengths, kv_heads, (d, d), fp8)
    starts = torch.tensor([0, *queries]).cumsum(0).to(torch.int32).to(draw.device)
    query = draw.normal(sum(queries), heads, d)
    if sinks:
        keywords["sinks"] = draw.normal(heads, dtype=torch.float32)
    keywords["max_query_len"] = max(queries)
    return {"args": (query, *caches, table, starts, seq_lens, d**-0.5), "keywords": keywords}


def _mla_inputs(draw: Draw, *, lengths: list[int], heads: int) -> Inputs:
    caches, table, seq_lens = _cache(draw, lengths, 0, (576,), fp8=False)
    query = draw.normal(len(lengths), heads, 576)
    keywords = {"max_seq_len": max(lengths)}
    return {"args": (query, *caches, table, seq_lens, 192**-0.5), "keywords": keywords}


def _one_result(operation: str, package: Package, inputs: Inputs) -> tuple[torch.Tensor, ...]:
    return (getattr(package, operation)(*inputs["args"], **inputs["keywords"]),)


def _attention() -> Iterator[Check]:
    decode = partial(_one_result, "attn_decode")
    prefill = partial(_one_result, "attn_prefill")

    def decoding(name: str, dry: bool = False, fp8: bool = False, **options: Any) -> Check:
        options = {"lengths": _lengths(7, 300), **options, "fp8": fp8}
        make = partial(_decode_inputs, **options)
        return Check(f"attn_decode {name}", make, decode, dry=dry, fp8=fp8)

    def filling(name: str, dry: bool = False, fp8: bool = False, **options: Any) -> Check:
        lengths = {"queries": [1, 40, 17, 130], "prefixes": [100, 0, 16, 33]}
        make = partial(_prefill_inputs, **lengths | options, fp8=fp8)
        return Check(f"attn_prefill {name}", make, prefill, dry=dry, fp8=fp8)

    yield decoding("GQA 4", lengths=[40, 1, 16], dry=True)
    yield decoding("lengths to 300")
    yield decoding("one request of 5000", lengths=[5000])
    yield decoding("a length of 0", lengths=[0, 5, 0])
    yield decoding("sinks, window, soft cap", sinks=True, sliding_window=50, soft_cap=20.0)
    yield decoding("fp8 cache", fp8=True, k_scale=0.5, v_scale=2.0)
    yield filling("chunks", queries=[1, 20], prefixes=[30, 0], dry=True)
    yield filling("chunks to 130")
    yield filling("sinks, window, soft cap", sinks=True, sliding_window=30, soft_cap=20.0)
    yield filling("fp8 cache", fp8=True, k_scale=0.5, v_scale=2.0)
    for heads, kv_heads, d in ((8, 8, 64), (16, 2, 96), (8, 1, 192), (8, 4, 256)):
        shape: dict[str, Any] = {"heads": heads, "kv_heads": kv_heads, "d": d}
        yield decoding(f"{heads}/{kv_heads} heads of {d}", **shape)
        yield filling(f"{heads}/{kv_heads} heads of {d}", **shape)
    mla = partial(_one_result, "mla_decode")
    yield Check("mla_decode 16", partial(_mla_inputs, lengths=[20, 1], heads=16), mla, dry=True)
    for heads in (16, 128):
        lengths = _lengths(6, 200)
        yield Check(
            f"mla_decode {heads} heads", partial(_mla_inputs, lengths=lengths, heads=heads), mla
        )


# ---- writing the cache


def _write_inputs(draw: Draw, *, d: int, rotated: int, fp8: bool) -> Inputs:
    tokens, kv_heads, blocks = 21, 2, 4
    slots = draw.permutation(blocks * _BLOCK)[:tokens].long()
    slots[3] = -1
    angle = draw.normal(tokens, max(rotated // 2, 1), dtype=torch.float32)
    caches = (draw.normal(blocks, _BLOCK, kv_heads, d, dtype=_FP8 if fp8 else None),) * 2
    keywords: Inputs = {"k_scale": 0.5, "v_scale": 2.0} if fp8 else {}
    if rotated:
        keywords |= {"cos": angle.cos(), "sin": angle.sin(), "query": draw.normal(tokens, 8, d)}
    rows = (draw.normal(tokens, kv_heads, d), draw.normal(tokens, kv_heads, d))
    return {"rows": rows, "caches": caches, "slots": slots, "keywords": keywords}


def _write(package: Package, inputs: Inputs) -> tuple[torch.Tensor, ...]:
    caches = tuple(one.clone() for one in inputs["caches"])
    query = package.kv_write(*inputs["rows"], *caches, inputs["slots"], **inputs["keywords"])
    written = tuple(one.float() if one.dtype == _FP8 else one for one in caches)
    return written if query is None else (*written, query)


def _kv_write() -> Iterator[Check]:
    for d, rotated, fp8 in ((64, 64, False), (128, 64, False), (128, 0, False), (128, 128, True)):
        name = f"kv_write heads of {d}, {rotated} rotated{', fp8' if fp8 else ''}"
        make = partial(_write_inputs, d=d, rotated=rotated, fp8=fp8)
        # A value next to the middle of two fp8 values may go to the other one: 6 % of that value.
        tolerance = 1e-2 if fp8 else None
        yield Check(name, make, _write, fp8=fp8, tolerance=tolerance, dry=d == 64)


# ---- rows


def _norm_inputs(draw: Draw, *, rows: int, hidden: int) -> Inputs:
    args = (draw.normal(rows, hidden), draw.normal(rows, hidden), draw.normal(hidden), 1e-6)
    return {"args": args}


def _norm(package: Package, inputs: Inputs) -> tuple[torch.Tensor, ...]:
    x, residual, weight, eps = inputs["args"]
    normed, total = package.add_rms_norm(x, residual, weight, eps)
    return package.rms_norm(x, weight, eps), normed, total


def _quant(
    dtype: torch.dtype, group_size: int | None, package: Package, inputs: Inputs
) -> tuple[torch.Tensor, ...]:
    q, scales = package.quant_rows(inputs["x"], dtype=dtype, group_size=group_size)
    per_value = scales[:, None]
    if group_size is not None:
        per_value = scales.repeat_interleave(group_size, 1)[:, : q.shape[1]]
    return scales.float(), q.float() * per_value.float()


def _exchange(
    quantize: torch.dtype | None, package: Package, inputs: Inputs
) -> tuple[torch.Tensor, ...]:
    packed = package.ep_pack(inputs["x"], inputs["ranks"], 4, quantize=quantize)
    rows = packed.rows
    if quantize is not None:
        rows = rows.float() * packed.scales[:, None].float()
        in_use = packed.row_tokens >= 0
        rows = torch.where(in_use[:, None], rows, 0.0).to(inputs["x"].dtype)
    out = package.ep_unpack(rows, packed)
    return packed.counts, packed.row_of, packed.row_tokens, out


def _rows() -> Iterator[Check]:
    for rows, hidden in ((5, 64), (300, 2048), (3, 7168), (0, 64)):
        make = partial(_norm_inputs, rows=rows, hidden=hidden)
        yield Check(f"rms_norm {rows} x {hidden}", make, _norm, dry=hidden == 64 and rows > 0)
    # A quotient next to a tie, which bfloat16 inputs often give, may go to either side.
    for dtype, group_size, tolerance in ((_FP8, None, 5e-3), (torch.int8, 128, 2e-3)):
        yield Check(
            f"quant_rows {dtype} group {group_size}",
            lambda draw: {"x": draw.normal(37, 512)},
            partial(_quant, dtype, group_size),
            tolerance=tolerance,
            fp8=dtype == _FP8,
            dry=dtype == torch.int8,
        )
    for quantize in (None, torch.int8, _FP8):
        yield Check(
            f"ep_pack, ep_unpack {quantize}",
            lambda draw: {"x": draw.normal(50, 256), "ranks": draw.integers(-1, 4, 50, 3)},
            partial(_exchange, quantize),
            fp8=quantize == _FP8,
            dry=quantize is None,
        )


# ---- routing


def _route(package: Package, inputs: Inputs) -> tuple[torch.Tensor, ...]:
    result: tuple[torch.Tensor, ...] = package.route(inputs["logits"], **inputs["keywords"])
    return result


def _route_inputs(draw: Draw, *, tokens: int, experts: int, **keywords: Any) -> Inputs:
    # Logits a step apart: no rounding makes two of them equal.
    order = torch.stack([draw.permutation(experts) for _ in range(tokens)])
    if keywords.get("scoring") == "sigmoid":
        keywords["correction_bias"] = draw.positive(experts) * 0.001
    return {"logits": order.float() * 0.05 - 3, "keywords": keywords}


def _align(package: Package, inputs: Inputs) -> tuple[torch.Tensor, ...]:
    found = package.align(
        inputs["ids"], inputs["slots"], inputs["block_m"], expert_map=inputs["map"]
    )
    if found.is_identity:
        return (found.block_slots.clamp(min=-1),)
    in_use = int(found.num_padded_rows)
    rows, blocks = found.sorted_pairs[:in_use], found.block_slots[: in_use // found.block_m]
    return found.counts, found.num_padded_rows, rows, blocks


def _align_inputs(
    draw: Draw, *, tokens: int, experts: int, top_k: int, block_m: int, mapped: bool
) -> Inputs:
    slots = experts // 2 if mapped else experts
    order = draw.permutation(experts)
    expert_map = torch.where(order < slots, order, -1) if mapped else None
    ids = draw.choices(tokens, top_k, experts)
    return {"ids": ids, "slots": slots, "block_m": block_m, "map": expert_map}


def _routing() -> Iterator[Check]:
    for name, options in {
        "softmax 128": {"tokens": 17, "experts": 128, "top_k": 8},
        "softmax 60": {"tokens": 5, "experts": 60, "top_k": 4, "renormalize": False},
        "sigmoid 256, 4 of 8 groups": {
            "tokens": 9,
            "experts": 256,
            "top_k": 8,
            "scoring": "sigmoid",
            "num_expert_groups": 8,
            "topk_groups": 4,
            "scaling_factor": 2.5,
        },
    }.items():
        make = partial(_route_inputs, **options)  # type: ignore[arg-type]
        yield Check(f"route {name}", make, _route, dtype=torch.float32, dry="60" in name)
    for tokens, experts, top_k, block_m, mapped in (
        (1, 128, 8, 16, False),
        (1, 256, 8, 16, True),
        (40, 8, 2, 16, False),
        (700, 128, 8, 64, True),
        (5000, 64, 8, 128, False),
    ):
        yield Check(
            f"align {tokens} x {top_k} of {experts}{', mapped' if mapped else ''}",
            partial(
                _align_inputs,
                tokens=tokens,
                experts=experts,
                top_k=top_k,
                block_m=block_m,
                mapped=mapped,
            ),
            _align,
            judge="host" if tokens > 100 else "formulas",
            dry=tokens == 40,
        )
