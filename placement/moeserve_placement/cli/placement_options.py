"""Option values of the placement commands: lists, sizes, budgets, planners, the machine."""

from __future__ import annotations

import re
from fractions import Fraction
from typing import Any

import click

from moeserve_placement.placement import PlacementError
from moeserve_placement.planners.base import PLANNERS, Budget
from moeserve_placement.replay.settings import BudgetSpec, PlannerSpec
from moeserve_placement.topology import Topology

EXPERT_BYTES = 3 * 2048 * 1408 * 2
"""Gate, up and down of one expert of DeepSeek-V2-Lite in bf16, 17.3 MB."""
_UNITS = {
    "B": 1,
    "KB": 10**3,
    "MB": 10**6,
    "GB": 10**9,
    "TB": 10**12,
    "KIB": 2**10,
    "MIB": 2**20,
    "GIB": 2**30,
    "TIB": 2**40,
}
_BUDGET = re.compile(r"([0-9]{1,18}(?:\.[0-9]{1,18})?) ?([a-zA-Z]*)(/layer)?")
_INTEGER = re.compile(" *[+-]?[0-9]{1,18} *")
_LONGEST_OPTION = 80
_MOST_BYTES = 1 << 50
_MOST_COPIES = 1 << 40
_MOST_RANKS = 1 << 12
"""Traffic between ranks is kept as a number per pair and window."""
_MOST_SLOTS = 1 << 20


def integers(name: str, text: str) -> tuple[int, ...]:
    """'16,256' as integers.

    Raises:
        PlacementError: not a list of integers.
    """
    parts = text.split(",")
    if not all(_INTEGER.fullmatch(part) for part in parts):
        raise PlacementError(
            f"{name} = {_shown(text)}: must be integers of at most 18 digits, separated by commas"
        )
    return tuple(int(part) for part in parts)


def floats(name: str, text: str) -> tuple[float, ...]:
    """'1,0.8' as numbers.

    Raises:
        PlacementError: not a list of numbers.
    """
    try:
        return tuple(float(part) for part in text.split(","))
    except ValueError:
        raise PlacementError(
            f"{name} = {_shown(text)}: must be numbers separated by commas"
        ) from None


def seeds(text: str) -> tuple[int, ...]:
    """'0,1,2' as it is."""
    return integers("seeds", text)


def num_bytes(name: str, text: str) -> int:
    """'44MB', '16 MiB' or '1000' in bytes.

    Raises:
        PlacementError: not a size, or more than 1 PiB.
    """
    match = _BUDGET.fullmatch(text.strip())
    unit = match.group(2).upper() if match else ""
    if not match or match.group(3) or (unit or "B") not in _UNITS:
        raise PlacementError(
            f"{name} = {_shown(text)}: must be a size such as 17301504, 44MB or 16MiB"
        )
    return _whole(name, text, Fraction(match.group(1)) * _UNITS[unit or "B"], most=_MOST_BYTES)


def budgets(text: str, num_layers: int) -> tuple[BudgetSpec, ...]:
    """'none', '64' (copies), '6/layer', '1GB', '20MB/layer', several separated by commas.

    Raises:
        PlacementError: not a budget.
    """
    found = tuple(_budget(part.strip(), num_layers) for part in text.split(","))
    if len({spec.label for spec in found}) < len(found):
        raise PlacementError(f"budget = {_shown(text)}: a budget comes twice")
    return found


def _budget(text: str, num_layers: int) -> BudgetSpec:
    if text == "none":
        return BudgetSpec()
    match = _BUDGET.fullmatch(text)
    unit = match.group(2) if match else "?"
    if not match or (unit and unit.upper() not in _UNITS) or (not unit and "." in match.group(1)):
        raise PlacementError(
            f"budget = {_shown(text)}: must be none, a number of copies (64), bytes (1GB), or "
            "either of them with /layer"
        )
    scale = num_layers if match.group(3) else 1
    if not unit:
        copies = _whole("budget", text, Fraction(match.group(1)), most=_MOST_COPIES)
        budget = Budget(max_copies=copies * scale)
        noun = "copy" if match.group(1) == "1" else "copies"
        return BudgetSpec(label=f"{match.group(1)} {noun}{match.group(3) or ''}", budget=budget)
    size = Fraction(match.group(1)) * _UNITS[unit.upper()]
    _whole("budget", text, size, most=_MOST_BYTES)
    return BudgetSpec(label=text, budget=Budget(max_bytes=round(size * scale)))


