"""The stages of the check and their items, the most important first."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import torch

from moeserve_kernels.device.targets import target_of
from moeserve_kernels.gpucheck import attention_bench, checks, correctness, limits, moe_bench, tune
from moeserve_kernels.gpucheck.correctness import Check
from moeserve_kernels.gpucheck.plan import Context, Item

STAGES = ("limits", "correctness", "bench")


def items(stage: str, *, dry: bool) -> list[Item]:
    """The items of one of ``STAGES``."""
    if stage == "limits":
        return [Item("limits", "bandwidth and rate", 15.0, _limits)]
    if stage == "correctness":
        found = [one for one in checks.checks() if one.dry or not dry]
        return [Item("correctness", one.name, 6.0, partial(_check, one)) for one in found]
    return [
        *moe_bench.items(dry=dry),
        *attention_bench.items(dry=dry),
        *moe_bench.format_items(dry=dry),
        *tune.items(dry=dry),
        *attention_bench.other_items(dry=dry),
        *moe_bench.step_items(dry=dry),
    ]


def _limits(context: Context) -> None:
    found = limits.measure(context.device, dry=context.dry)
    context.report.add(
        "limits",
        "copy bandwidth, bf16 rate",
        bytes_per_s=found.bytes_per_s,
        flops_per_s=found.flops_per_s,
    )


def _check(check: Check, context: Context) -> None:
    if check.fp8 and not target_of(context.device).fp8:
        context.report.skipped([check.name], "the chip has no fp8")
        return
    # The interpreter has no bfloat16 of its own.
    this = replace(check, dtype=torch.float32) if context.dry else check
    error = correctness.run(this, context.seed, context.device)
    context.report.add("correctness", check.name, relative_error=error, passed=True)
