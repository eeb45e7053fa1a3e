"""Plan files: a plan as JSON, with the machine and the load it was made for.

The object has "format": "moeserve-plan", "version": 1 and
- planner, reason, split: as in ``Plan``;
- topology: slots_per_rank, node_of_rank, speed_of_rank, alive, bytes_per_expert;
- placement and current: placement objects (see ``placement.py``), current is null for a cold start;
- moves: in order, each {"layer", "gain", "writes": [{"rank", "slot", "expert", "replaces",
  "source_rank", "link", "num_bytes"}]};
- load: the tokens per expert that it was planned for, [num_layers][num_experts], layers in
  ascending order, any scale;
- before, after: {"imbalance", "worst_imbalance"} means over layers, or null.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from moeserve_placement.placement import Placement, PlacementError
from moeserve_placement.plan import Forecast, Move, Plan, SlotWrite, apply_moves
from moeserve_placement.slot_table import Floats, slot_table
from moeserve_placement.topology import Topology
from moeserve_placement.traces.files import parse_json, read_text, reading, write_text

FORMAT = "moeserve-plan"
VERSION = 1
_TOPOLOGY = ("slots_per_rank", "node_of_rank", "speed_of_rank", "alive", "bytes_per_expert")
_WRITE = {
    "rank": int,
    "slot": int,
    "expert": (int, type(None)),
    "replaces": (int, type(None)),
    "source_rank": (int, type(None)),
    "link": str,
    "num_bytes": int,
}


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PlanFile:
    """A plan with what it was made for.

    load: tokens per expert, float64 [num_layers, num_experts], in the order of ``layer_ids``.
    before, after: mean imbalance that the planner forecast, None where it did not.
    """

    planner: str
    reason: str
    split: str
    topology: Topology
    placement: Placement
    current: Placement | None
    moves: tuple[Move, ...]
    load: Floats
    before: float | None
    after: float | None

    @classmethod
    def of(cls, plan: Plan, topology: Topology, load: Floats) -> PlanFile:
        """The file's content for a plan. load: [num_layers, num_experts] as in plan.layer_ids."""
        return cls(
            planner=plan.planner,
            reason=plan.reason,
            split=plan.split,
            topology=topology,
            placement=plan.placement,
            current=plan.current,
            moves=plan.moves,
            load=load[np.argsort(plan.layer_ids)],
            before=_mean(plan.before),
            after=_mean(plan.after),
        )

    @property
    def layer_ids(self) -> tuple[int, ...]:
        """Model layer indices in ascending order, whatever the order of the history was."""
        return tuple(sorted(self.placement.layers))


def save_plan(path: Path, plan: PlanFile) -> None:
    """Writes the JSON file, one line per move and per layer.

    Raises:
        TraceError: it can not be written.
    """
    head = {
        "format": FORMAT,
        "version": VERSION,
        "planner": plan.planner,
        "reason": plan.reason,
        "split": plan.split,
        "before": plan.before,
        "after": plan.after,
        "topology": {name: getattr(plan.topology, name) for name in _TOPOLOGY},
    }
    lines = [f"  {json.dumps(key)}: {json.dumps(value)}" for key, value in head.items()]
    for key, value in (("current", plan.current), ("placement", plan.placement)):
        text = "null" if value is None else value.to_json().strip().replace("\n", "\n  ")
        lines.append(f'  "{key}": {text}')
    lines.append(_rows("moves", [_move_dict(move) for move in plan.moves]))
    lines.append(_rows("load", plan.load.tolist()))
    write_text(path, "{\n" + ",\n".join(lines) + "\n}\n")


def load_plan(path: Path) -> PlanFile:
    """Reads a file that ``save_plan`` wrote and checks that its moves lead to its placement.

    Raises:
        TraceError: it can not be read or is not a valid plan; the text names the file.
    """
    text = read_text(path)
    with reading(path):
        data = parse_json(text, what="plan")
        if not isinstance(data, dict) or data.get("format") != FORMAT:
            raise PlacementError(f'is not a plan: must be a JSON object with "format": "{FORMAT}"')
        if data.get("version") != VERSION:
            raise PlacementError(f"version = {data.get('version')!r}: must be {VERSION}")
        return _parsed(data)


def _mean(forecast: Forecast | None) -> float | None:
    return None if forecast is None else forecast.mean


