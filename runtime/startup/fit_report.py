"""`python -m runtime.startup.fit_report`: what fits on a device and why, without loading weights.

It reads one line of JSON (a `FitQuery`) from stdin.  Exit code 2, with one line on stderr, if the
configuration does not fit.
"""

from __future__ import annotations

import math
import os
import sys
from collections import Counter
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import msgspec
import torch
from msgspec.structs import replace

from attention.backend import UnsupportedAttention
from attention.dispatch import Machine
from model_zoo.checkpoint_layers import CheckpointLayers
from model_zoo.config import ModelConfig, ModelError, read_config
from model_zoo.layers.linear_factory import SchemeOf, unquantized
from model_zoo.layers.quantized_gemm.int8.cpu import Packs, packs_of
from model_zoo.loader import match_checkpoint
from model_zoo.parallel.sharded_checkpoint import open_checkpoint
from model_zoo.parallel.sharded_config import sharded_config
from model_zoo.unsupported.message import explained
from runtime.config import (
    ConfigError,
    DeviceName,
    DTypeName,
    EngineConfig,
    KVDTypeName,
    ModelFacts,
    ResolvedConfig,
    check_ranks,
    resolve,
    step_limits,
)
from runtime.executor.state_store import LANES
from runtime.memory_plan import MemoryPlan, size
from runtime.startup.device import (
    DTYPES,
    KV_DTYPES,
    choose_device,
    choose_dtype,
    choose_kv_dtype,
    free_bytes,
)
from runtime.startup.engine_spec import choose_attention, layers_of
from runtime.startup.fit_ranks import more_ranks, ranks_head, two_ranks
from runtime.startup.memory_bar import FREE, bar_width, memory_bar
from runtime.startup.memory_estimate import (
    CONTEXT_BYTES,
    StepSizes,
    copy_bytes,
    cpu_memory_plan,
    estimate,
    facts_of,
    layout_of,
    parameter_counts,
    weight_bytes,
)

LENGTHS = (2048, 8192, 32_768, 131_072)  # tokens of the requests in the report
MIN_GAIN = 1.02  # a change that brings less is not suggested
FEW_ROWS = 64  # the suggested --max-num-seqs where it is larger


CARD = Machine((9, 0))  # for --card: the compute capability that all kernels support


class FitQuery(msgspec.Struct, frozen=True, kw_only=True):
    config: EngineConfig
    card: int = 0  # bytes of a GPU that need not be present; 0: the device of this machine
    downloaded: bool = False  # the directory is the Hub's cache, and may lack weights


@dataclass(frozen=True, slots=True)
class TargetDevice:
    """The device that the report is for; `free` in bytes."""

    kind: DeviceName
    name: str
    free: int
    dtype: DTypeName
    scheme_of: SchemeOf = unquantized


def target_device(query: FitQuery, config: ModelConfig) -> TargetDevice:
    """The device of this machine, or the GPU of --card."""
    requested = query.config
    if query.card:
        own: DTypeName = "bfloat16" if config.dtype == "bfloat16" else "float16"
        own = "float32" if config.dtype == "float32" else own
        dtype = own if requested.dtype == "auto" else requested.dtype
        free = max(0, query.card - CONTEXT_BYTES)
        name = f"a GPU of {size(query.card)}"
        return TargetDevice("cuda", name, free, dtype, _layers(query, dtype, config).scheme_of)
    device = choose_device(requested.device)
    dtype = choose_dtype(requested.dtype, config.dtype, device, fits_float16=config.fits_float16)
    layers = _layers(query, dtype, config)
    kind: DeviceName = "cuda" if device.type == "cuda" else "cpu"
    name = torch.cuda.get_device_name(device) if kind == "cuda" else "this CPU"
    return TargetDevice(kind, name, free_bytes(device), dtype, layers.scheme_of)


