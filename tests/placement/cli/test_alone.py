"""The library and its commands where nothing but numpy, click and rich is installed."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

SOURCE = Path(__file__).parents[3] / "placement"
ALONE = """
import runpy, sys

ALLOWED = {"numpy", "click", "rich", "markdown_it", "mdurl", "pygments", "moeserve_placement"}


class OnlyThese:
    # Refuses every module that is neither of Python itself nor allowed.
    def find_spec(self, name, path=None, target=None):
        top = name.partition(".")[0]
        if top not in ALLOWED and top not in sys.stdlib_module_names:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)


sys.meta_path.insert(0, OnlyThese())
sys.path.insert(0, sys.argv.pop(1))
try:
    runpy.run_module("moeserve_placement", run_name="__main__", alter_sys=True)
finally:
    loaded = {name.partition(".")[0] for name in sys.modules}
    print("torch" in loaded, "moeserve" in loaded, file=sys.stderr)
"""


def run(folder: Path, *args: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", ALONE, str(SOURCE), *map(str, args)]
    return subprocess.run(command, cwd=folder, text=True, capture_output=True, timeout=120)


def test_the_commands_need_neither_torch_nor_the_runtime(tmp_path: Path) -> None:
    small = ("--tokens", 512, "--layers", 2, "--experts", 8, "--top-k", 2, "--tolerance", 0.4)
    machine = ("--ranks", 4, "--slots", 3, "--batch", 64, "--window", 64)
    for args, words in (
        (("--help",), "Usage: python -m moeserve_placement"),
        (("trace", "synth", "zipf", "t.npz", "--sequence-length", 32, *small), "t.npz: routing"),
        (("trace", "info", "t.npz"), "max/mean"),
        (("placement", "compare", "t.npz", "--planners", "eplb", *machine), "Balance"),
        (("placement", "paging", "t.npz", "--capacity", 4, "--batch", 1), "belady"),
    ):
        done = run(tmp_path, *args)
        assert done.returncode == 0, done.stderr
        assert words in done.stdout
        assert done.stderr.splitlines()[-1] == "False False"


def test_what_is_missing_is_named_where_it_is_needed(tmp_path: Path) -> None:
    (tmp_path / "p.yaml").write_text("num_slots: 1\ninitial_global_assignments:\n  0: [0]\n")
    done = run(tmp_path, "trace", "convert", "p.yaml", "p.json", "--ranks", 1)
    assert done.returncode == 2
    assert done.stderr.splitlines()[0] == (
        "error: p.yaml: a YAML file needs PyYAML, which is not installed: "
        "pip install 'moeserve[traces]'"
    )
