"""A placement: which logical expert each physical slot of each rank holds, layer by layer.

On disk it is JSON. Two ranks, four experts, expert 0 with a copy on each rank, one free slot::

    {
      "format": "moeserve-placement",
      "version": 1,
      "num_experts": 4,
      "layers": {
        "0": [[0, 1, 2], [3, 0, null]]
      }
    }

``layers`` maps the model layer index to one list per rank; the list has one entry per slot: a
logical expert id or ``null`` for a free slot. Ranks and layers may have different slot counts.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeGuard

from moeserve_placement.text_files import FileError, parse_json, read_text

Slots = tuple[int | None, ...]
"""The slots of one rank in one layer: a logical expert id, or None where the slot is free."""

FORMAT = "moeserve-placement"
VERSION = 1
STRATEGIES = ("linear", "round_robin")


class PlacementError(ValueError):
    """A placement is not valid. The text names the layer, the rank or the expert at fault."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Placement:
    """Slots to experts. It validates itself, so a ``Placement`` at hand is a valid one.

    num_experts: logical experts per layer, ids ``[0, num_experts)``.
    layers: model layer index -> per rank -> per slot -> expert id or None.

    Valid means: every layer has the same number of ranks and every expert somewhere; no rank holds
    an expert twice in a layer (a second copy there would be of no use).

    Raises:
        PlacementError: the text names the layer, the rank or the expert at fault.
    """

    num_experts: int
    layers: Mapping[int, tuple[Slots, ...]]

    def __post_init__(self) -> None:
        if self.num_experts < 1:
            raise PlacementError(f"num_experts = {self.num_experts}: must be at least 1")
        if not self.layers:
            raise PlacementError("placement: has no layers")
        for layer, ranks in self.layers.items():
            if layer < 0:
                raise PlacementError(f"layer {layer}: must be a model layer index, 0 or more")
            if not ranks:
                raise PlacementError(f"layer {layer}: has no ranks")
            if len(ranks) != self.num_ranks:
                first = next(iter(self.layers))
                raise PlacementError(
                    f"layer {layer}: has {len(ranks)} ranks, but layer {first} has {self.num_ranks}"
                )
            _check_layer(layer, ranks, self.num_experts)

    @property
    def num_ranks(self) -> int:
        """Ranks, equal in all layers."""
        return len(next(iter(self.layers.values())))

    @property
    def max_slots(self) -> int:
        """Slots of the rank and layer that has most of them."""
        return max(len(slots) for ranks in self.layers.values() for slots in ranks)

    def copies(self, layer: int) -> tuple[tuple[tuple[int, int], ...], ...]:
        """By expert: the (rank, slot) of each of its copies, in rank order; never empty."""
        found: list[list[tuple[int, int]]] = [[] for _ in range(self.num_experts)]
        for rank, slots in enumerate(self.layers[layer]):
            for slot, expert in enumerate(slots):
                if expert is not None:
                    found[expert].append((rank, slot))
        return tuple(tuple(places) for places in found)

    @classmethod
    def linear(cls, num_experts: int, num_ranks: int, layers: Iterable[int]) -> Placement:
        """Consecutive experts per rank; the first ranks get one more where it does not divide.

        Raises:
            PlacementError: a count is below 1 or there are more ranks than experts.
        """
        _check_counts(num_experts, num_ranks)
        share, extra = divmod(num_experts, num_ranks)
        starts = [rank * share + min(rank, extra) for rank in range(num_ranks + 1)]
        ranks = tuple(tuple(range(starts[r], starts[r + 1])) for r in range(num_ranks))
        return cls(num_experts=num_experts, layers=dict.fromkeys(layers, ranks))

    @classmethod
    def round_robin(cls, num_experts: int, num_ranks: int, layers: Iterable[int]) -> Placement:
        """Expert ``e`` on rank ``e % num_ranks``.

        Raises:
            PlacementError: a count is below 1 or there are more ranks than experts.
        """
        _check_counts(num_experts, num_ranks)
        ranks = tuple(tuple(range(rank, num_experts, num_ranks)) for rank in range(num_ranks))
        return cls(num_experts=num_experts, layers=dict.fromkeys(layers, ranks))

    @classmethod
    def from_strategy(
        cls, strategy: str, num_experts: int, num_ranks: int, layers: Iterable[int]
    ) -> Placement:
        """The placement that one of ``STRATEGIES`` makes.

        Raises:
            PlacementError: no such strategy; a count is out of range.
        """
        if strategy == "linear":
            return cls.linear(num_experts, num_ranks, layers)
        if strategy == "round_robin":
            return cls.round_robin(num_experts, num_ranks, layers)
        raise PlacementError(f"placement = {strategy!r}: must be one of {', '.join(STRATEGIES)}")

    def completed(
        self, layers: Iterable[int], num_experts: int, default: str = "linear"
    ) -> tuple[Placement, tuple[int, ...]]:
        """This placement fitted to a model, and the layers it did not name.

        Args:
            layers: the model's MoE layers.
            num_experts: the model's experts per layer.
            default: the strategy for layers that this placement does not name.

        Raises:
            PlacementError: another number of experts, or a layer that the model does not have.
        """
        if num_experts != self.num_experts:
            raise PlacementError(
                f"num_experts = {self.num_experts}: must be {num_experts}, as in the model"
            )
        wanted = sorted(set(layers))
        unknown = sorted(set(self.layers) - set(wanted))
        if unknown:
            raise PlacementError(
                f"layer {unknown[0]}: is not a MoE layer of the model, which has {wanted}"
            )
        missing = tuple(layer for layer in wanted if layer not in self.layers)
        filled = dict(self.layers)
        if missing:
            filled |= self.from_strategy(default, num_experts, self.num_ranks, missing).layers
        ordered = {layer: filled[layer] for layer in wanted}
        return Placement(num_experts=num_experts, layers=ordered), missing

    def to_json(self) -> str:
        """The JSON form (see the module), one line per layer."""
        layers = ",\n".join(
            f'    "{layer}": {json.dumps(ranks)}' for layer, ranks in sorted(self.layers.items())
        )
        return (
            f'{{\n  "format": "{FORMAT}",\n  "version": {VERSION},\n'
            f'  "num_experts": {self.num_experts},\n  "layers": {{\n{layers}\n  }}\n}}\n'
        )

    @classmethod
    def from_json(cls, text: str) -> Placement:
        """The inverse of ``to_json``.

        Raises:
            PlacementError: not JSON, a key that comes twice, another format or version, an unknown
                key, a wrong type, or not a valid placement.
        """
        try:
            data = parse_json(text, what="placement")
        except FileError as error:
            raise PlacementError(str(error)) from error
        if not isinstance(data, dict) or data.get("format") != FORMAT:
            raise PlacementError(f'placement: must be a JSON object with "format": "{FORMAT}"')
        version = data.get("version")
        if not _is_int(version) or version != VERSION:
            raise PlacementError(f"version = {repr(version)[:40]}: must be {VERSION}")
        unknown = set(data) - {"format", "version", "num_experts", "layers"}
        if unknown:
            raise PlacementError(f"placement: unknown key {min(unknown)[:60]!r}")
        num_experts = data.get("num_experts")
        if not _is_id(num_experts):
            raise PlacementError(f"num_experts = {repr(num_experts)[:40]}: must be an integer")
        return cls(num_experts=num_experts, layers=_parse_layers(data.get("layers")))

    def save(self, path: Path) -> None:
        """Writes the JSON form to ``path``."""
        path.write_text(self.to_json(), encoding="utf-8")

    @classmethod
    def load(cls, path: Path) -> Placement:
        """Reads a file that ``save`` wrote.

        Raises:
            PlacementError: it can not be read, is longer than ``MAX_TEXT_BYTES`` or is not a valid
                placement; the text names the file.
        """
        try:
            return cls.from_json(read_text(path))
        except OSError as error:
            raise PlacementError(f"placement file {path}: {error.strerror}") from error
        except ValueError as error:
            raise PlacementError(f"placement file {path}: {error}") from error


