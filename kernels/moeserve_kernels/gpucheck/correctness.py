"""Is an operation right on this device: judged by the formula, in float64 on the CPU.

Inputs lie in buffers full of NaN, outputs start as NaN between canaries, each case runs twice and
must give the same bits.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass, fields, is_dataclass, replace
from typing import Any

import torch

from moeserve_kernels.gpucheck import guards
from moeserve_kernels.weights import ExpertWeights

# Operation -> its module, in each of the packages ``operations``, ``formulas``, ``host``.
FAMILY_OF = {
    "route": "routing",
    "align": "align",
    "ep_pack": "exchange",
    "ep_unpack": "exchange",
    "quant_rows": "quant",
    "moe_up": "moe",
    "moe_down": "moe",
    "combine": "moe",
    "moe_ffn": "moe",
    "attn_decode": "attention",
    "attn_prefill": "attention",
    "mla_decode": "mla",
    "kv_write": "kv_cache",
    "rms_norm": "norm",
    "add_rms_norm": "norm",
}
# Of float32 results, judged in float64.
_TOLERANCES = guards.TOLERANCES | {torch.float8_e4m3fn: 6e-2, torch.float8_e5m2: 1.2e-1}


class Package:
    """The operations of one package by name: ``Package("formulas").route(...)``."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __getattr__(self, operation: str) -> Callable[..., Any]:
        if operation not in FAMILY_OF:
            raise AttributeError(operation)
        if operation == "moe_ffn" and self.name != "operations":
            return self._moe_ffn
        module = importlib.import_module(f"moeserve_kernels.{self.name}.{FAMILY_OF[operation]}")
        found: Callable[..., Any] = getattr(module, operation)
        return found

    def _moe_ffn(
        self,
        x: torch.Tensor,
        w13: ExpertWeights,
        w2: ExpertWeights,
        topk_weights: torch.Tensor,
        topk_ids: torch.Tensor,
        *,
        expert_map: torch.Tensor | None = None,
        shared: torch.Tensor | None = None,
        residual: torch.Tensor | None = None,
        **activation: Any,
    ) -> torch.Tensor:
        """The four steps of ``operations.moe.moe_ffn``, without its checks of dtypes."""
        alignment = self.align(topk_ids, w13.num_slots, 4, expert_map=expert_map)
        h = self.moe_up(x, w13, alignment, **activation)
        pairs = self.moe_down(h, w2, alignment)
        out: torch.Tensor = self.combine(
            pairs,
            topk_weights=topk_weights,
            topk_ids=topk_ids,
            expert_map=expert_map,
            shared=shared,
            residual=residual,
        )
        return out


@dataclass(frozen=True)
class Check:
    """One case of an operation.

    make: draws the inputs, by name. call: runs the operation of a package on them and gives the
    tensors, or parts of tensors, that it defines. judge: the package that knows better;
    "formulas" are loops, so for larger cases "host". dtype: of activations. tolerance: relative
    error, None: what the dtype of each result allows. dry: also on a CPU in the interpreter.
    fp8: only where the compiler takes e4m3.
    """

    name: str
    make: Callable[[Draw], dict[str, Any]]
    call: Callable[[Package, dict[str, Any]], tuple[torch.Tensor, ...]]
    judge: str = "formulas"
    dtype: torch.dtype = torch.bfloat16
    tolerance: float | None = None
    dry: bool = False
    fp8: bool = False


class Draw:
    """Random inputs of a case, on a device."""

    def __init__(self, seed: int, device: torch.device, dtype: torch.dtype) -> None:
        self._generator = torch.Generator().manual_seed(seed)
        self.device = device
        self.dtype = dtype

    def normal(
        self, *shape: int, scale: float = 1.0, dtype: torch.dtype | None = None
    ) -> torch.Tensor:
        """Normal values in the dtype of the case, or another."""
        values = torch.randn(shape, generator=self._generator) * scale
        return values.to(self.dtype if dtype is None else dtype).to(self.device)

    def positive(self, *shape: int) -> torch.Tensor:
        """float32 in 0..1."""
        return torch.rand(shape, generator=self._generator).to(self.device)

    def integers(
        self, low: int, high: int, *shape: int, dtype: torch.dtype = torch.int32
    ) -> torch.Tensor:
        """Whole numbers ``low .. high - 1``."""
        values = torch.randint(low, high, shape, generator=self._generator, dtype=dtype)
        return values.to(self.device)

    def choices(self, rows: int, count: int, among: int) -> torch.Tensor:
        """int32 [rows, count]: in each row different numbers below ``among``."""
        ranks = torch.rand(rows, among, generator=self._generator).argsort(1)
        return ranks[:, :count].to(torch.int32).to(self.device)

    def permutation(self, size: int) -> torch.Tensor:
        """int32 [size]."""
        order = torch.randperm(size, generator=self._generator)
        return order.to(torch.int32).to(self.device)


def run(check: Check, seed: int, device: torch.device) -> float:
    """The largest relative error of the results.

    Raises:
        AssertionError: a result is wrong, differs between two runs, or something beside it was
            written.
    """
    inputs = check.make(Draw(seed, device, check.dtype))
    guarded = moved(inputs, guards.inside_nan)
    results = []
    for _ in range(2):
        with guards.poisoned_empty():
            results.append(check.call(Package("operations"), guarded))
            if device.type == "cuda":
                torch.cuda.synchronize()
    for first, second in zip(*results, strict=True):
        guards.assert_same_bits(first, second)
    for name, one in flat(inputs).items():
        assert guards.same_bits(one, flat(guarded)[name]), f"{name} was changed"
    exact = torch.float64 if check.judge == "formulas" else torch.float32
    expected = check.call(Package(check.judge), moved(inputs, lambda one: _exact(one, exact)))
    errors = [0.0]
    for got, want in zip(results[0], expected, strict=True):
        errors.append(guards.relative_error(got, want))
        limit = check.tolerance or _TOLERANCES.get(got.dtype, 0.0)  # whole numbers are exact
        assert errors[-1] <= limit, f"relative error {errors[-1]:.3g}, at most {limit:.3g}"
    return max(errors)


def moved(inputs: Any, change: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """``inputs`` with each tensor changed, those in dicts, tuples and dataclasses too."""
    if isinstance(inputs, torch.Tensor):
        return change(inputs)
    if isinstance(inputs, dict):
        return {name: moved(one, change) for name, one in inputs.items()}
    if isinstance(inputs, tuple):
        return tuple(moved(one, change) for one in inputs)
    if is_dataclass(inputs) and not isinstance(inputs, type):
        parts = {one.name: getattr(inputs, one.name) for one in fields(inputs)}
        return replace(inputs, **moved(parts, change))
    return inputs


def flat(inputs: Any, prefix: str = "") -> dict[str, torch.Tensor]:
    """The tensors in ``inputs`` by path."""
    found: dict[str, torch.Tensor] = {}

    def note(one: torch.Tensor) -> torch.Tensor:
        found[f"{prefix}tensor {len(found)}"] = one
        return one

    moved(inputs, note)
    return found


def _exact(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """On the CPU, floats of 16 bits or more in ``dtype``; stored fp8 values stay what they are."""
    is_wide = tensor.dtype.is_floating_point and tensor.element_size() > 1
    return tensor.cpu().to(dtype) if is_wide else tensor.cpu()
