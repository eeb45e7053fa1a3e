"""Checks of single settings: each error names the setting, its value and what would be right."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from moeserve_placement.placement import PlacementError

_LARGEST = 1e300  # of a number without a limit of its own: no infinity, nor what float() can't take
_SHOWN = 60  # characters of a value in a message


def check_integer(name: str, value: object, *, low: int, high: int | None = None) -> int:
    """The value as an int.

    Raises:
        PlacementError: not an integer (True and 2.0 are none), or outside [low, high].
    """
    if isinstance(value, (int, np.integer)) and not isinstance(value, bool):
        number = int(value)
        if low <= number and (high is None or number <= high):
            return number
    span = f"of at least {low}" if high is None else f"from {low} to {high}"
    raise PlacementError(f"{name} = {_shown(value)}: must be an integer {span}")


def check_number(
    name: str, value: object, *, low: float, high: float = _LARGEST, above: bool = False
) -> float:
    """The value as a float. above: whether ``low`` itself is out of range.

    Raises:
        PlacementError: not a number, NaN, infinite or outside [low, high].
    """
    if isinstance(value, (int, float, np.integer, np.floating)) and not isinstance(value, bool):
        in_range = bool(low <= value <= high) and not (above and value == low)
        if in_range:
            return float(value)
    span = f"above {low:g}" if above else f"of at least {low:g}"
    most = "" if high == _LARGEST else f" and at most {high:g}"
    raise PlacementError(f"{name} = {_shown(value)}: must be a finite number {span}{most}")


def check_choice(name: str, value: object, choices: Sequence[object]) -> None:
    """Raises PlacementError unless the value is one of the choices, also by type."""
    if not any(isinstance(value, type(choice)) and value == choice for choice in choices):
        raise PlacementError(
            f"{name} = {_shown(value)}: must be one of {', '.join(map(str, choices))}"
        )


def _shown(value: object) -> str:
    """The value for a message of one line, whatever it is."""
    try:
        text = " ".join(repr(value).split())
    except ValueError:  # Python prints no integer of more than 4,300 digits
        return "an enormous integer"
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}..."
