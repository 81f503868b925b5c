"""`python -m runtime.startup.fit_report`: what fits on a device and why, without loading weights.

It reads one line of JSON (a `FitQuery`) from stdin.  Exit code 2, with one line on stderr, if the
configuration does not fit.
"""

from __future__ import annotations

import math
import os
import sys
from collections import Counter
from functools import partial
from pathlib import Path

import msgspec
from msgspec.structs import replace

from attention.backend import UnsupportedAttention
from attention.dispatch import Machine
from model_zoo.config import ModelConfig, ModelError, read_config
from model_zoo.loader import match_checkpoint
from model_zoo.parallel.sharded_checkpoint import open_checkpoint
from model_zoo.unsupported.message import explained
from runtime.config import ConfigError, EngineConfig, KVDTypeName, ResolvedConfig
from runtime.memory_plan import MemoryPlan, size
from runtime.startup.device import DTYPES, KV_DTYPES, choose_device, choose_kv_dtype
from runtime.startup.engine_spec import choose_attention, layers_of
from runtime.startup.fit.ranks import (
    MAX_RANKS,
    RankChoice,
    choose_ranks,
    more_ranks,
    ranks_head,
    two_ranks,
    visible_gpus,
)
from runtime.startup.fit.target import (
    FitQuery,
    TargetDevice,
    cpu_processes,
    least_ranks,
    memory_plan,
    model_facts,
    packs_for,
    rank_config,
    resolve_config,
    target_device,
    with_ranks,
)
from runtime.startup.memory_bar import FREE, bar_width, memory_bar
from runtime.startup.memory_estimate import copy_bytes, parameter_counts, weight_bytes

LENGTHS = (2048, 8192, 32_768, 131_072)  # tokens of the requests in the report
MIN_GAIN = 1.02  # a change that brings less is not suggested
FEW_ROWS = 64  # the suggested --max-num-seqs where it is larger
CARD = Machine((9, 0))  # for --card: the compute capability that all kernels support


def report(query: FitQuery) -> str:
    """The fit report as text.  Raises ConfigError, ModelError or UnsupportedAttention."""
    whole = read_config(Path(query.config.model), images=query.config.max_image_pixels > 0)
    query, choice = _with_chosen_ranks(query, whole)
    requested = query.config
    config = rank_config(requested, whole)
    target = target_device(query, config)
    kv_dtype = choose_kv_dtype(requested.kv_dtype, target.dtype)
    facts = model_facts(requested, config, target)
    machine = CARD if query.card else Machine.of(choose_device(requested.device))
    choose_attention(requested, config, target.dtype, machine)
    plan = memory_plan(requested, config, target)
    parts = _checkpoint(query, config, target) + _parts(plan, config, target, requested)
    try:
        resolved = resolve_config(requested, config, target)
    except ConfigError as error:
        print("\n".join([*_head(config, target, requested, choice), *parts]))
        others = ""
        if target.kind == "cuda":
            of = partial(with_ranks, query, whole)
            others = more_ranks(requested.tensor_parallel, plan, of)
        raise ConfigError(f"{error}{others}") from None
    kv = resolved.num_pages * resolved.page_size * facts.kv_bytes_per_token
    states = resolved.num_states * facts.state_bytes
    remains = plan.for_kv - states - kv < resolved.page_size * facts.kv_bytes_per_token
    limit = _kv_limit(requested, remains=remains)
    parts.append(_line("KV", size(kv), f"{_token_bytes(config, kv_dtype)}; {limit}"))
    if states:
        each = f"{resolved.num_states} recurrent states of {size(facts.state_bytes)}; exact"
        parts.append(_line("states", size(states), each))
    if target.kind == "cuda":
        parts.append(_line("unused", size(plan.free - plan.fixed - kv - states), ""))
    lines = _head(config, target, requested, choice)
    lines += [*_bar(plan, kv, states, config, target), *parts]
    lines += _fits(resolved)
    lines += _changes(requested, config, target, resolved)
    if target.kind == "cuda" and requested.tensor_parallel == 1 and not requested.kv_tokens:
        lines += two_ranks(resolved, partial(with_ranks, query, whole))
    if target.kind == "cuda":
        gives = ", and gives KV what is left" if remains and not requested.kv_tokens else ""
        lines.append(f"`wavefill serve` measures what is estimated here{gives}")
    return "\n".join(lines)


def _kv_limit(requested: EngineConfig, *, remains: bool) -> str:
    """Why there is so much KV; remains: no page more has room."""
    if requested.kv_tokens:
        return "as --kv-tokens says"
    return "all that remains" if remains else "all that the requests can use"


def _with_chosen_ranks(query: FitQuery, whole: ModelConfig) -> tuple[FitQuery, RankChoice | None]:
    """With the number of ranks, and why, where --tensor-parallel auto leaves it open."""
    if query.config.tensor_parallel:
        return query, None
    gpus = 0 if query.card else visible_gpus(query.config)
    most = MAX_RANKS if query.card else min(gpus, max(1, gpus // query.config.data_parallel))
    of, least = partial(with_ranks, query, whole), partial(least_ranks, query, whole)
    choice = choose_ranks(query.config, whole, most, of, least)
    return replace(query, config=replace(query.config, tensor_parallel=choice.ranks)), choice


def _head(
    config: ModelConfig, target: TargetDevice, requested: EngineConfig, choice: RankChoice | None
) -> list[str]:
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
        *ranks_head(requested, choice),
        f"{target.name}: {size(target.free)} free; --gpu-memory "
        f"{requested.gpu_memory:g} of {share}it "
        "may be used",
    ]


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
        packs = packs_for(query, target.dtype)
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


def _layer_kinds(config: ModelConfig) -> str:
    counts = Counter(spec.window for spec in config.attention_specs if spec.window)
    windows = [f"{count} with a window of {window:,}" for window, count in sorted(counts.items())]
    if config.delta_net is not None:
        windows.insert(0, f"{len(config.delta_net.layers)} of them gated delta nets")
    return ", ".join([f"{config.num_layers} layers", *windows])


def _parts(
    plan: MemoryPlan, config: ModelConfig, target: TargetDevice, requested: EngineConfig
) -> list[str]:
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
    if target.kind == "cpu" and (processes := cpu_processes(requested)) > 1:
        named = f"in each of {processes} processes; {named}"
    lines = [_line("weights", size(stored), f"{named}; {', '.join(others)}; exact")]
    if target.kind == "cpu" and (copies := copy_bytes(config, DTYPES[target.dtype])):
        lines.append(_line("copies", size(copies), "the LM head, repacked for GEMMs; exact"))
    state = "sequence slots and attention plans"
    if requested.tensor_parallel > 1:
        state = "sequence slots, attention plans, buffers of sums over ranks"
    reasons = {
        "state": (plan.state, f"{state}; estimated"),
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
    }
    if requested.gpu_memory < 0.95:
        tried["--gpu-memory 0.95"] = replace(requested, gpu_memory=0.95)
    tokens = max(2048, resolved.max_num_seqs)
    if target.kind == "cuda" and tokens < resolved.max_batched_tokens:
        tried[f"--max-batched-tokens {tokens}"] = replace(requested, max_batched_tokens=tokens)
    few = min(FEW_ROWS, resolved.num_states or FEW_ROWS)
    if target.kind == "cuda" and resolved.max_num_seqs > few:
        tried[f"--max-num-seqs {few}"] = replace(requested, max_num_seqs=few)
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
