"""Compiling kernels for chips that are not here: the tool, and the kernels themselves."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from moeserve_kernels.aot import registers
from moeserve_kernels.aot.__main__ import main
from moeserve_kernels.aot.cases import Case, heaviest
from moeserve_kernels.aot.checks import problems
from moeserve_kernels.aot.compiling import Compiled
from moeserve_kernels.aot.pool import Pool
from moeserve_kernels.aot.signature import specialise
from moeserve_kernels.device.launch import Launch
from moeserve_kernels.device.targets import TARGETS


@triton.jit
def _kernel(x_ptr, y_ptr, bias_ptr, w_desc, rows, one, stride, scale, far, BLOCK: tl.constexpr):
    """Takes one argument of each kind."""
    tl.store(y_ptr, tl.load(x_ptr))


def _launch(**changes: Any) -> Launch:
    x = torch.empty(64, 128, dtype=torch.bfloat16, device="meta")
    args = {
        "x_ptr": x,
        "y_ptr": torch.empty(4, dtype=torch.int32, device="meta"),
        "bias_ptr": None,
        "w_desc": TensorDescriptor(x, [64, 128], [128, 1], [32, 64]),
        "rows": 7,
        "one": 1,
        "stride": 128,
        "scale": 0.5,
        "far": 2**40,
    }
    return Launch(_kernel, (1,), args | changes, {"BLOCK": 16}, {"num_warps": 8})


def test_arguments_are_specialised_as_at_a_launch() -> None:
    found = specialise(_launch(), TARGETS["sm_90"])
    assert found.signature == {
        "x_ptr": "*bf16",
        "y_ptr": "*i32",
        "bias_ptr": "constexpr",
        "w_desc": "tensordesc<bf16[32, 64]>",
        "rows": "i32",
        "one": "constexpr",
        "stride": "i32",
        "scale": "fp32",
        "far": "i64",
        "BLOCK": "constexpr",
    }
    assert found.constants == {(2,): None, (5,): 1, (9,): 16}
    assert found.aligned() == {"x_ptr", "y_ptr", "stride", "far"}
    assert found.options["num_warps"] == 8


def test_pointers_under_2_gib_are_known_as_such_on_amd() -> None:
    huge = torch.empty(2**31, dtype=torch.bfloat16, device="meta")
    found = specialise(_launch(y_ptr=huge), TARGETS["gfx942"])
    assert ["tt.pointer_range", 32] in found.attributes[(0,)]
    assert found.attributes[(1,)] == [["tt.divisibility", 16]]


def test_an_unknown_option_or_argument_is_refused() -> None:
    launch = _launch()
    wrong = Launch(launch.kernel, (1,), launch.args, launch.constants, {"num_wraps": 8})
    with pytest.raises(KeyError, match="num_wraps"):
        specialise(wrong, TARGETS["sm_90"])
    with pytest.raises(TypeError, match="far"):
        args = {name: one for name, one in launch.args.items() if name != "far"}
        specialise(Launch(launch.kernel, (1,), args, launch.constants), TARGETS["sm_90"])


def test_growth_of_registers_is_a_problem_above_a_tenth() -> None:
    table = {"sm_90": {"moe/up": 100}}
    assert problems(Compiled("sm_90", "moe", "moe/up", registers=110), table) == []
    found = problems(Compiled("sm_90", "moe", "moe/up", registers=111), table)
    assert len(found) == 1 and "111 registers, 100 in the table: 11% more" in found[0]
    assert problems(Compiled("sm_90", "moe", "moe/new", registers=255), table) == []
    assert problems(Compiled("sm_90", "moe", "moe/up", registers=255), None) == []


def test_a_table_loses_the_entries_of_cases_that_are_no_more(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    path = tmp_path / "registers-0.0.json"
    monkeypatch.setattr(registers, "path", lambda: path)
    monkeypatch.setattr(registers, "read", lambda: json.loads(path.read_text()))
    path.write_text('{"sm_80": {"moe/a": 5}, "sm_90": {"moe/a": 6, "moe/b": 7, "mla/a": 8}}')
    renewed = [Compiled("sm_90", "moe", "moe/b", registers=9)]
    failed = Compiled("sm_90", "moe", "moe/c", error="does not compile")
    assert registers.write([*renewed, failed], are_all=False) == 4
    assert registers.read()["sm_90"] == {"mla/a": 8, "moe/a": 6, "moe/b": 9}
    assert registers.write(renewed, are_all=True) == 3
    assert registers.read() == {"sm_80": {"moe/a": 5}, "sm_90": {"mla/a": 8, "moe/b": 9}}


def test_the_heaviest_case_of_each_kernel_and_format_is_taken() -> None:
    plain, other = _launch(), _launch()
    other = Launch(other.kernel, (1,), other.args, {"BLOCK": 16, "FORMAT": "int4"})
    cases = [
        Case("sm_90", "moe", "a", plain),
        Case("sm_90", "moe", "b", plain),
        Case("sm_90", "moe", "c", other),
        Case("sm_80", "moe", "a", plain),
    ]
    table = {"sm_90": {"a": 10, "b": 20}}
    assert [(one.target, one.label) for one in heaviest(cases, table)] == [
        ("sm_90", "b"),
        ("sm_90", "c"),
        ("sm_80", "a"),
    ]
    assert [one.label for one in heaviest(cases, None)] == ["a", "c", "a"]


def _work(item: str) -> str:
    if item == "crash":
        print("LLVM ERROR: out of luck", file=sys.stderr, flush=True)
        os._exit(134)
    if item == "hang":
        time.sleep(60)
    return item.upper()


def test_a_crash_or_a_hang_takes_one_case_along() -> None:
    pool = Pool(_work, lambda item, why: f"{item}: {why}", num_jobs=2, timeout_s=1.0)
    items = ["a", "crash", "b", "hang", "c"]
    seen: list[str] = []
    results = pool.run(items, seen.append)
    crash, hang = "crash: the compiler crashed: LLVM ERROR: out of luck", "hang: not done after 1 s"
    assert results == ["A", crash, "B", hang, "C"]
    assert sorted(seen) == sorted(results)


def test_the_tool_refuses_to_run_in_the_interpreter(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--target", "sm_90"]) == 2
    assert "unset it" in capsys.readouterr().err


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    toys = Path(__file__).with_name("aot_toys.py")
    done = _run_compiler([str(toys)], tmp_path_factory.mktemp("cache"))
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    return found


@pytest.mark.parametrize(
    ("toy", "problem"),
    [
        ("sm_90 moe good", None),
        ("gfx942 moe good", None),
        ("sm_90 moe tma", None),
        ("sm_90 attention few rows", None),
        ("sm_90 moe few rows", "does not use wgmma"),
        ("sm_80 moe spills", "spills"),
        ("gfx942 moe shared", "bytes of shared memory, the chip has 65536"),
        ("sm_80 norm copy", "registers, 1 in the table"),
        ("sm_90 norm option", "does not compile: KeyError"),
        ("sm_90 norm argument", "does not compile: TypeError"),
    ],
)
def test_what_the_checks_look_for(compiled: dict[str, Any], toy: str, problem: str | None) -> None:
    found = compiled[toy]["problems"]
    if problem is None:
        assert found == []
    else:
        assert len(found) == 1 and problem in found[0], found


def test_instructions_are_counted(compiled: dict[str, Any]) -> None:
    assert compiled["sm_90 moe good"]["instructions"]["wgmma.mma_async"] > 0
    assert compiled["gfx942 moe good"]["instructions"]["v_mfma"] > 0
    assert compiled["sm_90 moe tma"]["instructions"]["cp.async.bulk.tensor"] > 0
    assert compiled["sm_90 moe tma"]["wants_tma"]
    assert compiled["sm_90 norm option"]["instructions"] == {}


def test_every_kernel_compiles_well_for_two_vendors(tmp_path: Path) -> None:
    """The heaviest case of each; all of them: ``python -m moeserve_kernels.aot``."""
    command = ["-m", "moeserve_kernels.aot", "--quick", "--target", "sm_90", "gfx942"]
    done = _run_compiler(command, tmp_path)
    failed = [line for line in done.stdout.splitlines() if line.startswith("FAILED")]
    assert done.returncode == 0 and not failed, "\n".join([*failed, done.stderr])


def _run_compiler(command: list[str], cache: Path) -> subprocess.CompletedProcess[str]:
    root = Path(__file__).parents[2]
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment |= {
        "TRITON_CACHE_DIR": str(cache),
        "PYTHONPATH": os.pathsep.join(
            [os.environ.get("PYTHONPATH", ""), str(root / "kernels"), str(root)]
        ),
    }
    return subprocess.run(
        [sys.executable, *command], capture_output=True, text=True, env=environment, cwd=root
    )