def _rows(name: str, rows: list[Any]) -> str:
    inner = ",\n".join(f"    {json.dumps(row)}" for row in rows)
    return f'  "{name}": [\n{inner}\n  ]' if rows else f'  "{name}": []'


def _move_dict(move: Move) -> dict[str, Any]:
    return {
        "layer": move.layer,
        "gain": move.gain,
        "writes": [asdict(write) for write in move.writes],
    }


def _parsed(data: Mapping[str, Any]) -> PlanFile:
    placement = Placement.from_json(json.dumps(_field(data, "placement", dict)))
    now = data.get("current")
    current = None if now is None else Placement.from_json(json.dumps(now))
    topology = _topology(_field(data, "topology", dict))
    plan = PlanFile(
        planner=_field(data, "planner", str),
        reason=_field(data, "reason", str),
        split=_field(data, "split", str),
        topology=topology,
        placement=placement,
        current=current,
        moves=tuple(_move(move) for move in _field(data, "moves", list)),
        load=_load(data, (len(placement.layers), placement.num_experts)),
        before=_number(data, "before"),
        after=_number(data, "after"),
    )
    _check_moves(plan)
    return plan


def _check_moves(plan: PlanFile) -> None:
    """The moves must be possible and lead from ``current`` to ``placement``."""
    slot_table(plan.placement, plan.layer_ids, topology=plan.topology)
    if plan.current is None:
        if plan.moves:
            raise PlacementError("moves: a plan without a current placement can have none")
        return
    for write in (write for move in plan.moves for write in move.writes):
        if not 0 <= write.rank < plan.topology.num_ranks:
            raise PlacementError(f"moves: rank {write.rank} is not in the topology")
        if not 0 <= write.slot < plan.topology.slots_per_rank[write.rank]:
            raise PlacementError(f"moves: rank {write.rank} has no slot {write.slot}")
    done = apply_moves(plan.current, plan.moves)
    reached = slot_table(done, plan.layer_ids, topology=plan.topology)
    if not np.array_equal(
        reached, slot_table(plan.placement, plan.layer_ids, topology=plan.topology)
    ):
        raise PlacementError("moves: they do not lead from the current placement to the new one")


def _topology(data: Mapping[str, Any]) -> Topology:
    lists: dict[str, Any] = {name: tuple(_field(data, name, list)) for name in _TOPOLOGY[:-1]}
    kinds: dict[str, Any] = {"speed_of_rank": (int, float), "alive": bool}
    for name, values in lists.items():
        kind = kinds.get(name, int)
        if not all(isinstance(v, kind) and (kind is bool or _is_number(v)) for v in values):
            raise PlacementError(f"topology: {name} holds a value of a wrong type")
    return Topology(**lists, bytes_per_expert=_field(data, "bytes_per_expert", int))


def _move(data: Any) -> Move:
    if not isinstance(data, dict):
        raise PlacementError("moves: must be objects")
    writes = tuple(_write(write) for write in _field(data, "writes", list))
    return Move(layer=_field(data, "layer", int), writes=writes, gain=_number(data, "gain"))


def _write(data: Any) -> SlotWrite:
    if not isinstance(data, dict):
        raise PlacementError("moves: writes must be objects")
    return SlotWrite(**{name: _field(data, name, kind) for name, kind in _WRITE.items()})


def _load(data: Mapping[str, Any], shape: tuple[int, int]) -> Floats:
    rows = _field(data, "load", list)
    fits = len(rows) == shape[0] and all(isinstance(r, list) and len(r) == shape[1] for r in rows)
    if not fits or not all(_is_number(value) for row in rows for value in row):
        raise PlacementError(f"load: must be numbers, {shape[0]} layers of {shape[1]} experts")
    load = np.array(rows, dtype=np.float64).reshape(shape)
    if not np.isfinite(load).all() or (load < 0).any():
        raise PlacementError("load: must be finite and 0 or more")
    return load


def _field(data: Mapping[str, Any], name: str, kind: Any) -> Any:
    value = data.get(name)
    if name not in data or not isinstance(value, kind) or (isinstance(value, bool)):
        raise PlacementError(f"{name} = {str(value)[:40]}: is missing or of a wrong type")
    return value


def _number(data: Mapping[str, Any], name: str) -> float | None:
    value = data.get(name)
    if value is None:
        return None
    if not _is_number(value) or not np.isfinite(value):
        raise PlacementError(f"{name} = {str(value)[:40]}: must be a finite number or null")
    return float(value)


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)
