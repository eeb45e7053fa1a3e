"""From a checkpoint folder to weights: checked as a whole first, then read piece by piece.

A rank reads all dense tensors and its own experts, one expert at a time; it never holds more than
its own experts plus one. ``load_format`` dummy makes random weights of the same shapes.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Protocol

import torch

from moeserve.model.architecture import ExpertNames
from moeserve.model.architectures import ARCHITECTURES
from moeserve.model.checkpoint import CheckpointError, TensorEntry, open_checkpoint, read_tensor
from moeserve.model.decoder_weights import read_weights
from moeserve.model.spec import ModelSpec
from moeserve.model.weights import (
    Manifest,
    Shape,
    WeightSource,
    expert_requirements,
    moe_block,
)

_FLOATS = (torch.float32, torch.bfloat16, torch.float16)
_SHOWN = 5  # problems of a kind that an error lists in full
_DUMMY_STD = 0.02


class ExpertSource(WeightSource, Protocol):
    """A source of dense tensors that also hands out experts, one by one."""

    def expert(self, layer: int, expert: int) -> tuple[torch.Tensor, torch.Tensor]:
        """One expert in the compute dtype: w13 [2I, H] (gate rows first) and w2 [H, I]."""
        ...


class CheckpointSource:
    """The tensors of a safetensors checkpoint that was found to fit the spec."""

    def __init__(
        self,
        entries: Mapping[str, TensorEntry],
        names: ExpertNames,
        dtype: torch.dtype,
    ) -> None:
        self._entries = entries
        self._names = names
        self._dtype = dtype

    def take(self, name: str, shape: Shape) -> torch.Tensor:
        """See ``WeightSource``."""
        return read_tensor(self._entries[name], name, dtype=self._dtype)

    def has(self, name: str) -> bool:
        """See ``WeightSource``."""
        return name in self._entries

    def expert(self, layer: int, expert: int) -> tuple[torch.Tensor, torch.Tensor]:
        """See ``ExpertSource``; of a fused tensor only this expert's part is read."""
        prefix = f"{moe_block(self, self._names, layer)}experts."
        if self.has(f"{prefix}gate_up_proj"):
            return self._part(f"{prefix}gate_up_proj", expert), self._part(
                f"{prefix}down_proj", expert
            )
        gate, up, down = (
            self._part(f"{prefix}{expert}.{name}.weight")
            for name in (self._names.gate, self._names.up, self._names.down)
        )
        return torch.cat((gate, up)), down

    def _part(self, name: str, index: int | None = None) -> torch.Tensor:
        return read_tensor(self._entries[name], name, index, dtype=self._dtype)


class DummySource:
    """Random weights. A tensor depends on the seed and its name alone, not on who asks or when."""

    def __init__(self, spec: ModelSpec, dtype: torch.dtype, seed: int) -> None:
        self._spec = spec
        self._dtype = dtype
        self._seed = seed

    def take(self, name: str, shape: Shape) -> torch.Tensor:
        """Ones for a norm, else normally distributed with standard deviation 0.02."""
        if name.endswith("norm.weight"):
            return torch.ones(shape, dtype=self._dtype)
        # 32 bits: the CPU generator ignores those above
        generator = torch.Generator().manual_seed(zlib.crc32(f"{self._seed}/{name}".encode()))
        return torch.empty(shape).normal_(0.0, _DUMMY_STD, generator=generator).to(self._dtype)

    def has(self, name: str) -> bool:
        """No: there is no checkpoint."""
        return False

    def expert(self, layer: int, expert: int) -> tuple[torch.Tensor, torch.Tensor]:
        """See ``ExpertSource``."""
        hidden, size = self._spec.hidden_size, self._spec.moe_intermediate_size
        prefix = f"layers.{layer}.experts.{expert}"
        return (
            self.take(f"{prefix}.w13", (2 * size, hidden)),
            self.take(f"{prefix}.w2", (hidden, size)),
        )


def open_weights(
    folder: Path,
    spec: ModelSpec,
    dtype: torch.dtype,
    *,
    load_format: str = "auto",
    seed: int = 0,
) -> ExpertSource:
    """The weights of the model that ``spec`` describes, in ``dtype`` (float32 or bfloat16).

    Args:
        load_format: ``auto`` or ``safetensors`` read ``folder``, ``dummy`` does not touch it.
        seed: of dummy weights.

    Raises:
        CheckpointError: the checkpoint can not be read, or tensors are missing, left over, or of
            the wrong shape or dtype: all of them, in one error, before anything is loaded.
        ValueError: no such load_format.
    """
    if load_format == "dummy":
        return DummySource(spec, dtype, seed)
    if load_format not in ("auto", "safetensors"):
        raise ValueError(f"load_format = {load_format!r}: must be auto, safetensors or dummy")
    entries = open_checkpoint(folder)
    required = required_tensors(spec, entries)
    problems = [*_compare(required, entries, spec)]
    if problems:
        raise CheckpointError(f"{folder} does not fit its config.json: " + "; ".join(problems))
    return CheckpointSource(entries, ARCHITECTURES[spec.architecture].expert_names, dtype)


def load_experts(
    source: ExpertSource,
    slots: Mapping[int, Sequence[int | None]],
    load: Callable[[int, int, torch.Tensor, torch.Tensor], None],
) -> None:
    """Fills a rank's slots, one expert at a time.

    Args:
        source: of ``open_weights``.
        slots: model layer index -> expert of each slot, None for a free one.
        load: takes layer, slot, w13 [2I, H] and w2 [H, I] and keeps a copy.
    """
    for layer, experts in slots.items():
        for slot, expert in enumerate(experts):
            if expert is not None:
                load(layer, slot, *source.expert(layer, expert))


def required_tensors(spec: ModelSpec, present: Iterable[str] = ()) -> dict[str, Shape]:
    """Shape by name of every tensor that a checkpoint of ``spec`` must hold.

    ``present`` are the names that a checkpoint has: where two layouts are possible, they decide.
    """
    manifest = Manifest(frozenset(present))
    read_weights(spec, manifest)
    names = ARCHITECTURES[spec.architecture].expert_names
    return manifest.required | expert_requirements(manifest, spec, names)


def _compare(
    required: Mapping[str, Shape], entries: Mapping[str, TensorEntry], spec: ModelSpec
) -> Iterable[str]:
    yield from _listed("missing", [name for name in required if name not in entries])
    yield from _listed("left over", [n for n in entries if n not in required and _counts(n, spec)])
    both = [name for name in required if name in entries]
    yield from _listed(
        "of the wrong shape",
        [
            f"{name} has {list(entries[name].shape)}, must be {list(required[name])}"
            for name in both
            if entries[name].shape != required[name]
        ],
    )
    yield from _listed(
        "of the wrong dtype",
        [
            f"{name} is {entries[name].dtype}, must be float32, bfloat16 or float16"
            for name in both
            if entries[name].dtype not in _FLOATS
        ],
    )


def _counts(name: str, spec: ModelSpec) -> bool:
    """Whether a tensor that nobody asked for is a sign of a wrong config."""
    if name.endswith(".rotary_emb.inv_freq"):
        return False  # a table that old versions of transformers saved along
    return not (name == "lm_head.weight" and spec.tie_word_embeddings)


def _listed(what: str, items: list[str]) -> Iterable[str]:
    if items:
        more = f" and {len(items) - _SHOWN} more" if len(items) > _SHOWN else ""
        yield f"{len(items)} tensors {what}: {', '.join(items[:_SHOWN])}{more}"
