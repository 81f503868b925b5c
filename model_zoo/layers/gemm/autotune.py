"""Autotunes the GEMM of each linear layer and number of rows."""

from __future__ import annotations

import logging
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch
from torch import Tensor, nn

from model_zoo.layers.gemm.by_rows import GemmsByRows
from model_zoo.layers.gemm.check_fused import LARGEST_ERROR, check_fused, fused_is_right
from model_zoo.layers.gemm.implementations import (
    BUCKETS,
    MAX_ROWS,
    Gate,
    GatingGemm,
    GemmImpl,
    NormingGemm,
    supports_kernels,
)
from model_zoo.layers.gemm.in_step import CloseCandidates, nearly_fastest
from model_zoo.layers.gemm.swiglu import SIZES
from model_zoo.layers.linear import Linear
from model_zoo.layers.quantized_rows import Producer
from model_zoo.layers.row_parallel import RowParallelLinear
from model_zoo.layers.swiglu_linear import SwigluLinear
from model_zoo.quantization.weight_scheme import WeightScheme

BETTER = 0.98  # of cuBLAS's time: a smaller gain is not worth another kernel
# Of the time of cuBLAS and silu_mul.  Under lasting load an H100 is bound by power, where up to 6 %
# of the lead that hopper/swiglu.py has in short runs is lost.
BETTER_SWIGLU = 0.95
SWIGLU_SECONDS = 0.3
MANY_SECONDS = 1.2
log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class GemmKey:
    """The unit of autotuning: layers of one shape, and at most so many rows."""

    outputs: int
    inputs: int
    dtype: torch.dtype
    bias: bool
    rows: int
    swiglu: bool = False  # silu(gate) * up of the output
    scheme: WeightScheme | None = None  # of a quantized weight
    after: Producer | None = None  # the kernel that may quantize x
    leaves_scales: bool = False  # what reads the output can multiply them, and UnscaledMM runs
    between_attention_and_experts: bool = False  # as of Linear

    @property
    def group(self) -> str:
        """Of keys that have a time limit together."""
        if self.swiglu:
            return "swiglu"
        return "few" if self.rows <= MAX_ROWS else "many"

    def __str__(self) -> str:
        what = (" with bias" if self.bias else "") + (" gated" if self.swiglu else "")
        if self.scheme is not None:
            scales = str(self.scheme.scale_dtype).removeprefix("torch.")
            what += f" of {self.scheme.describe(self.inputs)} with {scales} scales"
        what += "" if self.after is None else f" after {self.after}"
        what += " scaled later" if self.leaves_scales else ""
        between = self.between_attention_and_experts
        what += " between attention and experts" if between else ""
        return f"{self.outputs} x {self.inputs}{what}, {self.dtype}, {self.rows} rows"


CandidatesOf = Callable[[GemmKey], Sequence[GemmImpl]]  # what to time, cuBLAS first
# Microseconds of each GEMM, for a number of rows, over the weights of the layers, with the gate.
Times = Callable[[Sequence[Linear], Sequence[GemmImpl], int, Gate | None], Sequence[float]]


