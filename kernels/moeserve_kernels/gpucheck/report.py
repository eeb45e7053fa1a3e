"""JSON lines for a machine, rows for a person: one line a result, one a failure, one a skip."""

from __future__ import annotations

import json
import platform
import subprocess
import traceback
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
import triton


class Report:
    """Appends to ``path`` and prints. Each line also has what ``common`` holds."""

    def __init__(self, path: Path, common: dict[str, Any]) -> None:
        self.path = path
        self._common = common

    def add(self, kind: str, what: str, **fields: Any) -> None:
        """One result: of a kind ("limits", "correctness", "moe"...), about ``what``."""
        line = {"kind": kind, "what": what, **fields, **self._common}
        with self.path.open("a") as file:
            file.write(json.dumps(line) + "\n")
        print(row(kind, what, fields), flush=True)

    def failed(self, kind: str, what: str, error: BaseException, *, matters: bool = True) -> None:
        """What was tried and did not work; the check goes on, but ends with an error if it matters.

        A peer that fails, or a tile that was only a try, does not.
        """
        frame = traceback.extract_tb(error.__traceback__)[-1:]
        place = f"{Path(frame[0].filename).name}:{frame[0].lineno}" if frame else ""
        lines = str(error).strip().splitlines()
        message = f"{type(error).__name__}: {lines[0] if lines else ''}"[:300]
        self.add("error" if matters else "note", f"{kind}: {what}", error=message, at=place)

    def skipped(self, what: Iterable[str], why: str) -> None:
        """What there was no time for."""
        for one in what:
            self.add("skipped", one, why=why)


def row(kind: str, what: str, fields: dict[str, Any]) -> str:
    """One line for a person: numbers short, the rest as they are."""
    shown = " ".join(f"{name}={_short(one)}" for name, one in fields.items() if one is not None)
    return f"{kind:12} {what:44} {shown}"


def machine(device: torch.device) -> dict[str, Any]:
    """Hardware and versions, for every line."""
    gpu = torch.cuda.get_device_name(device) if device.type == "cuda" else "none"
    return {
        "gpu": gpu,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "triton": triton.__version__,
        "cuda": torch.version.cuda or torch.version.hip,
    }


def commit() -> str:
    """The commit of this checkout, "unknown" where there is none."""
    command = ["git", "-C", str(Path(__file__).parent), "rev-parse", "--short=12", "HEAD"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=10, check=True)
    except (OSError, subprocess.SubprocessError):
        return "unknown"
    return done.stdout.strip()


def read(path: Path) -> list[dict[str, Any]]:
    """The lines so far."""
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def _short(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.3g}" if abs(value) < 100 else f"{value:.0f}"
    return str(value)
