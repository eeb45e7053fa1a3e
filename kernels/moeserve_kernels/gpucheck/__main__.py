"""``python -m moeserve_kernels.gpucheck``: check and time all kernels on this machine's GPU."""

from __future__ import annotations

import argparse
import multiprocessing
import secrets
import sys
import time
from collections.abc import Sequence
from dataclasses import fields, replace
from pathlib import Path

import torch
from triton.runtime.cache import triton_key

from moeserve_kernels import backend
from moeserve_kernels.aot.cases import Case, collect
from moeserve_kernels.aot.compiling import Compiled, compile_case
from moeserve_kernels.aot.pool import Pool
from moeserve_kernels.device.targets import TARGETS
from moeserve_kernels.gpucheck import report, tune
from moeserve_kernels.gpucheck.stages import STAGES, items
from moeserve_kernels.gpucheck.supervise import run_stage
from moeserve_kernels.gpucheck.worker import Job, work

_CORRECTNESS_PARTS = 8  # processes that share the GPU: nearly all of their time is compiling
_CORRECTNESS_SHARE = 0.4  # of the time


def main(argv: Sequence[str] | None = None) -> int:
    """Returns the exit code: 0, 1 when something is wrong, 2 when it can not run here."""
    args = _parser().parse_args(argv)
    if args.stage is not None:
        return work(_job(args))
    if not args.dry and backend.interprets():
        print("TRITON_INTERPRET is set: unset it, or give --dry", file=sys.stderr)
        return 2
    if not args.dry and not torch.cuda.is_available():
        print("torch finds no GPU here: give --dry to go through it on a CPU", file=sys.stderr)
        return 2
    args.output.parent.mkdir(parents=True, exist_ok=True)
    before = len(report.read(args.output))
    args.commit = args.commit or report.commit()
    args.deadline = time.time() + 60 * args.minutes
    common = {"commit": args.commit} | ({"dry": True} if args.dry else {})
    lines = report.Report(args.output, common)
    if args.dry:
        print("dry run on a CPU: the times mean nothing")
    _run(args, lines)
    found = report.read(args.output)[before:]
    errors = [line for line in found if line["kind"] == "error"]
    passed = sum(line["kind"] == "correctness" for line in found)
    skipped = sum(line["kind"] == "skipped" for line in found)
    print(f"{passed} checks passed, {len(errors)} errors, {skipped} skipped; {args.output}")
    for line in errors:
        print(f"ERROR {line['what']}: {line['error']}")
    return 1 if errors or not found else 0


def _run(args: argparse.Namespace, lines: report.Report) -> None:
    """The stages in turn; what goes wrong in one does not stop the next."""
    start = time.time()
    for stage in STAGES:
        job, parts = replace(_job(args), stage=stage), 1
        if stage == "correctness":
            share = start + _CORRECTNESS_SHARE * (args.deadline - start)
            job, parts = replace(job, deadline=share), 2 if args.dry else _CORRECTNESS_PARTS
        run_stage(job, items(stage, dry=args.dry), lines, parts=parts)
        if stage == "limits" and not args.dry:
            _compile_beforehand(args.output, lines)


def _compile_beforehand(output: Path, lines: report.Report) -> None:
    """Fills Triton's cache with what will be timed, on all CPUs, before this process has a GPU."""
    names = [line["target"] for line in report.read(output) if line["kind"] == "limits"]
    if not names or names[-1] not in TARGETS:
        return
    start = time.time()
    try:
        cases = collect([names[-1]])
        candidates = tune.launches(TARGETS[names[-1]])
        cases += [Case(names[-1], "tune", label, launch) for label, launch in candidates]
    except Exception as error:  # without it, kernels compile when they are first run
        lines.failed("compile", "launches", error)
        return
    triton_key()  # hashes the compiler once, before workers are forked
    pool = Pool(compile_case, _not_compiled, multiprocessing.cpu_count(), timeout_s=60.0)
    results = pool.run(cases, lambda _: None)
    for one in results:
        # A tile that only was to be tried may well ask too much.
        if one.error is not None and one.family != "tune":
            lines.add("error", f"compile: {one.label}", error=one.error)
    failed = sum(one.error is not None for one in results)
    lines.add("compile", f"{len(results)} kernels", failed=failed, seconds=time.time() - start)


def _not_compiled(case: Case, why: str) -> Compiled:
    return Compiled(case.target, case.family, case.label, error=why)


def _job(args: argparse.Namespace) -> Job:
    return Job(**{one.name: getattr(args, one.name) for one in fields(Job)})


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m moeserve_kernels.gpucheck")
    parser.add_argument(
        "--output", type=Path, required=True, help="JSON lines are appended to this file"
    )
    parser.add_argument("--minutes", type=float, default=8.0, help="stop after them; default 8")
    parser.add_argument("--dry", action="store_true", help="tiny sizes on a CPU")
    parser.add_argument("--commit", default="", help="for the lines, where there is no git")
    parser.add_argument("--seed", type=int, default=secrets.randbelow(2**31), help="of the inputs")
    # What this command gives to its own workers.
    for name, kind, default in (
        ("stage", str, None),
        ("part", int, 0),
        ("parts", int, 1),
        ("start", int, 0),
        ("deadline", float, 0.0),
        ("progress", Path, Path()),
    ):
        parser.add_argument(f"--{name}", type=kind, default=default, help=argparse.SUPPRESS)
    return parser


if __name__ == "__main__":
    sys.exit(main())