def autotune_gemms(
    model: nn.Module, *, seconds: float = 2.5, file: Path | None = None
) -> list[CloseCandidates]:
    """Set the fastest measured GEMMs of each Linear up to 64 rows, of some also above.

    Call it when the weights are in place, on the thread and device that run the model, and before
    a CUDA graph is captured.  Layers that are not tuned use cuBLAS, as do all but 16-bit weights on
    CUDA; quantized ones use what use_quantized_gemms has set.  Choices of earlier starts are read
    from `file`, default chosen_file(); missing ones are timed on the layers' own weights and added
    to it.

    seconds  time limit for few rows, in addition to MANY_SECONDS for more rows of quantized weights
             and SWIGLU_SECONDS for gated GEMMs of many; keys that are not reached keep what they
             had until the next start

    Returns what choose_in_step may choose otherwise: of what has been timed now, up to 64 rows.
    """
    layers = layers_by_key(model)
    if not layers:
        return []
    from model_zoo.layers.gemm import autotune_cache
    from model_zoo.layers.gemm.timing import SMALL_BYTES, times
    from model_zoo.layers.quantized_gemm.fp8_gemm import release_scratch

    device = next(iter(layers.values()))[0].device
    file = autotune_cache.chosen_file() if file is None else file
    environment_key = autotune_cache.environment_key(device)
    known = autotune_cache.read_choices(file, environment_key)
    choices = {gemm_key: known[str(gemm_key)] for gemm_key in layers if str(gemm_key) in known}
    missing = {gemm_key: found for gemm_key, found in layers.items() if gemm_key not in choices}

    def candidates_of(gemm_key: GemmKey) -> Sequence[GemmImpl]:
        return runnable(candidates_for(gemm_key, device), gemm_key.rows, missing[gemm_key][0])

    found: dict[GemmKey, Sequence[GemmImpl]] = {}
    limits = {"few": seconds, "many": MANY_SECONDS, "swiglu": SWIGLU_SECONDS}
    for kind, limit in limits.items():
        of_kind = {key: layers for key, layers in missing.items() if key.group == kind}
        found |= choose(of_kind, candidates_of, times, limit)
    made = {gemm_key: gemms[0] for gemm_key, gemms in found.items()}
    if made:
        autotune_cache.write_choices(
            file, environment_key, {str(gemm_key): gemm for gemm_key, gemm in made.items()}
        )
    use(layers, choices | made)
    for gemm_key, of_key in layers.items():
        if not gemm_key.swiglu:
            check_fused(str(gemm_key), gemm_key.rows, of_key)
    release_scratch(
        gemm for layer in model.modules() if isinstance(layer, Linear) for gemm in layer.all_gemms()
    )
    close = [
        _close_candidates(gemm_key, missing[gemm_key], gemms)
        for gemm_key, gemms in found.items()
        # Of smaller weights, such as routers', a step does not show the GEMM.
        if gemm_key.group == "few" and missing[gemm_key][0].operand.nbytes > SMALL_BYTES
    ]
    return [of_key for of_key in close if len(of_key.candidates) > 1]


def _close_candidates(
    gemm_key: GemmKey, layers: Sequence[Linear], gemms: Sequence[GemmImpl]
) -> CloseCandidates:
    """GEMMs, each also in the configurations that differ only in a step."""
    name, weight = str(gemm_key), layers[0].operand
    found: list[GemmImpl] = []
    for gemm in gemms:
        found += [gemm, *(gemm.for_steps(weight) if isinstance(gemm, NormingGemm) else ())]

    def use_one(gemm: GemmImpl) -> None:
        for layer in layers:
            layer.update_gemms({gemm_key.rows: gemm})

    check = partial(fused_is_right, gemm_key.rows, layers)
    return CloseCandidates(name, gemm_key.rows, layers, found, use_one, check)


def run_candidates(model: nn.Module) -> None:
    """Run each candidate of autotune_gemms once, so that all are compiled.

    No kernel may be executed: some would wait for other ranks.  Those of the most rows come first:
    they take longest to compile.
    """
    from model_zoo.layers.gemm.timing import SmallKernel

    layers = layers_by_key(model)
    for gemm_key in sorted(layers, key=lambda gemm_key: gemm_key.rows, reverse=True):
        found = layers[gemm_key]
        layer, gate = found[0], gate_of(gemm_key, found)
        before = SmallKernel(
            layer.after,
            gemm_key.rows,
            gemm_key.inputs,
            dtype=gemm_key.dtype,
            device=layer.device,
            held=gemm_key.between_attention_and_experts,
            leaves_scales=gemm_key.leaves_scales,
        )
        for gemm in candidates_for(gemm_key, layer.device):
            before.run_with(gemm, layer.operand, layer.bias)
            if gate is not None and isinstance(gemm, GatingGemm):
                before.run_with(gemm, layer.operand, layer.bias, gate)
            if isinstance(layer, RowParallelLinear) and isinstance(gemm, NormingGemm):
                layer.launch_over_ranks(gemm, gemm_key.rows)
    for layer in model.modules():
        if isinstance(layer, RowParallelLinear):
            layer.launch_sending()


