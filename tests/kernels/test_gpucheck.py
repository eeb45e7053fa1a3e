"""The check of a machine with a GPU: its judgement, its survival of crashes, a dry run."""

from __future__ import annotations

import importlib
import inspect
import json
import os
import pkgutil
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch

from moeserve_kernels import operations
from moeserve_kernels.device.targets import TARGETS
from moeserve_kernels.device.tiles import Tile
from moeserve_kernels.floors import MoeShape
from moeserve_kernels.gpucheck import checks, correctness, moe_bench, report, tune
from moeserve_kernels.gpucheck.correctness import FAMILY_OF, Check, Package
from moeserve_kernels.gpucheck.plan import Context, Item
from moeserve_kernels.gpucheck.stages import items
from moeserve_kernels.gpucheck.supervise import run_stage
from moeserve_kernels.gpucheck.worker import BROKEN, Job, work

CPU = torch.device("cpu")
# They run off-line, are parts of checked operations, or check arguments.
_OFF_LINE = {"quantize_experts", "dequantize_experts"}
_NOT_CHECKED = _OFF_LINE | {"attn_decode_splits", "merge", "check_table"}


def run(*options: str, **environ: str) -> subprocess.CompletedProcess[str]:
    """The command in a process of its own, where triton compiles unless ``environ`` says not."""
    environment = {name: one for name, one in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["PYTHONPATH"] = str(Path(__file__).parents[2] / "kernels")
    return subprocess.run(
        [sys.executable, "-m", "moeserve_kernels.gpucheck", *options],
        capture_output=True,
        text=True,
        env={**environment, **environ},
    )


@pytest.mark.parametrize(
    ("environ", "text"),
    [
        ({"CUDA_VISIBLE_DEVICES": ""}, "torch finds no GPU here: give --dry"),
        ({"TRITON_INTERPRET": "1"}, "TRITON_INTERPRET is set"),
    ],
)
def test_where_it_can_not_run_it_says_so_in_one_line(
    environ: dict[str, str], text: str, tmp_path: Path
) -> None:
    done = run("--output", str(tmp_path / "lines.jsonl"), **environ)
    assert done.returncode == 2
    assert text in done.stderr
    assert done.stderr.count("\n") == 1


def test_a_dry_run_goes_through_everything(tmp_path: Path) -> None:
    output = tmp_path / "lines.jsonl"
    done = run("--dry", "--output", str(output), "--commit", "abc", "--seed", "1")
    lines = report.read(output)
    assert done.returncode == 0, done.stdout + done.stderr
    assert {line["kind"] for line in lines} == {
        "limits",
        "correctness",
        "moe",
        "moe_steps",
        "attention",
        "tune",
    }
    assert all(line["dry"] and line["commit"] == "abc" for line in lines)
    assert sum(line["kind"] == "correctness" for line in lines) == sum(
        check.dry for check in checks.checks()
    )
    moe = next(line for line in lines if line["kind"] == "moe")
    wanted = {"microseconds", "share_of_floor", "grouped_mm_ratio", "cublas_ratio", "target"}
    assert wanted <= moe.keys() and moe["gpu"] == "none"
    table = Path(f"{output}.moe-interpret.json")
    assert json.loads(table.read_text())["formats"]["plain"]


def test_each_public_operation_has_a_check_that_also_runs_dry() -> None:
    public = set()
    for module in pkgutil.iter_modules(operations.__path__):
        family = importlib.import_module(f"moeserve_kernels.operations.{module.name}")
        public |= {
            name
            for name, one in inspect.getmembers(family, inspect.isfunction)
            if one.__module__ == family.__name__ and not name.startswith("_")
        }
    assert public - _NOT_CHECKED == set(FAMILY_OF)
    used: dict[str, set[bool]] = {}
    for check in checks.checks():
        noting = _Noting(used, check.dry)
        check.call(noting, check.make(correctness.Draw(0, CPU, torch.float32)))
    # moe_ffn is made of three others, each of them checked by it.
    parts = {"moe_up", "moe_down", "combine"}
    assert set(used) == set(FAMILY_OF) - parts
    assert all(True in dry for dry in used.values())


class _Noting(Package):
    """The formulas are slow; on the CPU the real operations do. Notes what is called."""

    def __init__(self, used: dict[str, set[bool]], dry: bool) -> None:
        super().__init__("operations")
        self._used, self._dry = used, dry

    def __getattr__(self, operation: str) -> Callable[..., Any]:
        found = super().__getattr__(operation)
        self._used.setdefault(operation, set()).add(self._dry)
        return found


def _check(call: Callable[[Package, dict[str, Any]], tuple[torch.Tensor, ...]]) -> Check:
    return Check("toy", lambda draw: {"x": draw.normal(8, 4)}, call, dtype=torch.float32)


def test_a_right_result_passes() -> None:
    assert correctness.run(_check(lambda _, inputs: (inputs["x"] * 2,)), 1, CPU) <= 1e-7


def _wrong(package: Package, inputs: dict[str, Any]) -> tuple[torch.Tensor, ...]:
    factor = 1.001 if package.name == "operations" else 1.0
    return (inputs["x"] * factor,)


def _unset(package: Package, inputs: dict[str, Any]) -> tuple[torch.Tensor, ...]:
    out = torch.empty_like(inputs["x"])
    return (out if package.name == "operations" else inputs["x"],)


def _beside(package: Package, inputs: dict[str, Any]) -> tuple[torch.Tensor, ...]:
    out = torch.empty_like(inputs["x"]).copy_(inputs["x"])
    if package.name == "operations":
        out.as_strided((1,), (1,), out.storage_offset() + out.numel()).fill_(0)
    return (out,)


def _random(package: Package, inputs: dict[str, Any]) -> tuple[torch.Tensor, ...]:
    return (torch.rand(4),)


def _changing(package: Package, inputs: dict[str, Any]) -> tuple[torch.Tensor, ...]:
    return (inputs["x"].zero_(),)


def _outside(package: Package, inputs: dict[str, Any]) -> tuple[torch.Tensor, ...]:
    x = inputs["x"]
    if package.name != "operations":
        return (x.sum()[None],)
    return (x.as_strided((33,), (1,), x.storage_offset()).sum()[None],)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (_wrong, "relative error 0.001, at most 1e-05"),
        (_unset, "relative error inf"),
        (_outside, "relative error inf"),
        (_beside, "bytes after a tensor"),
        (_random, "4 of 4 values differ"),
        (_changing, "was changed"),
    ],
)
def test_each_kind_of_wrong_result_is_seen(
    call: Callable[[Package, dict[str, Any]], tuple[torch.Tensor, ...]], message: str
) -> None:
    with pytest.raises(AssertionError, match=message):
        correctness.run(_check(call), 1, CPU)


