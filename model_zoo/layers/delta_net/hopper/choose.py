"""Which kernels compute prompts in a model's gated delta nets: tried at a start on Hopper."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from contextlib import suppress

import torch
from torch import nn

from model_zoo.layers import fused_kernels
from model_zoo.layers.delta_net.block import DeltaNet
from model_zoo.layers.delta_net.hopper.serves import DIM, TAPS
from model_zoo.layers.delta_net.hopper.trial import (
    ROWS,
    TrialRow,
    TrialStep,
    difference,
    trial_step,
    without_snapshots,
)
from model_zoo.layers.delta_net.tiles import PromptTiles
from model_zoo.layers.error_text import first_line

BETTER = 0.98  # of the time of the Triton kernels: a smaller gain may be noise
# Of a token's output or a sequence's state.  Roundings to 16 bits make it about 1 / 150 over all
# tokens of a prompt, and up to some times that for one of them.
LARGEST_ERROR = 1 / 32
# Tokens of the steps that are timed: a short prompt, a chunk of a long one.  The fastest tiles have
# the smallest sum of microseconds a token over both.  All steps have the same ones, since a prompt
# has the same bits however it is cut at multiples of 64.
TIMED = 2048, 8192
CALLS, REPLAYS = 3, 4
CANDIDATES = (
    PromptTiles(),
    PromptTiles(scan_hopper=True),
    PromptTiles(local_hopper=True, scan_hopper=True),
)
PADDING = 5
log = logging.getLogger(__name__)


def choose_delta_net(model: nn.Module, state_dtype: torch.dtype) -> str:
    """Set the fastest right kernels in all DeltaNets of a model whose device is a Hopper GPU.

    Call it where autotune_gemms is called; the weights are not read.  A kernel that does not
    compile, or whose results differ from those of the Triton kernels on rows of all kinds, is not
    used, and a warning says so.
    Returns what the start report says of it, "" if there was no choice.
    """
    layers = _layers_with_a_choice(model)
    if not layers:
        return ""
    tiles = _fastest(layers[0], state_dtype, CANDIDATES)
    for layer in layers:
        layer.tiles = tiles
    return f"prompts by {'Triton' if tiles == CANDIDATES[0] else 'Hopper'} kernels"


def run_delta_net_candidates(model: nn.Module, state_dtype: torch.dtype) -> None:
    """Run each candidate of choose_delta_net on steps of each kind, so that all are compiled."""
    for layer in _layers_with_a_choice(model)[:1]:
        like = layer.config, layer.conv.dtype, state_dtype
        timed = [TrialRow(TIMED[0], 1000)]
        for rows in (ROWS, without_snapshots(ROWS), timed):
            padding = 0 if rows is timed else PADDING
            step = trial_step(*like, rows, padding=padding, device=layer.conv.device)
            for tiles in CANDIDATES:
                with suppress(Exception):  # choose_delta_net warns of it
                    step.run(tiles)


def _layers_with_a_choice(model: nn.Module) -> list[DeltaNet]:
    layers = [module for module in model.modules() if isinstance(module, DeltaNet)]
    return layers if layers and not layers[0].token_by_token and _is_for(layers[0]) else []


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
    layer: DeltaNet, state_dtype: torch.dtype, candidates: Sequence[PromptTiles]
) -> PromptTiles:
    """The first of some candidates, or the fastest one that is right if that is faster."""
    like = layer.config, layer.conv.dtype, state_dtype
    device = layer.conv.device
    right = list(candidates)
    for rows in (ROWS, without_snapshots(ROWS)):
        right = right_candidates(trial_step(*like, rows, padding=PADDING, device=device), right)
    if len(right) == 1:
        return right[0]
    times = [0.0] * len(right)  # of a token
    for tokens in TIMED:
        try:
            timed = trial_step(*like, [TrialRow(tokens, 1000)], padding=0, device=device)
            found = _microseconds(timed, right)
        except torch.OutOfMemoryError:
            log.warning("prompts of gated delta nets: no memory to time kernels for Hopper")
            return right[0]
        log.debug("gated delta nets of %d tokens: %s us, by %s", tokens, found, right)
        times = [sum_ + us / tokens for sum_, us in zip(times, found, strict=True)]
    best = min(range(len(right)), key=times.__getitem__)
    return right[best] if times[best] < BETTER * times[0] else right[0]


def right_candidates(step: TrialStep, candidates: Sequence[PromptTiles]) -> list[PromptTiles]:
    """The first, and those whose results are the same, twice to the bit."""
    found = [candidates[0]]
    expected = step.outcome(candidates[0])
    for tiles in candidates[1:]:
        try:
            once, again = step.outcome(tiles), step.outcome(tiles)
            off = difference(once, expected)
            problem = "" if off <= LARGEST_ERROR else f"results differ by {100 * off:.0f} %"
            if not problem and difference(again, once):
                problem = "results differ from call to call"
        except Exception as error:  # of the compiler, or of another version of Triton
            if step.inputs[0].is_cuda:
                torch.cuda.synchronize()  # raises if the GPU cannot be used any more
            problem = first_line(error)
        if problem:
            log.warning("prompts of gated delta nets: %s is not used: %s", tiles, problem)
        else:
            found.append(tiles)
    return found


def _microseconds(step: TrialStep, candidates: Sequence[PromptTiles]) -> list[float]:
    """Median times of the step by each, in CUDA graphs."""
    from model_zoo.layers.gemm.timing import replayed_us, side_stream

    stream = side_stream(step.inputs[0].device)
    stream.wait_stream(torch.cuda.current_stream())
    graphs, pool = [], torch.cuda.graph_pool_handle()  # one after the other, so that all share it
    with torch.cuda.stream(stream):
        for tiles in candidates:
            step.run(tiles)  # compiles
            graph = torch.cuda.CUDAGraph()
            graph.capture_begin(pool=pool)
            for _ in range(CALLS):
                step.run(tiles)
            graph.capture_end()
            graphs.append(graph)
        return replayed_us(graphs, CALLS, REPLAYS)
