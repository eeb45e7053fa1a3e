"""What every benchmark reports in the same way: commit, hardware, versions, percentiles, tables."""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import subprocess
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

_CPU_FLAGS = ("avx2", "avx512f", "avx512_bf16", "amx_bf16")


def commit() -> str:
    """The checkout's commit, with ``-dirty`` for uncommitted changes; 'unknown' without git."""
    folder = Path(__file__).parent
    try:
        head = _output(["git", "rev-parse", "HEAD"], folder)
        changes = _output(["git", "status", "--porcelain"], folder)
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return f"{head}-dirty" if changes else head


def _output(command: list[str], folder: Path) -> str:
    done = subprocess.run(command, cwd=folder, check=True, capture_output=True, text=True)
    return done.stdout.strip()


def hardware() -> dict[str, Any]:
    """CPU name, usable cores, the matrix instructions it has, and memory in GiB."""
    info: dict[str, str] = {}
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            key, _, value = line.partition(":")
            info.setdefault(key.strip(), value.strip())
    except OSError:  # not Linux
        pass
    flags = set(info.get("flags", "").split())
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return {
        "cpu": info.get("model name", platform.processor()),
        "cpu_family": info.get("cpu family", ""),
        "cores": usable_cores(),
        "instructions": [flag for flag in _CPU_FLAGS if flag in flags],
        "memory_gib": round(memory / 2**30, 1),
    }


def usable_cores() -> int:
    """Cores that this process may run on."""
    return len(os.sched_getaffinity(0))


def versions(*names: str) -> dict[str, str]:
    """Version of Python and of each named distribution that is installed."""
    found = {"python": platform.python_version()}
    for name in names:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def provenance(*names: str) -> dict[str, Any]:
    """Commit, hardware, versions and UTC time: what makes a result traceable."""
    return {
        "commit": commit(),
        "hardware": hardware(),
        "versions": versions(*names),
        "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
    }


def percentile(values: Sequence[float], percent: float) -> float:
    """The ``percent``-th percentile with linear interpolation between neighbours.

    Raises:
        ValueError: no values, or percent outside 0 to 100.
    """
    if not values:
        raise ValueError("percentile of no values")
    if not 0 <= percent <= 100:
        raise ValueError(f"percent = {percent}: must be from 0 to 100")
    ordered = sorted(values)
    position = (len(ordered) - 1) * percent / 100
    low = int(position)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (position - low)


def summary_ms(seconds: Sequence[float]) -> dict[str, float] | None:
    """p50, p90, p99 and mean in milliseconds; None when there is nothing to summarise."""
    if not seconds:
        return None
    result = {f"p{p}": round(percentile(seconds, p) * 1e3, 3) for p in (50, 90, 99)}
    return {**result, "mean": round(sum(seconds) / len(seconds) * 1e3, 3)}


def rounded(values: Mapping[str, float]) -> dict[str, float]:
    """The values with six significant digits: more would pretend to a precision nobody has."""
    return {key: float(f"{value:.6g}") for key, value in values.items()}


def value_of(text: str) -> Any:
    """The JSON value that ``text`` is, or the text itself where it is none."""
    try:
        return json.loads(text)
    except json.JSONDecodeError:
        return text


def busy_core_seconds() -> float:
    """Core seconds that the whole machine has spent working since it started (Linux)."""
    fields = [int(text) for text in Path("/proc/stat").read_text().splitlines()[0].split()[1:]]
    user, nice, system, _idle, _iowait, irq, softirq, steal = fields[:8]
    return (user + nice + system + irq + softirq + steal) / os.sysconf("SC_CLK_TCK")


def print_json(record: Mapping[str, Any], path: Path | None = None) -> None:
    """One JSON line on stdout, appended to ``path`` too when there is one."""
    line = json.dumps(record)
    print(line, flush=True)
    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("a") as file:
            file.write(line + "\n")


def print_table(title: str, columns: Sequence[str], rows: Sequence[Sequence[object]]) -> None:
    """A table on stderr, so that stdout stays JSON lines; floats get three digits."""
    table = Table(title=title)
    for index, column in enumerate(columns):
        table.add_column(column, justify="left" if index == 0 else "right")
    for row in rows:
        table.add_row(*[_cell(value) for value in row])
    console = Console(stderr=True)
    if not console.is_terminal:  # a log file has no width to fit
        console.width = 160
    console.print(table)


def _cell(value: object) -> str:
    if value is None:
        return "-"
    if isinstance(value, float):
        return f"{value:.0f}" if abs(value) >= 100 else f"{value:.3g}"
    return str(value)
