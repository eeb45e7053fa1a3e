"""What must hold for a compiled kernel; each breach is one line."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from moeserve_kernels.aot.compiling import MATRIX_INSTRUCTIONS, TMA_LOAD, Compiled
from moeserve_kernels.device.targets import TARGETS

MAX_GROWTH = 1.10
# ptxas parks a value or two outside of loops even at 48 registers: that costs nothing.
MAX_STACK = 16
# Families whose tiles are made for Hopper's asynchronous matrix instruction.
WGMMA_FAMILIES = ("moe",)


def problems(compiled: Compiled, table: Mapping[str, Any] | None) -> list[str]:
    """What is wrong with ``compiled``, given the registers of an earlier time, if there are any.

    table: {target: {label: registers}}.
    """
    if compiled.error is not None:
        return [_line(compiled, f"does not compile: {compiled.error}")]
    found = [*_memory(compiled), *_instructions(compiled)]
    before = (table or {}).get(compiled.target, {}).get(compiled.label)
    if before is not None and compiled.registers > before * MAX_GROWTH:
        grown = compiled.registers / before - 1
        found.append(
            f"{compiled.registers} registers, {before} in the table: {grown:.0%} more "
            "(make it smaller, or renew the table with --write)"
        )
    return [_line(compiled, one) for one in found]


def _line(compiled: Compiled, problem: str) -> str:
    return f"{compiled.target} {compiled.label}: {problem}"


def _wants_wgmma(compiled: Compiled) -> bool:
    return compiled.target == "sm_90" and compiled.family in WGMMA_FAMILIES


def _memory(compiled: Compiled) -> list[str]:
    found = []
    target = TARGETS[compiled.target]
    if compiled.spilled > (MAX_STACK if target.kind == "cuda" else 0):
        unit = "bytes of stack" if target.kind == "cuda" else "registers"
        found.append(f"spills {compiled.spilled} {unit}")
    if compiled.shared_memory > target.shared_memory:
        found.append(
            f"asks {compiled.shared_memory} bytes of shared memory, the chip has "
            f"{target.shared_memory}"
        )
    return found


def _instructions(compiled: Compiled) -> list[str]:
    found = []
    target = TARGETS[compiled.target]
    have = compiled.instructions
    if compiled.narrow_dots > 0:
        if not any(have.get(name) for name in MATRIX_INSTRUCTIONS):
            found.append("multiplies matrices without a matrix instruction")
        elif _wants_wgmma(compiled) and not have.get("wgmma.mma_async"):
            found.append("does not use wgmma (fewer than 64 rows of the first operand?)")
    if compiled.wants_tma and target.tma and not have.get(TMA_LOAD):
        found.append("has a tensor descriptor but no TMA load")
    return found