def memory_plan(requested: EngineConfig, config: ModelConfig, target: TargetDevice) -> MemoryPlan:
    """The memory plan of a start; on a GPU, estimates of what a start would measure."""
    dtype = DTYPES[target.dtype]
    if target.kind == "cpu":
        taken = weight_bytes(config, dtype) + copy_bytes(config, dtype)
        return cpu_memory_plan(requested, max(0, target.free - taken))
    rows, tokens = step_limits(requested, target.kind, target.free)
    longest = requested.max_model_len or config.max_position
    if requested.kv_tokens:
        longest = min(longest, requested.kv_tokens + requested.page_size)
    steps = StepSizes(
        tokens=tokens,
        rows=rows,
        max_len=longest,
        page_size=requested.page_size,
        num_groups=len(layout_of(config, requested.max_model_len).groups),
        image_pixels=requested.max_image_pixels,
    )
    plan = estimate(
        config,
        dtype,
        steps,
        free=target.free,
        share=requested.gpu_memory,
        scheme_of=target.scheme_of,
    )
    if requested.prefix_cache:  # recurrent states on their way to and from snapshots
        state_bytes = _facts(requested, config, target).state_bytes
        plan = replace(plan, state=plan.state + LANES * state_bytes)
    return plan


def resolve_config(
    requested: EngineConfig, config: ModelConfig, target: TargetDevice
) -> ResolvedConfig:
    """The configuration with all sizes.  Raises ConfigError."""
    kv_dtype = choose_kv_dtype(requested.kv_dtype, target.dtype)
    return resolve(
        requested,
        _facts(requested, config, target),
        device=target.kind,
        dtype=target.dtype,
        kv_dtype=kv_dtype,
        attention="",
        memory=memory_plan(requested, config, target),
        threads=1,
    )


def _facts(requested: EngineConfig, config: ModelConfig, target: TargetDevice) -> ModelFacts:
    return facts_of(
        config,
        choose_kv_dtype(requested.kv_dtype, target.dtype),
        requested.max_model_len,
        dtype=target.dtype,
        state_dtype=requested.state_dtype,
    )


def report(query: FitQuery) -> str:
    """The fit report as text.  Raises ConfigError, ModelError or UnsupportedAttention."""
    requested = query.config
    check_ranks(requested)
    whole = read_config(Path(requested.model), images=requested.max_image_pixels > 0)
    config = sharded_config(whole, 0, requested.tensor_parallel)
    target = target_device(query, config)
    kv_dtype = choose_kv_dtype(requested.kv_dtype, target.dtype)
    facts = _facts(requested, config, target)
    machine = CARD if query.card else Machine.of(choose_device(requested.device))
    choose_attention(requested, config, target.dtype, machine)
    plan = memory_plan(requested, config, target)
    parts = [*_checkpoint(query, config, target), *_parts(plan, config, target)]
    try:
        resolved = resolve_config(requested, config, target)
    except ConfigError as error:
        print("\n".join([*_head(config, target, requested), *parts]))
        others = ""
        if target.kind == "cuda":
            ranks = requested.tensor_parallel
            least = max(ranks + 1, math.ceil(ranks * plan.weights / (plan.free * plan.share or 1)))
            others = more_ranks(least, partial(_with_ranks, query, whole))
        raise ConfigError(f"{error}{others}") from None
    kv = resolved.num_pages * resolved.page_size * facts.kv_bytes_per_token
    parts.append(_line("KV", size(kv), f"{_token_bytes(config, kv_dtype)}; all that remains"))
    states = resolved.num_states * facts.state_bytes
    if states:
        each = f"{resolved.num_states} recurrent states of {size(facts.state_bytes)}; exact"
        parts.append(_line("states", size(states), each))
    if target.kind == "cuda":
        parts.append(_line("unused", size(plan.free - plan.fixed - kv - states), ""))
    lines = [*_head(config, target, requested), *_bar(plan, kv, states, config, target), *parts]
    lines += _fits(resolved)
    lines += _changes(requested, config, target, resolved)
    if target.kind == "cuda" and requested.tensor_parallel == 1 and not requested.kv_tokens:
        lines += two_ranks(resolved, partial(_with_ranks, query, whole))
    if target.kind == "cuda":
        lines.append("`wavefill serve` measures what is estimated here, and gives KV what is left")
    return "\n".join(lines)


