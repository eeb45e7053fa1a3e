"""``python -m moeserve_kernels.aot``: compile all kernels, print a table, exit 1 on a problem."""

from __future__ import annotations

import argparse
import json
import multiprocessing
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

import torch
from triton.runtime.cache import triton_key

from moeserve_kernels import backend
from moeserve_kernels.aot import registers
from moeserve_kernels.aot.cases import FAMILIES, Case, collect, heaviest
from moeserve_kernels.aot.checks import problems
from moeserve_kernels.aot.compiling import TMA_LOAD, Compiled, compile_case
from moeserve_kernels.aot.pool import Pool
from moeserve_kernels.device.targets import TARGETS

_HEADER = "target  warps regs spill  shared  matrix                 tma  case"


def main(argv: Sequence[str] | None = None) -> int:
    """Returns the exit code: 0, 1 when a check fails, 2 when it can not run here."""
    args = _parser().parse_args(argv)
    if backend.interprets():
        print(
            "TRITON_INTERPRET is set, so triton interprets kernels instead of compiling them: "
            "unset it (env -u TRITON_INTERPRET python -m moeserve_kernels.aot)",
            file=sys.stderr,
        )
        return 2
    start = time.perf_counter()
    table = registers.read()
    cases = collect(args.target, args.family, args.kernel)
    results = _compile(heaviest(cases, table) if args.quick else cases, args.jobs)
    if args.output is not None:
        with args.output.open("a") as file:
            file.writelines(json.dumps(asdict(one)) + "\n" for one in results)
    if args.write:
        entries = registers.write(results, are_all=not args.quick and args.kernel == "")
        print(f"wrote {entries} entries to {registers.path()}")
        table = None
    elif table is None:
        print(f"no table of registers for triton {registers.version()}: growth is not checked")
    found = [line for one in results for line in problems(one, table)]
    for line in found:
        print(f"FAILED {line}")
    print(
        f"{len(results)} kernels, {len(found)} problems, {time.perf_counter() - start:.0f} s, "
        f"triton {registers.version()}"
    )
    return 1 if found else 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m moeserve_kernels.aot", description=__doc__)
    parser.add_argument(
        "--target", nargs="+", choices=TARGETS, default=list(TARGETS), help="chips; default all"
    )
    parser.add_argument(
        "--family", nargs="+", choices=FAMILIES, default=FAMILIES, help="families; default all"
    )
    parser.add_argument("--kernel", default="", help="only cases whose name contains this")
    parser.add_argument(
        "--jobs", type=int, default=multiprocessing.cpu_count(), help="processes; default all CPUs"
    )
    parser.add_argument(
        "--quick", action="store_true", help="of each kernel only the case with most registers"
    )
    parser.add_argument("--write", action="store_true", help="renew the table of registers")
    parser.add_argument("--output", type=Path, help="also append the figures here, as JSON lines")
    return parser


def _compile(cases: Sequence[Case], num_jobs: int) -> list[Compiled]:
    torch.set_num_threads(1)
    triton_key()  # hashes the compiler once, before workers are forked
    pool = Pool(
        compile_case,
        lambda case, why: Compiled(case.target, case.family, case.label, error=why),
        max(num_jobs, 1),
    )
    print(_HEADER)
    return pool.run(cases, lambda one: print(_row(one), flush=True))


def _row(one: Compiled) -> str:
    if one.error is not None:
        return f"{one.target:7} {'error':>47}  {one.label}"
    matrix = " ".join(
        f"{name.split('.')[0]} {count}"
        for name, count in one.instructions.items()
        if name != TMA_LOAD
    )
    shared = f"{one.shared_memory / 1024:.1f}K"
    return (
        f"{one.target:7} {one.num_warps:5} {one.registers:4} {one.spilled:5} {shared:>7}  "
        f"{matrix:22} {one.instructions.get(TMA_LOAD, 0):3}  {one.label}"
    )


if __name__ == "__main__":
    sys.exit(main())
