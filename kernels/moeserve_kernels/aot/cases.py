"""What is compiled: the launches that each family of kernels names for a target."""

from __future__ import annotations

import importlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from moeserve_kernels.device.launch import Launch
from moeserve_kernels.device.targets import TARGETS

# Modules of ``moeserve_kernels.device``; a new family of kernels is added here.
FAMILIES = (
    "align",
    "attention",
    "exchange",
    "kv_cache",
    "mla",
    "moe",
    "norm",
    "quant",
    "routing",
)


@dataclass(frozen=True)
class Case:
    """One launch to compile.

    label: ``family/what the family calls it``, unique for a target.
    """

    target: str
    family: str
    label: str
    launch: Launch


def collect(
    targets: Sequence[str], families: Sequence[str] = FAMILIES, kernel: str = ""
) -> list[Case]:
    """All cases, target by target; ``kernel`` keeps the labels that contain it.

    Raises:
        ValueError: a family without ``aot_cases``, or with one label twice.
    """
    return [
        case
        for target in targets
        for family in families
        for case in _cases_of(target, family)
        if kernel in case.label
    ]


def heaviest(cases: Sequence[Case], table: Mapping[str, Any] | None) -> list[Case]:
    """Of each kernel, in each format of weights, the case with most registers in the table.

    Of those that the table does not know, the first.
    """
    best: dict[tuple[Any, ...], tuple[int, Case]] = {}
    for case in cases:
        kernel, constants = case.launch.kernel, case.launch.constants
        key = (case.target, case.family, kernel.fn.__name__, constants.get("FORMAT"))
        registers = (table or {}).get(case.target, {}).get(case.label, 0)
        if key not in best or registers > best[key][0]:
            best[key] = registers, case
    return [case for _, case in best.values()]


def _cases_of(target: str, family: str) -> Iterator[Case]:
    module = importlib.import_module(f"moeserve_kernels.device.{family}")
    if not hasattr(module, "aot_cases"):
        raise ValueError(f"family = {family!r}: {module.__name__} has no aot_cases")
    seen = set()
    for name, launch in module.aot_cases(TARGETS[target]):
        if name in seen:
            raise ValueError(f"family = {family!r}: two cases are called {name!r} for {target}")
        seen.add(name)
        yield Case(target, family, f"{family}/{name}", launch)