def _head(config: ModelConfig, target: TargetDevice, requested: EngineConfig) -> list[str]:
    whole = config.whole or config
    count, active = parameter_counts(whole)
    number = f"{_millions(count)} parameters"
    if config.moe is not None:
        number += f", {_millions(active)} active"
    heads = f"{whole.num_heads} heads of {whole.head_dim}, {whole.num_kv_heads} of KV"
    share = "" if target.kind == "cuda" else "half of "
    return [
        f"{config.model_type}: {number}, {_layer_kinds(config)}, "
        f"hidden {config.hidden_size}, {heads}, vocabulary {config.vocab_size:,}",
        *ranks_head(requested.tensor_parallel),
        f"{target.name}: {size(target.free)} free; --gpu-memory "
        f"{requested.gpu_memory:g} of {share}it "
        "may be used",
    ]


def _with_ranks(query: FitQuery, whole: ModelConfig, ranks: int) -> ResolvedConfig | None:
    """The configuration with so many ranks; None if the model cannot be divided so, or does not
    fit."""
    requested = replace(query.config, tensor_parallel=ranks)
    try:
        config = sharded_config(whole, 0, ranks)
        target = target_device(replace(query, config=requested), config)
        return resolve_config(requested, config, target)
    except (ConfigError, ModelError):
        return None


def _millions(count: int) -> str:
    return f"{count / 1e9:.2f} billion" if count >= 1e8 else f"{count / 1e6:.1f} million"


def _checkpoint(query: FitQuery, config: ModelConfig, target: TargetDevice) -> list[str]:
    """What the headers of the safetensors files say, where there are any.

    Raises ModelError for the files of a directory that config.json does not describe.
    """
    directory = Path(query.config.model)
    if query.config.load_format == "dummy" or not any(directory.glob("*.safetensors")):
        return []
    try:
        checkpoint = open_checkpoint(directory, config)
        packs = _packs(query, target.dtype)
        layers = layers_of(query.config, packs=packs, config=config)
        matched = match_checkpoint(config, DTYPES[target.dtype], checkpoint, layers, directory)
    except ModelError as error:
        if query.downloaded:  # a start downloads what is missing
            return [_line("checkpoint", "incomplete", str(error).partition(": ")[2])]
        raise
    found = [each.source for each in matched.targets]
    kinds = ", ".join(sorted({str(each.dtype).removeprefix("torch.") for each in found}))
    files = len({each.path for each in found})
    note = f"{len(found)} tensors of {files} {'file' if files == 1 else 'files'} in {kinds}"
    return [_line("checkpoint", size(sum(each.num_bytes for each in found)), f"{note}; exact")]


def _bar(
    plan: MemoryPlan, kv: int, states: int, config: ModelConfig, target: TargetDevice
) -> list[str]:
    """The memory that is free now, divided; nothing where no person looks at it."""
    width = bar_width()
    if not width:
        return []
    dtype = DTYPES[target.dtype]
    parts = [("weights", weight_bytes(config, dtype, target.scheme_of))]
    if target.kind == "cpu":
        parts.append(("copies", copy_bytes(config, dtype)))
    parts += [("state", plan.state), ("activations", plan.activations), ("graphs", plan.graphs)]
    parts += [("KV", kv), ("states", states)]
    parts.append((FREE, max(0, target.free - sum(count for _, count in parts))))
    return [memory_bar(parts, width, colour=not os.environ.get("NO_COLOR"))]


def _packs(query: FitQuery, dtype: DTypeName) -> Packs:
    """Which packed weights the device would multiply, as CheckpointLayers.open."""
    if query.card:
        return dtype != "float32"
    return packs_of(choose_device(query.config.device), DTYPES[dtype])


def _layers(query: FitQuery, dtype: DTypeName, config: ModelConfig) -> CheckpointLayers:
    """As layers_of; of a download that is not complete, by config.json alone."""
    packs = _packs(query, dtype)
    try:
        return layers_of(query.config, packs=packs, config=config)
    except ModelError:
        if not query.downloaded:
            raise
        without = replace(query.config, load_format="dummy")
        return layers_of(without, packs=packs, config=config)


def _layer_kinds(config: ModelConfig) -> str:
    counts = Counter(spec.window for spec in config.attention_specs if spec.window)
    windows = [f"{count} with a window of {window:,}" for window, count in sorted(counts.items())]
    if config.delta_net is not None:
        windows.insert(0, f"{len(config.delta_net.layers)} of them gated delta nets")
    return ", ".join([f"{config.num_layers} layers", *windows])


