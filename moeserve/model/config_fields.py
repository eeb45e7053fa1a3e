"""Typed reading of a ``config.json``: right type and range, or an error that names the field."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeVar, overload

Text = TypeVar("Text", bound=str)
Default = TypeVar("Default")

_REQUIRED: Any = object()


class ConfigFields:
    """The content of a ``config.json``. A field that is ``null`` counts as absent.

    Every reader raises ValueError where a field is absent without default, of another type, or out
    of range; the text has the name and value of the field and what would be right.
    """

    def __init__(self, raw: Mapping[str, Any]) -> None:
        self.raw = raw

    def integer(
        self, *names: str, default: int = _REQUIRED, least: int = 1, most: int = 2**31 - 1
    ) -> int:
        """An integer in [least, most], by whichever of ``names`` is there."""
        name, value = self._find(names, default)
        if value is default:
            return int(default)
        if not _is_integer(value) or not least <= value <= most:
            raise _wrong(name, value, f"an integer from {least} to {most}")
        return int(value)

    def optional_integer(self, name: str, *, least: int) -> int | None:
        """An integer of at least ``least``, or None where the field is absent."""
        return None if self.raw.get(name) is None else self.integer(name, least=least)

    def integers(self, name: str) -> tuple[int, ...]:
        """Non-negative integers, written as one or as a list; absent: none."""
        value = self.raw.get(name)
        values = [] if value is None else value if isinstance(value, list) else [value]
        if not all(_is_integer(item) and 0 <= item < 2**31 for item in values):
            raise _wrong(name, value, "non-negative integers")
        return tuple(values)

    @overload
    def number(self, name: str, *, most: float = ...) -> float: ...
    @overload
    def number(self, name: str, *, default: Default, most: float = ...) -> float | Default: ...
    def number(self, name: str, *, default: Any = _REQUIRED, most: float = 1e12) -> Any:
        """A positive, finite number of at most ``most``."""
        name, value = self._find((name,), default)
        if value is default:
            return default
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if not is_number or not 0 < value <= most:
            raise _wrong(name, value, f"a positive number of at most {most:g}")
        return float(value)

    def flag(self, name: str, *, default: bool) -> bool:
        """true or false."""
        _, value = self._find((name,), default)
        if not isinstance(value, bool):
            raise _wrong(name, value, "true or false")
        return value

    def one_of(self, name: str, choices: tuple[Text, ...], *others: str, default: Text) -> Text:
        """One of ``choices``, by ``name`` or one of its ``others``."""
        name, value = self._find((name, *others), default)
        for choice in choices:
            if value == choice:
                return choice
        raise _wrong(name, value, f"one of {', '.join(choices)}")

    def section(self, name: str) -> ConfigFields | None:
        """The fields of a nested object, or None where it is absent."""
        value = self.raw.get(name)
        if value is None:
            return None
        if not isinstance(value, dict):
            raise _wrong(name, value, "an object")
        return ConfigFields(value)

    def refuse(self, name: str, reason: str) -> None:
        """Refuses any config that has ``name``."""
        if self.raw.get(name) is not None:
            raise ValueError(f"{name}: {reason}")

    def _find(self, names: tuple[str, ...], default: Any) -> tuple[str, Any]:
        for name in names:
            if self.raw.get(name) is not None:
                return name, self.raw[name]
        if default is _REQUIRED:
            raise ValueError(f"{' or '.join(names)}: missing in config.json")
        return names[0], default


def _is_integer(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _wrong(name: str, value: object, wanted: str) -> ValueError:
    return ValueError(f"{name} = {str(value)[:80]}: must be {wanted}")
