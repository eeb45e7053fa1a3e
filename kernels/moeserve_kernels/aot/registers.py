"""The checked-in table of registers, one file for each minor version of Triton."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import triton

from moeserve_kernels import tables
from moeserve_kernels.aot.compiling import Compiled


def version() -> str:
    """Major and minor version of Triton, "3.9": the compilers of two patches do not differ."""
    return ".".join(triton.__version__.split(".")[:2])


def path() -> Path:
    """Where the table of this Triton lies, or would."""
    return Path(tables.__file__).parent / "tile_tables" / f"registers-{version()}.json"


def read() -> dict[str, Any] | None:
    """{target: {label: registers}}, or None when there is no table for this Triton."""
    return tables.load("registers", version()) if path().exists() else None


def write(results: Sequence[Compiled], *, are_all: bool) -> int:
    """Renews the registers of ``results`` in the table.

    are_all: they are all cases of their families on their targets, so that entries of cases that
        are no more are dropped.

    Returns:
        How many entries the table then has.
    """
    renewed = {(one.target, one.family) for one in results} if are_all else set()
    table: dict[str, dict[str, int]] = {
        target: {
            label: registers
            for label, registers in entries.items()
            if (target, label.split("/")[0]) not in renewed
        }
        for target, entries in (read() or {}).items()
    }
    for one in results:
        if one.error is None:
            table.setdefault(one.target, {})[one.label] = one.registers
    ordered = {target: dict(sorted(table[target].items())) for target in sorted(table)}
    path().write_text(json.dumps(ordered, indent=1) + "\n")
    tables.load.cache_clear()
    return sum(map(len, ordered.values()))
