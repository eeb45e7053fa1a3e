"""Compiling one case and reading the figures out of what the compiler made."""

from __future__ import annotations

import re
import subprocess
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import triton
from triton.compiler import ASTSource
from triton.tools.tensor_descriptor import TensorDescriptor

from moeserve_kernels.aot.cases import Case
from moeserve_kernels.aot.signature import gpu_target, specialise
from moeserve_kernels.device.targets import TARGETS, Target

MATRIX_INSTRUCTIONS = ("wgmma.mma_async", "tcgen05.mma", "mma.sync", "v_mfma")
TMA_LOAD = "cp.async.bulk.tensor"


@dataclass(frozen=True)
class Compiled:
    """The figures of one compiled kernel.

    registers: of a thread (vector registers on AMD). spilled: bytes of stack, registers on AMD.
    shared_memory: bytes of a program. instructions: how often each matrix instruction and TMA load
    stands in the code. narrow_dots: products of 16 bits or less, which have such instructions.
    wants_tma: an argument is a tensor descriptor. error: why it did not compile, else None.
    """

    target: str
    family: str
    label: str
    num_warps: int = 0
    registers: int = 0
    spilled: int = 0
    shared_memory: int = 0
    instructions: dict[str, int] = field(default_factory=dict)
    narrow_dots: int = 0
    wants_tma: bool = False
    seconds: float = 0.0
    error: str | None = None


def compile_case(case: Case) -> Compiled:
    """Compiles ``case``; whatever the compiler raises comes back as ``error``."""
    start = time.perf_counter()
    try:
        figures = _figures(case)
    except Exception as error:  # the compiler raises anything from KeyError to RuntimeError
        figures = {"error": _message(error)}
    seconds = time.perf_counter() - start
    return Compiled(case.target, case.family, case.label, seconds=round(seconds, 2), **figures)


def _message(error: Exception) -> str:
    """The first line and the last, which says why; in between Triton shows the code."""
    lines = [line.strip() for line in f"{error}\n{error.__cause__ or ''}".splitlines()]
    lines = [line for line in lines if line]
    ends = lines[:1] + lines[1:][-1:]
    return f"{type(error).__name__}: {' ... '.join(ends)}"[:400]


def _figures(case: Case) -> dict[str, Any]:
    target = TARGETS[case.target]
    found = specialise(case.launch, target)
    source = ASTSource(
        fn=case.launch.kernel,
        signature=found.signature,
        constexprs=found.constants,
        attrs=found.attributes,
    )
    kernel = triton.compile(source, target=gpu_target(target), options=found.options)
    assembly = kernel.asm["ptx" if target.kind == "cuda" else "amdgcn"]
    return {
        "num_warps": int(kernel.metadata.num_warps),
        "shared_memory": int(kernel.metadata.shared),
        "instructions": {
            name: count
            for name in (*MATRIX_INSTRUCTIONS, TMA_LOAD)
            if (count := assembly.count(name)) > 0
        },
        "narrow_dots": _narrow_dots(kernel.asm["ttir"]),
        "wants_tma": any(isinstance(one, TensorDescriptor) for one in case.launch.args.values()),
        **_registers(kernel, target),
    }


def _registers(kernel: Any, target: Target) -> dict[str, int]:
    if target.kind == "cuda":
        usage = _resource_usage(kernel.asm["cubin"])
        registers, spilled = (re.search(rf"{name}:(\d+)", usage) for name in ("REG", "STACK"))
    else:
        notes = kernel.asm["amdgcn"]
        names = ("vgpr_count", "vgpr_spill_count")
        registers, spilled = (re.search(rf"\.{name}:\s+(\d+)", notes) for name in names)
    if registers is None or spilled is None:
        raise ValueError("the compiler's output does not name registers and spills")
    return {"registers": int(registers[1]), "spilled": int(spilled[1])}


def _resource_usage(cubin: bytes) -> str:
    """The line of NVIDIA's tool, "... REG:121 STACK:0 SHARED:0 ..."."""
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [str(tool), "--dump-resource-usage", file.name]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def _narrow_dots(ttir: str) -> int:
    """Products of 16 bits or less, as in ``tt.dot %a, %b, %c : tensor<64x64xbf16> *``."""
    dots = re.findall(r"tt\.dot .*: tensor<[\dx]*x(\w+)> \*", ttir)
    return sum(kind not in ("f32", "f64") for kind in dots)