@contextmanager
def leaving_scales(model: nn.Module) -> Iterator[bool]:
    """Inside, layers use the GEMM that leaves scales to the next kernel, for any number of rows, if
    it is among their candidates; gives whether there are any."""
    kept: list[tuple[Linear, GemmsByRows[GemmImpl]]] = []
    for layer in model.modules():
        if not isinstance(layer, Linear) or layer.is_batch_invariant:
            continue
        gemm = _unscaled(layer)
        if gemm is not None:
            kept.append((layer, layer.replace_gemms(GemmsByRows())))
            layer.use_gemms({}, gemm)
    try:
        yield bool(kept)
    finally:
        for layer, gemms in kept:
            layer.replace_gemms(gemms)


def gate_of(gemm_key: GemmKey, layers: Sequence[Linear]) -> Gate | None:
    """What is to be timed with the product: the layers' gate; None: they have none, or others, the
    GEMM always computes it, or none does, as of int8, where the gate's kernel writes codes."""
    gates = {layer.gate if isinstance(layer, SwigluLinear) else None for layer in layers}
    integers = gemm_key.scheme is not None and gemm_key.scheme.multiplies_integers
    return None if gemm_key.swiglu or integers or len(gates) > 1 else gates.pop()


def candidates_for(gemm_key: GemmKey, device: torch.device) -> Sequence[GemmImpl]:
    """The candidates for a key: first cuBLAS, or of a quantized weight the default."""
    from model_zoo.layers.gemm.candidates import candidates
    from model_zoo.layers.gemm.swiglu import swiglu_candidates

    shape = gemm_key.rows, gemm_key.outputs, gemm_key.inputs
    if gemm_key.scheme is not None:
        from model_zoo.layers.quantized_gemm.candidates import quantized_candidates

        options = {"bias": gemm_key.bias, "leaves_scales": gemm_key.leaves_scales}
        return quantized_candidates(device, gemm_key.dtype, *shape, gemm_key.scheme, **options)
    if gemm_key.swiglu:
        return swiglu_candidates(device, *shape, bias=gemm_key.bias)
    return candidates(device, *shape)


def runnable(gemms: Sequence[GemmImpl], rows: int, layer: Linear) -> list[GemmImpl]:
    """The GEMMs whose kernels fit the device, and whose product is that of the first."""
    from triton.runtime.errors import OutOfResources

    x = torch.randn(rows, layer.inputs, dtype=layer.dtype, device=layer.device)
    expected: Tensor | None = None
    found: list[GemmImpl] = []
    for gemm in gemms:
        try:
            product = _ends(gemm.run(x, layer.operand, layer.bias))
        except OutOfResources as error:
            log.debug("%s is not tried: %s", gemm, error)
            continue
        expected = product if expected is None else expected
        off = (product - expected).norm() / expected.norm().clamp(min=1e-30)
        if product is not expected and not off <= LARGEST_ERROR:
            log.warning(
                "%s is not used: its product differs from that of %s by %.0f %%",
                gemm, found[0], 100 * off,
            )  # fmt: skip
            continue
        found.append(gemm)
    return found


def _ends(product: Tensor) -> Tensor:
    """The first rows and the last: of many rows all would take much memory."""
    return torch.cat([product[:MAX_ROWS], product[-MAX_ROWS:]]).float()


