"""Which kernels the gated delta nets of a model are computed by: tried at a start on Hopper."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import nn

from model_zoo.layers import fused_kernels
from model_zoo.layers.delta_net.block import DeltaNet
from model_zoo.layers.delta_net.hopper.serves import DIM, TAPS
from model_zoo.layers.delta_net.hopper.trial import (
    DECODE,
    PROMPTS,
    TrialRow,
    TrialStep,
    difference,
    trial_step,
    without_snapshots,
)
from model_zoo.layers.delta_net.tiles import DecodeTiles, DeltaNetTiles

BETTER = 0.98  # of the time of the Triton kernels: a smaller gain may be noise
# Of a token's output or a sequence's state.  Roundings to 16 bits make it about 1 / 150 over all
# tokens of a prompt, and up to some times that for one of them; states of decoding rows have none.
LARGEST_ERROR = {"prompts": 1 / 32, "decode": 1 / 100}
TIMED = {"prompts": (TrialRow(4096, 1000),), "decode": (TrialRow(1, 1000),) * 64}
CALLS, REPLAYS = 3, 4
PADDING = 5
log = logging.getLogger(__name__)


def choose_delta_net(model: nn.Module, state_dtype: torch.dtype) -> str:
    """Set the fastest right kernels in all DeltaNets of a model whose device is a Hopper GPU.

    Call it where autotune_gemms is called; the weights are not read.  A kernel that does not
    compile, or whose results differ from those of the Triton kernels on rows of all kinds, is not
    used, and a warning says so.
    Returns what the start report says of it, "" if there was no choice.
    """
    layers = [module for module in model.modules() if isinstance(module, DeltaNet)]
    if not layers or layers[0].token_by_token or not _is_for(layers[0]):
        return ""
    from model_zoo.layers.delta_net.prompts import prompt_tiles

    first = layers[0]
    plain = prompt_tiles(first.conv.dtype, first.conv.device)
    prompts = [DeltaNetTiles(prompts=plain)]
    prompts += [
        DeltaNetTiles(prompts=replace(plain, local_hopper=True, scan_halves=halves))
        for halves in (1, 2)
    ]
    decode = [DeltaNetTiles(decode=DecodeTiles(hopper=hopper)) for hopper in (False, True)]
    if state_dtype != torch.float32:
        decode = decode[:1]
    tiles = DeltaNetTiles(
        decode=_fastest("decode", first, state_dtype, decode).decode,
        prompts=_fastest("prompts", first, state_dtype, prompts).prompts,
    )
    for layer in layers:
        layer.tiles = tiles
    assert tiles.decode is not None and tiles.prompts is not None
    ways = ["Hopper" if tiles.prompts.local_hopper else "Triton"]
    ways += ["Hopper" if tiles.decode.hopper else "Triton"]
    return f"prompts by {ways[0]} kernels, decode by {ways[1]}"


def _is_for(layer: DeltaNet) -> bool:
    """Whether the Hopper kernels take a layer's shape, type and device."""
    config, weight = layer.config, layer.conv
    if weight.device.type != "cuda" or not fused_kernels.use_fused_kernels(weight.device):
        return False
    shape = config.key_dim, config.value_dim, config.conv_width
    return (
        weight.element_size() == 2
        and shape == (DIM, DIM, TAPS)
        and torch.cuda.get_device_capability(weight.device) == (9, 0)
    )


def _fastest(
    kind: str, layer: DeltaNet, state_dtype: torch.dtype, candidates: Sequence[DeltaNetTiles]
) -> DeltaNetTiles:
    """The first of some candidates, or the fastest one that is right if that is faster."""
    if len(candidates) == 1:
        return candidates[0]
    like = layer.config, layer.conv.dtype, state_dtype
    device = layer.conv.device
    rows = PROMPTS if kind == "prompts" else DECODE
    right = list(candidates)
    for tried in (rows, without_snapshots(rows)):
        step = trial_step(*like, tried, padding=PADDING, device=device)
        right = right_candidates(kind, step, right)
    if len(right) == 1:
        return right[0]
    timed = trial_step(*like, TIMED[kind], padding=0, device=device)
    first, *others = _microseconds(timed, right)
    best = min(range(len(others)), key=others.__getitem__)
    log.debug("%s of gated delta nets: %.1f us, by Hopper kernels %s", kind, first, others)
    return right[1 + best] if others[best] < BETTER * first else right[0]


def right_candidates(
    kind: str, step: TrialStep, candidates: Sequence[DeltaNetTiles]
) -> list[DeltaNetTiles]:
    """The first, and those whose results are the same, twice to the bit."""
    found = [candidates[0]]
    expected = step.outcome(candidates[0])
    for tiles in candidates[1:]:
        try:
            once, again = step.outcome(tiles), step.outcome(tiles)
            off = difference(once, expected)
            problem = "" if off <= LARGEST_ERROR[kind] else f"results differ by {100 * off:.0f} %"
            if not problem and difference(again, once):
                problem = "results differ from call to call"
        except Exception as error:  # of the compiler, or of another version of Triton
            if step.inputs[0].is_cuda:
                torch.cuda.synchronize()  # raises if the GPU cannot be used any more
            problem = str(error).strip().partition("\n")[0] or type(error).__name__
        if problem:
            log.warning("%s of gated delta nets: %s is not used: %s", kind, tiles, problem)
        else:
            found.append(tiles)
    return found


def _microseconds(step: TrialStep, candidates: Sequence[DeltaNetTiles]) -> list[float]:
    """Median times of the step by each, in CUDA graphs."""
    from model_zoo.layers.gemm.timing import replayed_us, side_stream

    stream = side_stream(step.inputs[0].device)
    stream.wait_stream(torch.cuda.current_stream())
    graphs = []
    with torch.cuda.stream(stream):
        for tiles in candidates:
            step.run(tiles)  # compiles
            graph = torch.cuda.CUDAGraph()
            graph.capture_begin()
            for _ in range(CALLS):
                step.run(tiles)
            graph.capture_end()
            graphs.append(graph)
        return replayed_us(graphs, CALLS, REPLAYS)
