"""Autotunes the tiles of the experts' kernels for each number of tokens."""

from __future__ import annotations

import logging
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn

from model_zoo.layers.gemm.implementations import MAX_ROWS, supports_kernels
from model_zoo.layers.gemm.in_step import CloseCandidates, nearly_fastest
from model_zoo.layers.moe.experts import Experts
from model_zoo.layers.moe.hopper.tiles import HopperTiles
from model_zoo.layers.moe.tiles import BUCKETS, Tiles, candidates
from model_zoo.quantization.weight_scheme import WeightScheme

BETTER = 0.98  # of the time of the first candidate: a smaller gain may be noise
log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class ExpertsKey:
    """The unit of autotuning: experts of one shape and format, and at most so many tokens."""

    num_experts: int
    all_experts: int  # of all ranks
    top_k: int
    hidden: int
    inner: int
    dtype: torch.dtype
    activation: str
    bias: bool
    schemes: tuple[WeightScheme | None, WeightScheme | None]  # of the two products
    tokens: int

    def __str__(self) -> str:
        formats = [
            "plain" if scheme is None else scheme.describe(inputs)
            for scheme, inputs in zip(self.schemes, (self.hidden, self.inner), strict=True)
        ]
        bias = " with bias" if self.bias else ""
        some = "" if self.num_experts == self.all_experts else f" ({self.num_experts} of them here)"
        return (
            f"{self.top_k} of {self.all_experts} experts{some} {self.hidden} x {self.inner}{bias}, "
            f"{self.activation}, {' and '.join(dict.fromkeys(formats))}, {self.dtype}, "
            f"{self.tokens} tokens"
        )


# Microseconds of each of some tiles, for a number of tokens, over the experts of the layers.
Times = Callable[[Sequence[Experts], Sequence[Tiles], int], Sequence[float]]


def autotune_experts(
    model: nn.Module, *, seconds: float = 1.5, file: Path | None = None
) -> list[CloseCandidates]:
    """Set the fastest measured tiles for each of BUCKETS in all Experts of 16-bit values on CUDA.

    When and where to call it, and `file`, as for autotune_gemms.

    seconds  time limit; keys that are not reached use the first candidate until the next start

    Returns what choose_in_step may choose otherwise: of what has been timed now, up to MAX_ROWS
    tokens.
    """
    layers = layers_by_key(model)
    if not layers:
        return []
    from model_zoo.layers.gemm import autotune_cache
    from model_zoo.layers.moe.timing import times

    device = next(iter(layers.values()))[0].gate_up.weight.device
    file = autotune_cache.chosen_file() if file is None else file
    environment_key = autotune_cache.environment_key(device)
    known = autotune_cache.read_choices(file, environment_key)
    choices = {key: found for key in layers if isinstance(found := known.get(str(key)), Tiles)}
    missing = {key: found for key, found in layers.items() if key not in choices}
    found = choose(missing, times, seconds)
    made = {key: tiles[0] for key, tiles in found.items()}
    if made:
        written = {str(key): tiles for key, tiles in made.items()}
        autotune_cache.write_choices(file, environment_key, written)
    use(layers, choices | made)
    close = [
        _close_candidates(key, missing[key], tiles)
        for key, tiles in found.items()
        if key.tokens <= MAX_ROWS
    ]
    return [of_key for of_key in close if len(of_key.candidates) > 1]


def _close_candidates(
    key: ExpertsKey, layers: Sequence[Experts], found: Sequence[Tiles]
) -> CloseCandidates:
    """Tiles, each also in the configurations that differ only in a step."""
    tried: list[Tiles] = []
    for tiles in found:
        tried.append(tiles)
        if isinstance(tiles, HopperTiles):
            tried += tiles.for_steps(layers[0].gate_up, layers[0].down)

    def use_one(tiles: Tiles) -> None:
        for experts in layers:
            experts.update_tiles({key.tokens: tiles})

    return CloseCandidates(str(key), key.tokens, layers, tried, use_one)


def run_expert_candidates(model: nn.Module) -> None:
    """Run each candidate of autotune_experts once, so that all are compiled."""
    from model_zoo.layers.moe.timing import ExpertsTimer

    for key, (experts, *_) in layers_by_key(model).items():
        timer = ExpertsTimer([experts], key.tokens)
        for tiles in candidates(key.tokens, experts):
            timer.run(0, tiles)


def layers_by_key(model: nn.Module) -> dict[ExpertsKey, list[Experts]]:
    """The experts to tune by key, fewest tokens first."""
    layers: dict[ExpertsKey, list[Experts]] = defaultdict(list)
    found = [module for module in model.modules() if isinstance(module, Experts)]
    for tokens in BUCKETS:
        for experts in found:
            first, second = experts.gate_up, experts.down
            if experts.is_batch_invariant or not supports_kernels(first.weight.device, first.dtype):
                continue
            schemes = tuple(
                None if stack.packed is None else stack.packed.scheme for stack in (first, second)
            )
            key = ExpertsKey(
                experts.num_experts,
                experts.all_experts,
                experts.top_k,
                experts.hidden,
                experts.inner,
                first.dtype,
                experts.activation,
                first.bias is not None,
                (schemes[0], schemes[1]),
                tokens,
            )
            layers[key].append(experts)
    return dict(layers)


def choose(
    layers: Mapping[ExpertsKey, Sequence[Experts]], times: Times, seconds: float
) -> dict[ExpertsKey, Sequence[Tiles]]:
    """The fastest tiles for each key within the time limit, the first unless clearly slower; behind
    them those of nearly_fastest()."""
    began = time.monotonic()
    made: dict[ExpertsKey, Sequence[Tiles]] = {}
    for key, found in layers.items():
        if time.monotonic() - began > seconds:
            late = len(layers) - len(made)
            log.warning("%d of %d tiles of experts are not timed: no time", late, len(layers))
            break
        tiles = candidates(key.tokens, found[0])
        first, *others = took = times(found, tiles, key.tokens)
        made[key] = [tiles[at] for at in nearly_fastest(took, BETTER)]
        log.debug("%s: %s of %.1f us and %s", key, made[key][0], first, others)
    return made


def use(
    layers: Mapping[ExpertsKey, Sequence[Experts]], choices: Mapping[ExpertsKey, Tiles]
) -> None:
    """Set the chosen tiles in the experts."""
    by_layer: dict[Experts, dict[int, Tiles]] = defaultdict(dict)
    for key, tiles in choices.items():
        for experts in layers[key]:
            by_layer[experts][key.tokens] = tiles
    for experts, by_tokens in by_layer.items():
        experts.use_tiles(by_tokens)
