"""What the ranks are going to be, from settings and ``config.json`` alone.

Without torch and in milliseconds, so that whoever starts ranks can refuse a wrong setting before
any process is started; each rank then makes the same setup for itself.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import msgspec

from moeserve import config
from moeserve.model.spec import ModelSpec, read_spec
from moeserve_placement import Placement

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, slots=True)
class Setup:
    """What the ranks are going to be.

    folder: of the checkpoint; dtype: that of the computation; max_model_len: longest prompt plus
    output, in tokens; eos_token_ids: what ends a sequence.
    """

    spec: ModelSpec
    folder: Path
    dtype: Literal["float32", "bfloat16"]
    placement: Placement
    max_model_len: int
    eos_token_ids: tuple[int, ...]


def make_setup(serve_config: config.ServeConfig) -> Setup:
    """Reads the checkpoint's config and checks the settings against it.

    Raises:
        ValueError: a setting does not suit the model; the text names it and what would be right.
    """
    folder = config.resolve_model_path(serve_config.model.model)
    spec = read_spec(folder)
    limit = spec.max_position_embeddings
    asked = serve_config.model.max_model_len
    if asked is not None and asked > limit:
        raise ValueError(f"max_model_len = {asked}: the model's positions end at {limit}")
    return Setup(
        spec=spec,
        folder=folder,
        dtype=_dtype(serve_config.model.dtype, spec),
        placement=with_spare_slots(
            _placement(serve_config, spec), serve_config.experts.num_redundant_experts
        ),
        max_model_len=asked or limit,
        eos_token_ids=_eos_token_ids(folder, spec),
    )


def _dtype(asked: str, spec: ModelSpec) -> Literal["float32", "bfloat16"]:
    name = spec.dtype if asked == "auto" else asked
    return "float32" if name == "float32" else "bfloat16"  # float16 has no CPU kernels worth it


def _placement(serve_config: config.ServeConfig, spec: ModelSpec) -> Placement:
    name, num_ranks = serve_config.experts.placement, serve_config.parallel.ep
    if num_ranks > spec.num_experts:
        most = spec.num_experts
        raise ValueError(f"ep = {num_ranks}: must be at most {most}, the number of experts")
    if name in ("linear", "round_robin"):
        return Placement.from_strategy(name, spec.num_experts, num_ranks, spec.moe_layers)
    placement, missing = Placement.load(Path(name)).completed(spec.moe_layers, spec.num_experts)
    if placement.num_ranks != num_ranks:
        raise ValueError(
            f"placement = {name}: is for {placement.num_ranks} ranks, but ep = {num_ranks}"
        )
    if missing:
        logger.warning("placement %s lacks layers %s: they are placed linearly", name, missing)
    return placement


def with_spare_slots(placement: Placement, num_spare: int) -> Placement:
    """The placement with ``num_spare`` more free slots in each layer, spread over the ranks.

    Where they do not divide, ranks that have fewer slots get one more, the first ones on a tie.
    """
    if not num_spare:
        return placement
    layers = {}
    for layer, ranks in placement.layers.items():
        sizes = [len(slots) for slots in ranks]
        for _ in range(num_spare):
            sizes[sizes.index(min(sizes))] += 1
        layers[layer] = tuple(
            (*slots, *([None] * (size - len(slots))))
            for slots, size in zip(ranks, sizes, strict=True)
        )
    return Placement(num_experts=placement.num_experts, layers=layers)


class _GenerationConfig(msgspec.Struct):
    eos_token_id: int | list[int] | None = None


def _eos_token_ids(folder: Path, spec: ModelSpec) -> tuple[int, ...]:
    """The config's, and those of ``generation_config.json`` (chat models often have more there)."""
    path = folder / "generation_config.json"
    if not path.is_file():
        return spec.eos_token_ids
    try:
        more = msgspec.json.decode(path.read_bytes(), type=_GenerationConfig).eos_token_id
    except (msgspec.DecodeError, RecursionError) as error:
        raise ValueError(f"{path}: {error}") from error
    listed = more if isinstance(more, list) else [] if more is None else [more]
    for token_id in listed:
        if not 0 <= token_id < spec.vocab_size:
            raise ValueError(
                f"{path}: eos_token_id = {token_id}: must be in [0, {spec.vocab_size})"
            )
    return tuple(dict.fromkeys((*spec.eos_token_ids, *listed)))
