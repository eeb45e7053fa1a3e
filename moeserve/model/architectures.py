"""The architectures that have a native decoder. To add one: a file with its data, a line here."""

from __future__ import annotations

from moeserve.model.architecture import Architecture
from moeserve.model.mixtral import MIXTRAL
from moeserve.model.olmoe import OLMOE
from moeserve.model.qwen2_moe import QWEN2_MOE
from moeserve.model.qwen3_moe import QWEN3_MOE

ARCHITECTURES = {entry.name: entry for entry in (QWEN3_MOE, QWEN2_MOE, MIXTRAL, OLMOE)}


def find(names: object, model_type: object) -> Architecture:
    """The architecture that a config's ``architectures`` and ``model_type`` ask for.

    Raises:
        ValueError: there is no such architecture; the text lists those that there are.
    """
    for entry in ARCHITECTURES.values():
        if names == [entry.name] or (not names and entry.model_type == model_type):
            return entry
    raise ValueError(
        f"architectures = {str(names)[:80]}, model_type = {str(model_type)[:80]}: must be one of "
        f"{', '.join(ARCHITECTURES)}; code that comes with a checkpoint is never run"
    )
