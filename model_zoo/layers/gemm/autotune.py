"""Chooses, for each linear layer and number of rows, how its product is computed."""

from __future__ import annotations

import logging
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import nn

from model_zoo.layers.gemm.implementations import BUCKETS, Product, supports_kernels
from model_zoo.layers.gemm.swiglu import SIZES
from model_zoo.layers.linear import GatedLinear, Linear

BETTER = 0.98  # of cuBLAS's time: what is not clearly faster is not worth another kernel
# Of cuBLAS's and silu_mul's.  Under lasting load the power of an H100 decides, and there 6 % of the
# lead that gated_hopper.py had in short runs was gone at worst.
BETTER_GATED = 0.95
GATED_SECONDS = 0.3
log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Place:
    """Where one way to compute is chosen for: layers of a shape, and so many rows at most."""

    outputs: int
    inputs: int
    dtype: torch.dtype
    bias: bool
    rows: int
    gated: bool = False  # silu(gate) * up of the product

    def __str__(self) -> str:
        what = (" with bias" if self.bias else "") + (" gated" if self.gated else "")
        return f"{self.outputs} x {self.inputs}{what}, {self.dtype}, {self.rows} rows"


Tried = Callable[[Place], Sequence[Product]]  # what to time, cuBLAS first
# Microseconds of each of the products, for a number of rows, over the weights of some layers.
Times = Callable[[Sequence[Linear], Sequence[Product], int], Sequence[float]]


def choose_products(model: nn.Module, *, seconds: float = 1.5, file: Path | None = None) -> None:
    """Give each Linear of the model the fastest products, by measurement: each for up to 64 rows,
    a GatedLinear for more rows too.

    Call it when the weights are in place, on the thread and device that run the model, and before
    anything is captured into a graph.  Layers without a choice use cuBLAS, and so do all of other
    devices and types than CUDA's 16-bit ones.  Choices of earlier starts are read from `file`,
    chosen_file() if left out; what is missing is timed on the layers' own weights and added to it.

    seconds  for timing few rows, beside GATED_SECONDS for many: places whose turn does not come
             stay with cuBLAS until the next start
    """
    layers = layers_by_place(model)
    if not layers:
        return
    from model_zoo.layers.gemm import autotune_cache
    from model_zoo.layers.gemm.timing import times

    device = next(iter(layers.values()))[0].weight.device
    file = autotune_cache.chosen_file() if file is None else file
    circumstances = autotune_cache.circumstances(device)
    known = autotune_cache.read_choices(file, circumstances)
    choices = {place: known[str(place)] for place in layers if str(place) in known}
    missing = {place: found for place, found in layers.items() if place not in choices}

    def tried(place: Place) -> Sequence[Product]:
        return that_fit(candidates_for(place, device), place.rows, missing[place][0])

    made: dict[Place, Product] = {}
    for gated, limit in ((False, seconds), (True, GATED_SECONDS)):
        of_kind = {place: found for place, found in missing.items() if place.gated == gated}
        made |= choose(of_kind, tried, times, limit)
    if made:
        autotune_cache.write_choices(file, circumstances, {str(x): way for x, way in made.items()})
    use(layers, choices | made)


def run_candidates(model: nn.Module) -> None:
    """Call every product that choose_products may time once, so that all can be compiled ahead."""
    for place, (layer, *_) in layers_by_place(model).items():
        weight = layer.weight
        x = torch.empty(place.rows, place.inputs, dtype=place.dtype, device=weight.device)
        for product in candidates_for(place, weight.device):
            product.run(x, weight, layer.bias)


def candidates_for(place: Place, device: torch.device) -> Sequence[Product]:
    """What is timed for the place, cuBLAS first."""
    from model_zoo.layers.gemm.candidates import candidates
    from model_zoo.layers.gemm.swiglu import gated_candidates

    shape = place.rows, place.outputs, place.inputs
    if place.gated:
        return gated_candidates(device, *shape, bias=place.bias)
    return candidates(device, *shape)


def that_fit(products: Sequence[Product], rows: int, layer: Linear) -> list[Product]:
    """Those whose kernels need no more shared memory and registers than the device has."""
    from triton.runtime.errors import OutOfResources

    weight = layer.weight
    x = torch.zeros(rows, weight.shape[1], dtype=weight.dtype, device=weight.device)
    fitting: list[Product] = []
    for product in products:
        try:
            product.run(x, weight, layer.bias)
        except OutOfResources as error:
            log.debug("%s is not tried: %s", product, error)
        else:
            fitting.append(product)
    return fitting


def layers_by_place(model: nn.Module) -> dict[Place, list[Linear]]:
    """The layers that have a choice; one row first, and large layers first.

    Then those of many rows, the most first.
    """
    layers: dict[Place, list[Linear]] = defaultdict(list)
    for layer in model.modules():
        if not isinstance(layer, Linear) or layer.is_settled:
            continue
        if supports_kernels(layer.weight.device, layer.weight.dtype):
            outputs, inputs = layer.weight.shape
            place = Place(outputs, inputs, layer.weight.dtype, layer.bias is not None, 1)
            for rows in BUCKETS:
                layers[replace(place, rows=rows)].append(layer)
            if isinstance(layer, GatedLinear):
                for rows in SIZES:
                    layers[replace(place, rows=rows, gated=True)].append(layer)

    def order(place: Place) -> tuple[bool, int, int]:
        rows = -place.rows if place.gated else place.rows
        return place.gated, rows, -place.outputs * place.inputs * len(layers[place])

    return {place: layers[place] for place in sorted(layers, key=order)}


def choose(
    layers: Mapping[Place, Sequence[Linear]], tried: Tried, times: Times, seconds: float
) -> dict[Place, Product]:
    """The fastest product for each place, as long as there is time; plain ones if in doubt."""
    began = time.monotonic()
    made: dict[Place, Product] = {}
    for place, found in layers.items():
        if time.monotonic() - began > seconds:
            late = len(layers) - len(made)
            log.warning("%d of %d matrix products are left to cuBLAS: no time", late, len(layers))
            break
        products = tried(place)
        plain, *others = times(found, products, place.rows)
        best = min(range(len(others)), key=others.__getitem__, default=None)
        made[place] = products[0]
        better = BETTER_GATED if place.gated else BETTER
        if best is not None and others[best] < better * plain:
            made[place] = products[1 + best]
        log.debug("%s: %s, cuBLAS %.1f us, others %s", place, made[place], plain, others)
    return made


def use(layers: Mapping[Place, Sequence[Linear]], choices: Mapping[Place, Product]) -> None:
    """Let the layers compute as chosen."""
    ways: dict[tuple[Linear, bool], dict[int, Product]] = defaultdict(dict)
    for place, product in choices.items():
        for layer in layers[place]:
            ways[layer, place.gated][place.rows] = product
    for (layer, gated), by_rows in ways.items():
        if gated and isinstance(layer, GatedLinear):
            layer.use_gated(by_rows)
        else:
            layer.use_products(by_rows)