def _check_counts(num_experts: int, num_ranks: int) -> None:
    if num_experts < 1:
        raise PlacementError(f"num_experts = {num_experts}: must be at least 1")
    if num_ranks < 1:
        raise PlacementError(f"num_ranks = {num_ranks}: must be at least 1")
    if num_ranks > num_experts:
        raise PlacementError(
            f"num_ranks = {num_ranks}: must be at most {num_experts}, the number of experts"
        )


def _check_layer(layer: int, ranks: tuple[Slots, ...], num_experts: int) -> None:
    placed: set[int] = set()
    for rank, slots in enumerate(ranks):
        distinct = {expert for expert in slots if expert is not None}
        once = slots.count(None) + len(distinct) == len(slots)
        if once and (not distinct or (min(distinct) >= 0 and max(distinct) < num_experts)):
            placed |= distinct  # the usual case; what follows finds the words for the others
            continue
        counts = Counter(expert for expert in slots if expert is not None)
        for expert, count in counts.items():
            if not 0 <= expert < num_experts:
                raise PlacementError(
                    f"layer {layer}, rank {rank}: expert {expert} is not in [0, {num_experts})"
                )
            if count > 1:
                raise PlacementError(
                    f"layer {layer}, rank {rank}: holds expert {expert} {count} times, "
                    "must be once at most"
                )
        placed |= counts.keys()
    if len(placed) < num_experts:
        missing = next(expert for expert in range(num_experts) if expert not in placed)
        raise PlacementError(
            f"layer {layer}: no rank holds expert {missing} "
            f"({num_experts - len(placed)} of {num_experts} are missing)"
        )


def _parse_layers(layers: Any) -> dict[int, tuple[Slots, ...]]:
    if not isinstance(layers, dict):
        raise PlacementError("layers: must be an object of layer index to one list per rank")
    return {_parse_index(key): _parse_ranks(key, ranks) for key, ranks in layers.items()}


def _parse_index(key: str) -> int:
    if not re.fullmatch("0|[1-9][0-9]{0,8}", key):
        raise PlacementError(f"layers: {key[:40]!r} must be a layer index such as '0'")
    return int(key)


def _parse_ranks(layer: str, ranks: Any) -> tuple[Slots, ...]:
    if not isinstance(ranks, list) or not all(isinstance(slots, list) for slots in ranks):
        raise PlacementError(f"layer {layer}: must be a list with one list of slots per rank")
    for rank, slots in enumerate(ranks):
        for slot in slots:
            if slot is not None and not _is_id(slot):
                raise PlacementError(
                    f"layer {layer}, rank {rank}: {str(slot)[:40]!r} must be an expert id or null"
                )
    return tuple(tuple(slots) for slots in ranks)


def _is_id(value: Any) -> TypeGuard[int]:
    """Whether it is an integer of 64 bits: longer ones would only make long errors."""
    return _is_int(value) and -(1 << 63) <= value < 1 << 63


def _is_int(value: Any) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool)
