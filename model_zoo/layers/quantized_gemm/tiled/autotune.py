"""Autotunes GEMMs that hand codes to each other (TiledFp8Gemm), four of a layer at a time.

A GEMM that stores its output as codes pays only if the next one takes them.  So the layers
themselves are timed at start, as they are and with TiledFp8Gemm in all four places, for each number
of rows that GEMMs are tuned for.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from model_zoo.layers.gemm.implementations import BUCKETS, GemmImpl
from model_zoo.layers.gemm.timing import is_hopper
from model_zoo.layers.quantized_gemm.tiled.chain import Chain, Place
from model_zoo.layers.tiled_rows import TiledRowsGemm

if TYPE_CHECKING:
    from model_zoo.layers.quantized_gemm.tiled.timed_chains import Chains, Gemms

BETTER = 0.98  # of the time of the GEMMs that were chosen one by one
# Of what two layers add to a row of the residual: eight products of codes whose scales are others
# differ by 0.16.
LARGEST_ERROR = 0.35
log = logging.getLogger(__name__)


def autotune_chains(chains: Sequence[Chain], *, file: Path | None = None) -> None:
    """Set TiledFp8Gemm in all GEMMs of the layers, for the numbers of rows for which it is faster.

    Call it after autotune_gemms, whose file of choices has these, too.
    """
    if not _may_hand_on(chains):
        return
    from model_zoo.layers.gemm import autotune_cache
    from model_zoo.layers.quantized_gemm.tiled.timed_chains import Chains

    file = autotune_cache.chosen_file() if file is None else file
    environment_key = autotune_cache.environment_key(chains[0].qkv.device)
    known = autotune_cache.read_choices(file, environment_key)
    made: dict[str, GemmImpl] = {}
    for rows in BUCKETS:
        layers, keys = Chains(chains, rows), _keys(chains[0], rows)
        if all(key in known for key in keys.values()):
            chosen: Gemms = {place: known[key] for place, key in keys.items()}
        else:
            chosen = choose(layers)
            made |= {keys[place]: gemm for place, gemm in chosen.items() if gemm is not None}
        if isinstance(chosen["qkv"], TiledRowsGemm) and _checked(layers, chosen):
            layers.use(chosen)
    if made:
        autotune_cache.write_choices(file, environment_key, made)


def choose(layers: Chains) -> Gemms:
    """The faster GEMMs: those that are set, or the best candidate in each place."""
    from triton.runtime.errors import OutOfResources

    before, candidates = layers.gemms(), layers.candidates()
    if not candidates:
        return before
    try:
        plain, *times = layers.microseconds([before, *candidates])
    except OutOfResources as error:
        log.debug("GEMMs that hand codes on are not tried with %d rows: %s", layers.rows, error)
        return before
    best, predicted = best_of(candidates, times)
    log.debug(
        "chain of %d rows: %.1f us a layer, handing codes on %s; with the best %.1f: %s",
        layers.rows, plain, times, predicted, best,
    )  # fmt: skip
    return best if predicted < BETTER * plain else before


def best_of(candidates: Sequence[Gemms], times: Sequence[float]) -> tuple[Gemms, float]:
    """The first candidate with the fastest GEMM in each place, as if each saved what it alone does.

    -> (GEMMs, their time)
    """
    best, saved = dict(candidates[0]), dict.fromkeys(candidates[0], 0.0)
    for gemms, time in zip(candidates[1:], times[1:], strict=True):
        [place] = [place for place, gemm in gemms.items() if gemm != candidates[0][place]]
        if times[0] - time > saved[place]:
            best[place], saved[place] = gemms[place], times[0] - time
    return best, times[0] - sum(saved.values())


def run_chain_candidates(chains: Sequence[Chain]) -> None:
    """Run each candidate of autotune_chains once, so that all are compiled."""
    if not _may_hand_on(chains):
        return
    from model_zoo.layers.quantized_gemm.tiled.timed_chains import Chains

    for rows in BUCKETS:
        layers = Chains(chains, rows)
        for gemms in layers.candidates():
            with layers.using(gemms):
                layers.run(2)


def _may_hand_on(chains: Sequence[Chain]) -> bool:
    if len(chains) < 2 or not is_hopper(chains[0].qkv.device):
        return False
    from model_zoo.layers.quantized_gemm.tiled.timed_chains import multiplies

    return all(map(multiplies, chains))


def _checked(layers: Chains, gemms: Gemms) -> bool:
    off = layers.error(gemms)
    if off <= LARGEST_ERROR:
        return True
    log.warning(
        "GEMMs that hand codes to each other are not used with %d rows: what they add to the "
        "residual differs by %.0f %%",
        layers.rows, 100 * (math.inf if math.isnan(off) else off),
    )  # fmt: skip
    return False


def _keys(chain: Chain, rows: int) -> Mapping[Place, str]:
    """In the file of choices, of each place."""
    shapes = ", ".join(f"{x.outputs} x {x.inputs}" for x in chain.linears.values())
    bias = " with bias" if chain.qkv.bias is not None else ""
    return {
        place: f"chain of {shapes}{bias}, {chain.qkv.dtype}, {rows} rows: {place}"
        for place in chain.linears
    }