def _whole(name: str, text: str, value: Fraction, *, most: int) -> int:
    """``value`` as an integer; PlacementError above ``most``."""
    if value > most:
        raise PlacementError(f"{name} = {_shown(text)}: must be at most {most:,}")
    return round(value)


def _shown(text: str) -> str:
    """An option's value for an error: long ones cut."""
    return repr(text if len(text) <= 60 else f"{text[:57]}...")


def planners(text: str) -> tuple[PlannerSpec, ...]:
    """'eplb,scenario:split=batch:power=16' as planners with options.

    Raises:
        PlacementError: an unknown planner, or an option without a value.
    """
    found = tuple(_planner(part.strip()) for part in text.split(","))
    if len({spec.label for spec in found}) < len(found):
        raise PlacementError(f"planners = {_shown(text)}: a planner comes twice")
    return found


def _planner(text: str) -> PlannerSpec:
    name, *pairs = text.split(":")
    if name not in PLANNERS:
        known = ", ".join(sorted(PLANNERS))
        raise PlacementError(f"planner = {_shown(name)}: must be one of {known}")
    options = {}
    for pair in pairs:
        key, equals, value = pair.partition("=")
        if not (key and equals and value) or len(pair) > _LONGEST_OPTION:
            raise PlacementError(
                f"planner {name!r}: option {_shown(pair)} must be key=value, of at most "
                f"{_LONGEST_OPTION} characters"
            )
        options[key] = _value(value)
    spec = PlannerSpec(name=name, options=options)
    spec.make()
    return spec


def _value(text: str) -> Any:
    if text in ("true", "false"):
        return text == "true"
    if _INTEGER.fullmatch(text):
        return int(text)
    try:
        return float(text)
    except ValueError:
        return text


_TOPOLOGY_OPTIONS = [
    click.option("--ranks", type=int, required=True, help="Ranks that hold experts."),
    click.option(
        "--slots", required=True, help="Expert slots per rank; one number, or one per rank."
    ),
    click.option("--nodes", type=int, default=1, show_default=True, help="Nodes, ranks in blocks."),
    click.option("--speeds", help="Relative speed of each rank, separated by commas."),
    click.option("--gone", help="Ranks that are gone, separated by commas."),
    click.option(
        "--expert-bytes",
        default=str(EXPERT_BYTES),
        show_default=True,
        help="Bytes of one expert of one layer, e.g. 44MB. Default: DeepSeek-V2-Lite in bf16.",
    ),
]


def topology_options(command: Any) -> Any:
    """Adds the options that ``make_topology`` takes."""
    for option in reversed(_TOPOLOGY_OPTIONS):
        command = option(command)
    return command


def make_topology(
    *,
    ranks: int,
    slots: str,
    nodes: int,
    speeds: str | None,
    gone: str | None,
    expert_bytes: str,
) -> Topology:
    """The machine of the options.

    Raises:
        PlacementError: a value is out of range or lists differ in length.
    """
    _check_most("ranks", ranks, _MOST_RANKS)
    per_rank = integers("slots", slots)
    _check_most("slots", max(per_rank), _MOST_SLOTS // max(ranks, 1))
    if len(per_rank) not in (1, max(ranks, 1)):
        raise PlacementError(
            f"slots = {_shown(slots)}: must be one number or {ranks}, one per rank"
        )
    even = Topology.uniform(ranks, max(max(per_rank), 1), num_nodes=nodes)
    topology = Topology(
        slots_per_rank=per_rank if len(per_rank) == ranks else per_rank * ranks,
        node_of_rank=even.node_of_rank,
        speed_of_rank=floats("speeds", speeds) if speeds else (),
        bytes_per_expert=num_bytes("expert_bytes", expert_bytes),
    )
    if not gone:
        return topology
    lost = integers("gone", gone)
    if min(lost) < 0 or max(lost) >= ranks:
        raise PlacementError(f"gone = {_shown(gone)}: ranks must be in [0, {ranks})")
    return topology.without(lost)


def _check_most(name: str, value: int, most: int) -> None:
    if value > most:
        raise PlacementError(f"{name} = {value}: must be at most {most}")