def _parts(plan: MemoryPlan, config: ModelConfig, target: TargetDevice) -> list[str]:
    others = [
        f"{size(weight_bytes(config, DTYPES[name]))} in {name}"
        for name in ("float32", "bfloat16")
        if DTYPES[name].itemsize != DTYPES[target.dtype].itemsize
    ]
    stored = weight_bytes(config, DTYPES[target.dtype], target.scheme_of)
    plain = weight_bytes(config, DTYPES[target.dtype])
    named = target.dtype
    if stored != plain:
        named = f"quantized; {size(plain)} in {target.dtype}"
    lines = [_line("weights", size(stored), f"{named}; {', '.join(others)}; exact")]
    if target.kind == "cpu" and (copies := copy_bytes(config, DTYPES[target.dtype])):
        lines.append(_line("copies", size(copies), "the LM head, repacked for GEMMs; exact"))
    reasons = {
        "state": (plan.state, "sequence slots and attention plans; estimated"),
        "activations": (plan.activations, "peak of the largest step, and libraries; estimated"),
        "graphs": (plan.graphs, "CUDA graphs; estimated"),
    }
    return lines + [_line(name, size(n), why) for name, (n, why) in reasons.items() if n]


def _line(name: str, amount: str, why: str) -> str:
    return f"  {name:<11} {amount:>11}   {why}".rstrip()


def _token_bytes(config: ModelConfig, kv_dtype: KVDTypeName) -> str:
    """The KV of a token, and how much of it only the last positions have."""
    each, specs = config.kv_bytes_per_token(KV_DTYPES[kv_dtype].itemsize), config.attention_specs
    within = sum(1 for spec in specs if spec.window) * each // len(specs)
    windows = f", {size(within)} of it only within a window" if within else ""
    return f"{size(each)} a token in {kv_dtype}{windows}"


def _fits(resolved: ResolvedConfig) -> list[str]:
    longest, capacity, pages = resolved.max_model_len, resolved.kv_capacity, resolved.num_pages
    tokens = capacity.tokens(pages, longest)
    lengths = [length for length in LENGTHS if length < longest]
    states = resolved.num_states or resolved.max_num_seqs
    most = resolved.num_states or math.inf
    requests = [
        f"{min(capacity.requests(pages, length), most):,.1f} of {length:,}"
        for length in [*lengths, longest]
    ]
    running = min(resolved.max_num_seqs, states)
    return [
        f"KV holds {tokens:,} tokens, enough for this many requests: {', '.join(requests)}",
        f"limits: {longest:,} tokens a request, {running} running, "
        f"{resolved.max_batched_tokens:,} tokens a step",
    ]


def _changes(
    requested: EngineConfig, config: ModelConfig, target: TargetDevice, resolved: ResolvedConfig
) -> list[str]:
    """Changes that would hold more tokens, each alone."""
    if requested.kv_tokens:
        return []
    tried = {
        "--kv-dtype fp8_e4m3": replace(requested, kv_dtype="fp8_e4m3"),
        "--gpu-memory 0.95": replace(requested, gpu_memory=0.95),
    }
    tokens = max(2048, resolved.max_num_seqs)
    if target.kind == "cuda" and tokens < resolved.max_batched_tokens:
        tried[f"--max-batched-tokens {tokens}"] = replace(requested, max_batched_tokens=tokens)
    if target.kind == "cuda" and resolved.max_num_seqs > FEW_ROWS:
        tried[f"--max-num-seqs {FEW_ROWS}"] = replace(requested, max_num_seqs=FEW_ROWS)
    lines: list[str] = []
    for name, changed in tried.items():
        other = resolve_config(changed, config, target)
        if other.num_pages > MIN_GAIN * resolved.num_pages:
            tokens = other.kv_capacity.tokens(other.num_pages, other.max_model_len)
            lines.append(f"  with {name}: {tokens:,} tokens")
    return lines


def main() -> None:
    query = msgspec.json.decode(sys.stdin.readline(), type=FitQuery)
    try:
        print(report(query))
    except (ConfigError, ModelError, UnsupportedAttention) as error:
        print(f"error: {explained(error)}", file=sys.stderr)
        raise SystemExit(2) from None


if __name__ == "__main__":
    main()