_WORKER = """
import os, sys, time
from pathlib import Path
start, part, parts, progress, output, broken = sys.argv[1:]
for index in range(int(start), 6):
    if index % int(parts) != int(part):
        continue
    Path(progress).write_text(str(index))
    if index == 1:
        os._exit(7)
    if index == 2:
        time.sleep(60)
    if index == 3:
        os._exit(int(broken))
    with open(output, "a") as file:
        file.write(f"done {index}\\n")
"""


@pytest.mark.parametrize("parts", [1, 2])
def test_the_check_goes_on_behind_items_that_crash_or_hang(tmp_path: Path, parts: int) -> None:
    output, lines = tmp_path / "done", tmp_path / "lines.jsonl"
    job = Job("bench", 0, 1, 0, time.time() + 60, output, tmp_path / "progress", 0, "abc", True)

    def command(job: Job) -> list[str]:
        args = (job.start, job.part, job.parts, job.progress, job.output, BROKEN)
        return [sys.executable, "-c", _WORKER, *map(str, args)]

    todo = [Item("toy", f"item {index}", 1.0, lambda _: None) for index in range(6)]
    run_stage(job, todo, report.Report(lines, {}), parts=parts, command=command, item_limit_s=1.5)
    assert sorted(output.read_text().split("\n")[:-1]) == ["done 0", "done 4", "done 5"]
    errors = {line["what"]: line["error"] for line in report.read(lines)}
    assert errors["toy: item 1"] == "the process ended with code 7"
    assert "not done after" in errors["toy: item 2"]
    assert len(errors) == 2  # item 3 has reported its error itself


