"""One process of the check: goes through items, and says before each which one it begins.

A kernel that reads a wild address leaves its process without a GPU. So the process ends, and the
one that started it goes on behind the item.
"""

from __future__ import annotations

import gc
import time
from dataclasses import dataclass
from pathlib import Path

import torch

from moeserve_kernels import backend
from moeserve_kernels.device.targets import target_of
from moeserve_kernels.floors import H200, Limits
from moeserve_kernels.gpucheck import report
from moeserve_kernels.gpucheck.plan import Context, Item
from moeserve_kernels.gpucheck.stages import items

BROKEN = 3  # exit code: the GPU is lost to this process


@dataclass(frozen=True)
class Job:
    """What a worker does: items ``part, part + parts, ...`` of a stage, from index ``start`` on.

    deadline: in seconds of ``time.time()``. progress: a file that holds the index begun last.
    """

    stage: str
    part: int
    parts: int
    start: int
    deadline: float
    output: Path
    progress: Path
    seed: int
    commit: str
    dry: bool


def work(job: Job) -> int:
    """Does the job; returns the exit code of the process."""
    torch.set_num_threads(1)
    device = torch.device("cpu" if job.dry else "cuda")
    common = {"commit": job.commit, **report.machine(device)}
    common |= {"target": target_of(device).name, "seed": job.seed}
    if job.dry:
        common["dry"] = True
    lines = report.Report(job.output, common)
    limits = _measured(job.output)
    if limits is None and job.stage == "bench":
        lines.add("note", "limits are not known here: floors are those of an H200")
    context = Context(device, job.dry, job.seed, lines, limits or H200)
    todo = items(job.stage, dry=job.dry)
    late = []
    for index in range(len(todo)):
        if index < job.start or index % job.parts != job.part:
            continue
        if time.time() + todo[index].seconds > job.deadline:
            late.append(f"{todo[index].kind}: {todo[index].name}")
            continue
        job.progress.write_text(str(index))
        if not _attempt(todo[index], context):
            return BROKEN
    lines.skipped(late, "no time left")
    return 0


def _attempt(item: Item, context: Context) -> bool:
    """Runs an item; whether the process can go on."""
    try:
        if context.dry:
            with backend.forced("triton-interpret"):
                item.run(context)
        else:
            item.run(context)
    except Exception as error:  # whatever a kernel or the compiler does wrong is a result
        context.report.failed(item.kind, item.name, error)
        del error
    gc.collect()
    if context.device.type != "cuda":
        return True
    try:
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
    except RuntimeError:
        return False
    return True


def _measured(output: Path) -> Limits | None:
    """The limits that an earlier stage has measured, if it could."""
    for line in reversed(report.read(output)):
        if line["kind"] == "limits":
            return Limits(line["bytes_per_s"], line["flops_per_s"])
    return None
