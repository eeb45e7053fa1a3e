"""How positions turn into rotations, as a ``config.json`` says it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from moeserve.model.config_fields import ConfigFields

RopeType = Literal["default", "linear", "llama3", "yarn"]
ROPE_TYPES: tuple[RopeType, ...] = ("default", "linear", "llama3", "yarn")


@dataclass(frozen=True, kw_only=True, slots=True)
class RopeSpec:
    """Rotary embedding. Field names are those of transformers' ``rope_parameters``.

    ``factor`` belongs to all types but default; ``low_freq_factor`` and ``high_freq_factor`` to
    llama3; the betas, ``attention_factor`` and ``truncate`` to yarn.
    """

    rope_type: RopeType = "default"
    rope_theta: float = 10000.0
    factor: float = 1.0
    original_max_position_embeddings: int = 0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float | None = None
    mscale: float | None = None
    mscale_all_dim: float | None = None
    truncate: bool = True


def read_rope(fields: ConfigFields, default_theta: float) -> RopeSpec:
    """The rotary embedding, from ``rope_parameters`` or ``rope_scaling`` and ``rope_theta``.

    Raises:
        ValueError: an unknown type, or a field that is missing or out of range.
    """
    nested = fields.section("rope_parameters") or fields.section("rope_scaling") or ConfigFields({})
    theta = nested.number("rope_theta", default=None)
    if theta is None:
        theta = fields.number("rope_theta", default=default_theta)
    for section in (fields, nested):
        if section.number("partial_rotary_factor", default=1.0) != 1.0:
            raise ValueError("partial_rotary_factor: must be 1, parts of heads are not rotated")
    rope_type = nested.one_of("rope_type", ROPE_TYPES, "type", default="default")
    if rope_type == "default":
        return RopeSpec(rope_theta=theta)
    factor = nested.number("factor")
    if rope_type == "linear":
        return RopeSpec(rope_type=rope_type, rope_theta=theta, factor=factor)
    original = nested.integer(
        "original_max_position_embeddings", default=fields.integer("max_position_embeddings")
    )
    if rope_type == "llama3":
        return RopeSpec(
            rope_type=rope_type,
            rope_theta=theta,
            factor=factor,
            original_max_position_embeddings=original,
            low_freq_factor=nested.number("low_freq_factor"),
            high_freq_factor=nested.number("high_freq_factor"),
        )
    return RopeSpec(
        rope_type=rope_type,
        rope_theta=theta,
        factor=factor,
        original_max_position_embeddings=original,
        beta_fast=nested.number("beta_fast", default=32.0),
        beta_slow=nested.number("beta_slow", default=1.0),
        attention_factor=nested.number("attention_factor", default=None),
        mscale=nested.number("mscale", default=None),
        mscale_all_dim=nested.number("mscale_all_dim", default=None),
        truncate=nested.flag("truncate", default=True),
    )