def test_what_has_no_time_left_is_named(tmp_path: Path) -> None:
    output, progress = tmp_path / "lines.jsonl", tmp_path / "progress"
    job = Job("bench", 0, 1, 0, time.time() - 1, output, progress, 0, "abc", True)
    assert work(job) == 0
    lines = report.read(output)
    assert lines[0]["kind"] == "note" and "limits are not known" in lines[0]["what"]
    assert {line["kind"] for line in lines[1:]} == {"skipped"}
    assert len(lines[1:]) == len(items("bench", dry=True))
    assert all(line["why"] == "no time left" for line in lines[1:])


def test_sets_of_inputs_share_no_expert_at_one_token(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(moe_bench, "num_sets", lambda num_bytes: 4)
    experts = moe_bench.Experts(MoeShape(64, 8, 32, 16, 64), *_no_weights(), None)
    context = Context(CPU, True, 1, report.Report(Path("unused"), {}))
    steps = moe_bench.draw_steps(experts, 1, 1e6, context)
    ids = torch.cat([step.topk_ids.flatten() for step in steps])
    assert ids.unique().numel() == ids.numel() == 32
    shard = moe_bench.Experts(MoeShape(64, 8, 32, 16, 16), *_no_weights(), None)
    for step in moe_bench.draw_steps(shard, 1, 1e6, context):
        assert (step.topk_ids < 16).sum() == 2  # as many of a shard's experts as on average
    several = moe_bench.draw_steps(experts, 200, 1e6, context)[0].topk_ids
    assert all(row.unique().numel() == 8 for row in several)
    skewed = moe_bench.draw_steps(experts, 200, 1e6, context, skewed=True)[0].topk_ids
    assert (skewed == 0).sum() > 3 * (several == 0).sum()


def test_candidates_are_neighbours_of_the_shipped_tile() -> None:
    tile = Tile(block_n=64, block_k=64, num_warps=4, num_stages=3)
    for target, product, expected in (("sm_90", "down", 11), ("gfx942", "up", 8)):
        found = list(tune.candidates(tile, product, TARGETS[target]))
        assert found[0] == tile and len(set(found)) == len(found) == expected
        changed = [set(asdict(one).items()) - set(asdict(tile).items()) for one in found[1:]]
        assert all(len(one) == 1 for one in changed)


def test_every_candidate_can_be_compiled_beforehand() -> None:
    launches = list(tune.launches(TARGETS["sm_90"]))
    assert {name.split()[0] for name, _ in launches} == {"up", "down"}
    assert len(launches) > 40 and all(0 not in launch.grid for _, launch in launches)


def _no_weights() -> tuple[Any, Any]:
    return None, None


def test_a_failure_is_one_line_with_its_place(tmp_path: Path) -> None:
    lines = report.Report(tmp_path / "lines.jsonl", {"commit": "abc"})
    try:
        raise ValueError("x = 3: must be 4\nand more")
    except ValueError as error:
        lines.failed("moe", "qwen3", error)
    (line,) = report.read(tmp_path / "lines.jsonl")
    assert line["error"] == "ValueError: x = 3: must be 4"
    assert line["at"].startswith("test_gpucheck.py:") and line["commit"] == "abc"
    assert line["kind"] == "error"
    lines.failed("peer", "sdpa", ValueError("no"), matters=False)
    assert report.read(tmp_path / "lines.jsonl")[1]["kind"] == "note"
