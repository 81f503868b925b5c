"""RopeConfig: the parameters of rotary position embeddings.  Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from model_zoo.json_fields import Fields

RopeKind = Literal["default", "linear", "dynamic", "yarn", "llama3"]
KINDS: tuple[RopeKind, ...] = ("default", "linear", "dynamic", "yarn", "llama3")


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """Values of the fields that `kind` uses; the others keep their defaults."""

    kind: RopeKind = "default"
    theta: float = 10_000.0
    factor: float = 1.0  # context length over the original one
    original_max_position: int = 0
    low_freq_factor: float = 1.0  # llama3
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0  # yarn
    beta_slow: float = 1.0
    truncate: bool = True
    attention_factor: float | None = None  # None: derived from factor and the two below
    mscale: float | None = None
    mscale_all_dim: float | None = None
    # Of positions that are triples (M-RoPE), the frequencies that turn by each of the three,
    # interleaved; (): positions are single numbers.
    sections: tuple[int, ...] = ()
    partial: float = 1.0  # the share of a head's values, from the first on, that is rotated


def read_rope(
    fields: Fields, max_position: int, *, theta: float = 10_000.0, partial: float | None = None
) -> tuple[RopeConfig, int]:
    """The rope of a config.json, and the number of positions that it supports.

    Reads both forms: `rope_scaling` and `rope_theta`, and `rope_parameters` with both in it.
    linear and yarn extend the context by their factor.  dynamic is the identity up to
    `max_position_embeddings`; beyond, its frequencies depend on the sequence length, and keys that
    are already in the KV cache (and shared between requests) would have stale rotations: such a
    model is served up to `max_position_embeddings`, where it is exact.
    theta, partial: where the fields say none; partial None: the architecture rotates all of a head
    Raises ModelError, naming the field.
    """
    name = "rope_parameters" if fields.get("rope_parameters") else "rope_scaling"
    rope = fields.nested(name)
    if any(isinstance(value, dict) for value in rope.values.values()):
        raise fields.error(name, rope.values, "one rope for all layers is supported")
    config, length = _read(fields, rope, fields.number("rope_theta", theta), max_position)
    return replace(config, partial=_partial(fields, rope, partial)), length


def read_sections(fields: Fields, half: int, default: tuple[int, int, int]) -> tuple[int, int, int]:
    """RopeConfig.sections.  half: the frequencies of a rotated head; default: where no field says.

    Raises ModelError, naming the field.
    """
    name = "rope_parameters" if fields.get("rope_parameters") else "rope_scaling"
    rope = fields.nested(name)
    if not rope.flag("mrope_interleaved", True):
        raise rope.error("mrope_interleaved", False, "only true is supported")
    value = rope.get("mrope_section")
    sections = list(default) if value is None else value
    if (
        not isinstance(sections, list)
        or len(sections) != 3
        or not all(type(count) is int and count >= 0 for count in sections)
        or sum(sections) != half
    ):
        expected = f"three numbers are expected whose sum is {half}, half of what rope rotates"
        raise rope.error("mrope_section", value, expected)
    return sections[0], sections[1], sections[2]


def read_layer_ropes(
    fields: Fields, max_position: int, *, theta: float, local_theta: float
) -> tuple[RopeConfig, RopeConfig]:
    """The ropes of the layers without a window and of those with one.

    Reads both forms: `rope_parameters` with an object for each of the two, and `rope_theta`,
    `rope_local_base_freq` and `rope_scaling`, which is of the layers without a window alone.
    theta, local_theta: where the fields say none.  Raises ModelError, naming the field.
    """
    theta = fields.number("rope_theta", theta)
    local_theta = fields.number("rope_local_base_freq", local_theta)
    if not fields.get("rope_parameters"):
        scaling = fields.nested("rope_scaling")
        full, _ = _read(fields, scaling, theta, max_position)
        _partial(fields, scaling, None)
        return full, RopeConfig(theta=local_theta)
    both = fields.nested("rope_parameters")
    unknown = both.values.keys() - {"full_attention", "sliding_attention"}
    if unknown:
        raise fields.error(
            "rope_parameters",
            both.values,
            "objects full_attention and sliding_attention are expected in it",
        )
    full, _ = _read(fields, both.nested("full_attention"), theta, max_position)
    local, _ = _read(fields, both.nested("sliding_attention"), local_theta, max_position)
    for kind in both.values:
        _partial(fields, both.nested(kind), None)
    return full, local


def _read(
    fields: Fields, rope: Fields, default_theta: float, max_position: int
) -> tuple[RopeConfig, int]:
    """As read_rope, of the object `rope`; default_theta: where it has none."""
    kind_field = "rope_type" if rope.get("rope_type") is not None else "type"
    kind = rope.choice(kind_field, KINDS, "default")
    theta = rope.number("rope_theta", default_theta)
    if kind == "default":
        return RopeConfig("default", theta), max_position
    outer = fields.integer("original_max_position_embeddings", None)
    original = outer or rope.integer("original_max_position_embeddings", max_position)
    if kind == "linear":
        factor = _factor(rope)
        return RopeConfig("linear", theta, factor), int(max_position * factor)
    if kind == "dynamic":
        return RopeConfig("dynamic", theta, _factor(rope), max_position), max_position
    if kind == "llama3":
        return _llama3(rope, theta, original), max_position
    yarn = _yarn(rope, theta, original, max_position)
    return yarn, max(max_position, int(original * yarn.factor))


def _partial(fields: Fields, rope: Fields, default: float | None) -> float:
    """RopeConfig.partial; default None: only 1 is supported."""
    name = "partial_rotary_factor"
    if default is None:
        for place in (rope, fields):
            place.refuse(name, "only 1.0 is supported", allowed=(None, 1))
        return 1.0
    place = fields if rope.get(name) is None else rope
    found = place.number(name, default)
    if found > 1:
        raise place.error(name, found, "at most 1.0 is expected")
    return found


def _factor(rope: Fields) -> float:
    factor = rope.number("factor")
    if factor < 1:
        raise rope.error("factor", factor, "at least 1 is expected")
    return factor


def _llama3(rope: Fields, theta: float, original: int) -> RopeConfig:
    low = rope.number("low_freq_factor")
    high = rope.number("high_freq_factor")
    if high <= low:
        raise rope.error("high_freq_factor", high, f"more than `low_freq_factor` {low} is expected")
    return RopeConfig(
        "llama3", theta, _factor(rope), original, low_freq_factor=low, high_freq_factor=high
    )


def _yarn(rope: Fields, theta: float, original: int, max_position: int) -> RopeConfig:
    return RopeConfig(
        "yarn",
        theta,
        max_position / original if rope.get("factor") is None else _factor(rope),
        original,
        beta_fast=rope.number("beta_fast", 32.0),
        beta_slow=rope.number("beta_slow", 1.0),
        truncate=rope.flag("truncate", True),
        attention_factor=rope.number("attention_factor", None),
        mscale=rope.number("mscale", None),
        mscale_all_dim=rope.number("mscale_all_dim", None),
    )
