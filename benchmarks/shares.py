"""Where the time of a step goes: matrix products, attention, copies, other operations, Python.

The steps run twice: once plain, which gives the time, and once under torch's profiler, which gives
the time inside each operation. The profiler slows Python down but hardly a matrix product, so the
shares are of the plain time, and what no operation accounts for is Python and the operating system.
"""

from __future__ import annotations

import contextlib
import dataclasses
import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from types import SimpleNamespace
from typing import Any
from unittest import mock

from moeserve_kernels import native

_COMPILED = {
    "linear": "compiled_product",
    "moe_ffn": "compiled_product",
    "attn_decode": "compiled_attention",
}
_PRODUCTS = ("mm", "addmm", "bmm", "baddbmm", "addmv", "mv", "_grouped_mm", "mkldnn", "mkl_linear",
             "compiled_product")  # fmt: skip
_COPIES = ("copy_", "cat", "index", "index_select", "index_put", "gather", "embedding")


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Shares:
    """Parts of the time of a step; they sum to 1.

    matrix_products: also what a compiled MoE layer does around its products, in the same call.
    copies: also the widening of bfloat16 weights to float32 where a CPU has no bfloat16 product.
    """

    step_s: float
    matrix_products: float
    attention: float
    copies: float
    other_operations: float
    outside_operations: float

    @property
    def overhead(self) -> float:
        """The share of everything but the matrix products and attention."""
        return 1.0 - self.matrix_products - self.attention


def overhead_share(step: Callable[[], object], *, num_steps: int) -> Shares:
    """Runs ``step`` ``num_steps`` times plain and as often under the profiler."""
    from torch.profiler import ProfilerActivity, profile

    step()
    seconds = []
    for _ in range(num_steps):
        start = time.perf_counter()
        step()
        seconds.append(time.perf_counter() - start)
    total_s = statistics.median(seconds) * num_steps  # a step that was held up does not count
    with compiled_calls_visible(), profile(activities=[ProfilerActivity.CPU]) as profiler:
        for _ in range(num_steps):
            step()
    inside = {event.key: event.self_cpu_time_total / 1e6 for event in profiler.key_averages()}
    return shares_of(inside, total_s, num_steps)


@contextlib.contextmanager
def compiled_calls_visible() -> Iterator[None]:
    """Inside, calls of the compiled operations show up in torch's profiler."""
    if not native.is_available():
        yield
        return
    from torch.profiler import record_function

    def visible(function: Callable[..., Any], kind: str) -> Callable[..., Any]:
        def call(*args: Any) -> Any:
            with record_function(kind):
                return function(*args)

        return call

    calls = {
        name: visible(getattr(native.compiled, name), kind) for name, kind in _COMPILED.items()
    }
    with mock.patch.object(native, "compiled", SimpleNamespace(**calls)):
        yield


def shares_of(inside: Mapping[str, float], total_s: float, num_steps: int) -> Shares:
    """The shares, from seconds inside each operation (own time, children not counted).

    Operations that add up to more than ``total_s`` (the profiler's own cost in many small ones) are
    scaled down to it, matrix products and attention last.
    """
    sums = dict.fromkeys(("product", "attention", "copy", "other"), 0.0)
    for name, seconds in inside.items():
        sums[_kind(name)] += seconds
    work = min(total_s, sums["product"] + sums["attention"])
    rest = min(total_s - work, sums["copy"] + sums["other"])
    work_scale = work / (sums["product"] + sums["attention"] or 1.0) / total_s
    rest_scale = rest / (sums["copy"] + sums["other"] or 1.0) / total_s
    return Shares(
        step_s=total_s / num_steps,
        matrix_products=sums["product"] * work_scale,
        attention=sums["attention"] * work_scale,
        copies=sums["copy"] * rest_scale,
        other_operations=sums["other"] * rest_scale,
        outside_operations=1.0 - (work + rest) / total_s,
    )


def _kind(operation: str) -> str:
    name = operation.rpartition("::")[2]
    if "attention" in name:
        return "attention"
    if name in _PRODUCTS or name.startswith("mkldnn_linear"):
        return "product"
    return "copy" if name in _COPIES else "other"