def layers_by_key(model: nn.Module) -> dict[GemmKey, list[Linear]]:
    """The layers to tune by key, in tuning order: fewest rows and largest layers first.

    SwiGLU keys of many rows come last, the most rows first.
    """
    layers: dict[GemmKey, list[Linear]] = defaultdict(list)
    for layer in model.modules():
        if not isinstance(layer, Linear) or layer.is_batch_invariant or layer.is_replicated:
            continue
        if supports_kernels(layer.device, layer.dtype):
            gemm_key = GemmKey(
                layer.outputs,
                layer.inputs,
                layer.dtype,
                bias=layer.bias is not None,
                rows=1,
                between_attention_and_experts=layer.between_attention_and_experts,
            )
            if layer.packed is not None:
                gemm_key = replace(
                    gemm_key,
                    scheme=layer.packed.scheme,
                    after=layer.after,
                    leaves_scales=_unscaled(layer) is not None,
                )
            for rows in (*BUCKETS, *_tuned_above(layer)):
                layers[replace(gemm_key, rows=rows)].append(layer)
            if isinstance(layer, SwigluLinear) and layer.packed is None and layer.gate == "silu":
                for rows in SIZES:
                    layers[replace(gemm_key, rows=rows, swiglu=True)].append(layer)

    def order(gemm_key: GemmKey) -> tuple[bool, int, int]:
        rows = -gemm_key.rows if gemm_key.swiglu else gemm_key.rows
        return gemm_key.swiglu, rows, -gemm_key.outputs * gemm_key.inputs * len(layers[gemm_key])

    return {gemm_key: layers[gemm_key] for gemm_key in sorted(layers, key=order)}


def _unscaled(layer: Linear) -> GemmImpl | None:
    """The GEMM that leaves scales to what reads the layer's output, if both can."""
    if not layer.may_leave_scales or layer.packed is None or layer.bias is not None:
        return None
    from model_zoo.layers.quantized_gemm.candidates import unscaled_mm

    return unscaled_mm(*_shape(layer), layer.packed.scheme)


def _tuned_above(layer: Linear) -> tuple[int, ...]:
    """Numbers of rows above BUCKETS to tune, of a quantized weight."""
    if layer.packed is None:
        return ()
    from model_zoo.layers.quantized_gemm.candidates import tuned_above

    options = {"bias": layer.bias is not None, "leaves_scales": _unscaled(layer) is not None}
    return tuned_above(*_shape(layer), layer.packed.scheme, **options)


def _shape(layer: Linear) -> tuple[torch.device, torch.dtype, int, int]:
    return layer.device, layer.dtype, layer.outputs, layer.inputs


def choose(
    layers: Mapping[GemmKey, Sequence[Linear]],
    candidates_of: CandidatesOf,
    times: Times,
    seconds: float,
) -> dict[GemmKey, Sequence[GemmImpl]]:
    """The fastest GEMM for each key within the time limit, cuBLAS unless clearly slower; behind it
    those of nearly_fastest()."""
    began = time.monotonic()
    made: dict[GemmKey, Sequence[GemmImpl]] = {}
    for gemm_key, found in layers.items():
        if time.monotonic() - began > seconds:
            late = len(layers) - len(made)
            log.warning("%d of %d GEMMs are not timed: no time", late, len(layers))
            break
        gemms = candidates_of(gemm_key)
        took = times(found, gemms, gemm_key.rows, gate_of(gemm_key, found))
        better = BETTER_SWIGLU if gemm_key.swiglu else BETTER
        made[gemm_key] = [gemms[at] for at in nearly_fastest(took, better)]
        plain, *others = took
        log.debug("%s: %s, cuBLAS %.1f us, others %s", gemm_key, made[gemm_key][0], plain, others)
    return made


def use(layers: Mapping[GemmKey, Sequence[Linear]], choices: Mapping[GemmKey, GemmImpl]) -> None:
    """Set the chosen GEMMs in the layers."""
    by_layer: dict[tuple[Linear, bool], dict[int, GemmImpl]] = defaultdict(dict)
    for gemm_key, gemm in choices.items():
        for layer in layers[gemm_key]:
            by_layer[layer, gemm_key.swiglu][gemm_key.rows] = gemm
    for (layer, swiglu), by_rows in by_layer.items():
        if swiglu and isinstance(layer, SwigluLinear):
            layer.use_swiglu(by_rows)
        else:
            layer.use_gemms(by_rows)
