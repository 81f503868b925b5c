"""The names of tensors, with `*` for numbers of layers: a checkpoint's, and a model type's."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open

from model_zoo.checkpoint import INDEX
from model_zoo.checkpoint_layers import STACKED_DIMENSIONS
from model_zoo.config import ModelConfig
from model_zoo.kv_scales import is_kv_scale
from model_zoo.layers.projection import LoadedProjection
from model_zoo.quantization.readers.registry import split_name
from model_zoo.registry import build
from model_zoo.rope_config import RopeConfig
from model_zoo.weight_targets import IGNORED

LAYERS = 4  # of a model whose names are listed: as many as have layers of all kinds
SIZE = 8  # of its dimensions, which the names do not depend on
NUMBER = re.compile(r"(?<![^.])\d+(?![^.])")
TEXT_PART = re.compile(r"(?<![^.])language_model\.")
# Of a model that also sees or hears, and of layers that predict further tokens.
NOT_TEXT = re.compile(
    r"(?<![^.])(visual|vision_\w+|multi_modal_projector|mm_projector|audio_\w+|mtp)\."
)


def names_of_type(config: ModelConfig) -> frozenset[str]:
    """The tensors that a model of this config reads.  A tied head has none."""
    small = replace(
        config,
        vocab_size=SIZE,
        hidden_size=SIZE,
        intermediate_size=SIZE,
        num_layers=min(config.num_layers, LAYERS),
        num_heads=1,
        num_kv_heads=1,
        head_dim=SIZE,
        max_position=SIZE,
        rope=config.rope and RopeConfig(),
    )
    model = build(small, torch.bfloat16, torch.device("meta"))
    names = set(model.other_weights())
    one_by_one: list[LoadedProjection] = []
    for experts in model.experts():
        if experts.names.stacked:
            names.update(experts.stacked_tensors())
        else:
            one_by_one += experts.projections()
    for projection in (*model.projections(), *one_by_one):
        names.add(f"{projection.name}.weight")
        if projection.bias is not None:
            names.add(f"{projection.name}.bias")
    return frozenset(NUMBER.sub("*", name) for name in names)


def names_in(directory: Path) -> frozenset[str]:
    """The tensors of the text model in a directory's safetensors files; empty: none can be read.

    Those of a quantized layer, its codes and scales, count as one `weight`.
    """
    stored = _stored_names(directory)
    if any(TEXT_PART.search(name) for name in stored):
        stored = {n for n in stored if TEXT_PART.search(n) or n.startswith("lm_head.")}
    return frozenset(
        NUMBER.sub("*", _unquantized(TEXT_PART.sub("", name)))
        for name in stored
        if not (NOT_TEXT.search(name) or is_kv_scale(name) or name.endswith(IGNORED))
    )


def matched(found: Iterable[str], known: frozenset[str]) -> frozenset[str]:
    """The found names, with the outer part ("model.") that `known` have and some are saved without.

    A head that a tied model does not read, and other files have, is left out.
    """
    outer = next(name.partition(".")[0] for name in sorted(known) if not name.startswith("lm_head"))
    names = {f"{outer}.{name}" if f"{outer}.{name}" in known else name for name in found}
    return frozenset(names if "lm_head.weight" in known else names - {"lm_head.weight"})


def _stored_names(directory: Path) -> set[str]:
    with suppress(OSError, ValueError, RecursionError, KeyError, TypeError):
        return set(map(str, json.loads((directory / INDEX).read_text("utf-8"))["weight_map"]))
    names: set[str] = set()
    for path in sorted(directory.glob("*.safetensors")):
        with suppress(OSError, SafetensorError), safe_open(path, framework="pt") as file:
            names.update(file.keys())
    return names


def _unquantized(name: str) -> str:
    found = split_name(name)
    if found is None:
        return name
    module, suffix = found
    return module if suffix in STACKED_DIMENSIONS else f"{module}.weight"
