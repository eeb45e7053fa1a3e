"""SGLang's ``--init-expert-location`` JSON: a placement or counts to plan one from.

``{"physical_to_logical_map": [[...], ...]}`` gives the logical expert of each slot by layer, rank
by rank; ``{"logical_count": [[...], ...]}`` the tokens per expert by layer, or by step and layer.
Layers are all layers of the model, in order.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

from moeserve_placement.placement import Placement
from moeserve_placement.text_files import MAX_TEXT_BYTES
from moeserve_placement.traces.files import parse_json, read_text, reading, write_text
from moeserve_placement.traces.json_form import to_array
from moeserve_placement.traces.options import ReadOptions
from moeserve_placement.traces.sglang import all_layers, counts_trace
from moeserve_placement.traces.slots import flat_slots, parse_slot_list, placement_of
from moeserve_placement.traces.trace import CountTrace, TraceError

MAP = "physical_to_logical_map"
COUNT = "logical_count"
_BYTES_PER_NUMBER = 3  # of text, at least: a digit, a comma and a space


def read_sglang_location(path: Path, options: ReadOptions | None = None) -> Placement | CountTrace:
    """The placement or counts of an initial-location JSON.

    Options: num_ranks (needed for a placement), num_experts, first_layer.

    Raises:
        TraceError: damaged, neither of the two keys, or num_ranks is not known.
    """
    text = read_text(path)
    with reading(path):
        return parse_sglang_location(parse_json(text, what="location"), options or ReadOptions())


def is_location(document: Any) -> bool:
    """Whether a JSON value has one of the two keys."""
    return isinstance(document, dict) and (MAP in document or COUNT in document)


def parse_sglang_location(document: Any, options: ReadOptions) -> Placement | CountTrace:
    """The placement or counts of a parsed document; see ``read_sglang_location``."""
    if not is_location(document):
        raise TraceError(f"has neither {MAP} nor {COUNT}: not an initial location of SGLang")
    if COUNT in document:
        counts = to_array(COUNT, document[COUNT], np.int64)
        return counts_trace(counts, options, mode="location")
    rows = document[MAP]
    if not isinstance(rows, list):
        raise TraceError(f"{MAP}: must be a list with one list of slots per layer")
    if options.num_ranks is None:
        raise TraceError(f"num_ranks: a {MAP} does not say it, give it")
    layers = {
        layer: parse_slot_list(f"{MAP}, layer {layer}", row)
        for layer, row in enumerate(rows, start=options.first_layer)
    }
    return placement_of(layers, options.num_ranks, num_experts=options.num_experts)


def write_sglang_location(path: Path, data: Placement | CountTrace) -> tuple[str, ...]:
    """Writes the JSON; says what is lost. Layers the data does not name get experts in id order.

    Raises:
        TraceError: ranks with different numbers of slots, slots that can not hold all experts, or a
            text that would be too long to be read again.
    """
    if isinstance(data, CountTrace):
        row_bytes = _BYTES_PER_NUMBER * data.num_windows * data.num_experts
        num_layers = all_layers(data.layer_ids, row_bytes, max_bytes=MAX_TEXT_BYTES)
        counts = np.zeros((data.num_windows, num_layers, data.num_experts), dtype=np.int64)
        counts[:, list(data.layer_ids)] = data.counts
        windows = ",\n ".join(json.dumps(window.tolist()) for window in counts)
        write_text(path, f'{{"{COUNT}": [{windows}]}}\n')
        lost = ["metadata"] if data.metadata else []
        return (*lost, *(["tokens_per_window"] if data.tokens_per_window is not None else []))
    num_slots = data.num_ranks * data.max_slots
    row_bytes = _BYTES_PER_NUMBER * num_slots
    num_layers = all_layers(data.layers, row_bytes, max_bytes=MAX_TEXT_BYTES)
    trivial = [slot % data.num_experts for slot in range(num_slots)]
    rows = [
        flat_slots(data, layer) if layer in data.layers else trivial for layer in range(num_layers)
    ]
    write_text(path, json.dumps({MAP: rows}) + "\n")
    lost = [f"num_ranks = {data.num_ranks}: goes into the engine's own options"]
    if len(rows) != len(data.layers):
        lost.append("which layers are named: the others are written with experts in id order")
    return tuple(lost)
