"""TensorRT-LLM's load-balancer YAML: a placement.

::

    num_slots: 8
    initial_global_assignments:
      3: [0, 1, 2, 3, 4, 5, 0, 1]
    layer_updates_per_iter: 0

``initial_global_assignments`` maps the model layer index to the logical expert of each of the
num_slots slots, rank by rank. The number of ranks (the expert-parallel size) is not in the file
unless it has ``ep_size``, as some versions of the example scripts write. The three keys may also
stand under ``moe_config: load_balancer:``, as in the options of the engine.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from moeserve_placement.placement import Placement
from moeserve_placement.traces.files import one_line, read_text, reading, write_text
from moeserve_placement.traces.options import ReadOptions
from moeserve_placement.traces.slots import flat_slots, parse_slot_list, placement_of
from moeserve_placement.traces.trace import MAX_LAYER, TraceError

ASSIGNMENTS = "initial_global_assignments"

_MISSING = "needs PyYAML, which is not installed: pip install 'moeserve[traces]'"
_MERGE = "tag:yaml.org,2002:merge"
_MAX_YAML_BYTES = 16 << 20
"""PyYAML needs about 1 microsecond and 100 bytes of memory for each byte of text."""


def read_tensorrt_llm(path: Path, options: ReadOptions | None = None) -> Placement:
    """The placement of a TensorRT-LLM YAML file.

    Options: num_ranks, unless the file has ep_size; num_experts (else the highest id plus one). A
    repeat of an expert on one rank becomes a free slot.

    Raises:
        TraceError: PyYAML is missing, the file is damaged, num_ranks is not known, or the
            assignments are not a valid placement.
    """
    options = options or ReadOptions()
    text = read_text(path, max_bytes=_MAX_YAML_BYTES)
    with reading(path):
        return parse_tensorrt_llm(text, options)


def parse_tensorrt_llm(text: str, options: ReadOptions) -> Placement:
    """The placement of YAML text; see ``read_tensorrt_llm``."""
    config = _config(_load_yaml(text))
    assignments = config[ASSIGNMENTS]
    if not isinstance(assignments, dict) or not assignments:
        raise TraceError(f"{ASSIGNMENTS}: must map a layer index to a list of slots")
    layers = {}
    for layer, slots in assignments.items():
        if type(layer) is not int or not 0 <= layer <= MAX_LAYER:
            raise TraceError(f"{ASSIGNMENTS}: {str(layer)[:40]!r} is not a model layer index")
        layers[layer] = parse_slot_list(f"layer {layer}", slots)
        if len(layers[layer]) != config.get("num_slots"):
            raise TraceError(
                f"layer {layer}: has {len(layers[layer])} slots, but num_slots = "
                f"{str(config.get('num_slots'))[:20]}"
            )
    num_ranks = config.get("ep_size") if options.num_ranks is None else options.num_ranks
    if type(num_ranks) is not int:
        raise TraceError("num_ranks: TensorRT-LLM's file does not say it, give it")
    return placement_of(layers, num_ranks, num_experts=options.num_experts)


def write_tensorrt_llm(path: Path, placement: Placement) -> tuple[str, ...]:
    """Writes the YAML, without needing PyYAML; says what is lost.

    Raises:
        TraceError: ranks with different numbers of slots, or a rank without any expert.
    """
    write_text(path, dump_tensorrt_llm(placement))
    lost = [f"num_ranks = {placement.num_ranks}: goes into the engine's own options"]
    if any(None in slots for ranks in placement.layers.values() for slots in ranks):
        lost.append("free slots: filled with a repeat of an expert of the same rank")
    return tuple(lost)


def dump_tensorrt_llm(placement: Placement) -> str:
    """The YAML text; ``layer_updates_per_iter`` is 0, a placement that stays."""
    layers = [
        f"  {layer}: [{', '.join(map(str, flat_slots(placement, layer)))}]"
        for layer in sorted(placement.layers)
    ]
    num_slots = placement.num_ranks * placement.max_slots
    head = f"num_slots: {num_slots}\n{ASSIGNMENTS}:\n"
    return head + "\n".join(layers) + "\nlayer_updates_per_iter: 0\n"


def _config(document: Any) -> dict[str, Any]:
    """The object that has the assignments: the document itself or one nested in it."""
    for keys in ((), ("moe_config", "load_balancer"), ("moe_load_balancer",), ("load_balancer",)):
        value = document
        for key in keys:
            value = value.get(key) if isinstance(value, dict) else None
        if isinstance(value, dict) and ASSIGNMENTS in value:
            return value
    raise TraceError(f"has no {ASSIGNMENTS}: not a TensorRT-LLM load-balancer file")


def _load_yaml(text: str) -> Any:
    try:
        import yaml  # type: ignore[import-untyped, unused-ignore]
    except ImportError as error:
        raise TraceError(f"a YAML file {_MISSING}") from error

    class Loader(yaml.SafeLoader):  # type: ignore[misc, unused-ignore]
        """SafeLoader that takes no key twice and no aliases."""

        def compose_node(self, parent: Any, index: Any) -> Any:
            # Aliases let a small text stand for a giant document.
            if self.check_event(yaml.AliasEvent):
                raise TraceError("YAML: aliases (*name) are not accepted")
            return super().compose_node(parent, index)

        def construct_mapping(self, node: Any, deep: bool = False) -> Any:
            seen: set[str] = set()
            for key, _ in node.value:
                if isinstance(key, yaml.ScalarNode) and key.value in seen:
                    raise TraceError(f"YAML: key {key.value[:40]!r} comes twice")
                seen.add(str(key.value))
            num_keys = sum(key.tag != _MERGE for key, _ in node.value)
            found = super().construct_mapping(node, deep)
            if len(found) < num_keys:  # as 1 and 0x1 do
                raise TraceError("YAML: two keys of a mapping have the same value")
            return found

    try:
        return yaml.load(text, Loader=Loader)
    except TraceError:
        raise
    except Exception as error:
        # PyYAML lets errors of its constructors through: ValueError, KeyError, AttributeError ...
        raise TraceError(f"not valid YAML: {one_line(error)}") from error
