"""`python -m runtime.startup.fit_report`: what fits on a device and why, without loading weights.

It reads one line of JSON (a `Question`) from stdin.  Exit code 2, with one line on stderr, if the
wish cannot be met.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path

import msgspec
import torch
from msgspec.structs import replace

from attention.backend import UnsupportedAttention
from attention.dispatch import Machine
from model_zoo.config import ModelConfig, ModelError, read_config
from runtime.config import (
    ConfigError,
    DeviceName,
    DTypeName,
    EngineConfig,
    Resolved,
    resolve,
    step_limits,
)
from runtime.memory_plan import MemoryPlan, size
from runtime.startup.device import (
    DTYPES,
    choose_device,
    choose_dtype,
    choose_kv_dtype,
    free_bytes,
)
from runtime.startup.engine_spec import choose_attention
from runtime.startup.memory_estimate import (
    CONTEXT_BYTES,
    StepSizes,
    copy_bytes,
    cpu_plan,
    estimate,
    facts_of,
    weight_bytes,
)

LENGTHS = (2048, 8192, 32_768, 131_072)  # of requests, to show what fits
WORTH = 1.02  # a change that brings less is not named
FEW_ROWS = 64  # that may run, where more are asked for


CARD = Machine((9, 0))  # of a GPU that need not be there, the kind that every kernel serves


class Question(msgspec.Struct, frozen=True, kw_only=True):
    config: EngineConfig
    card: int = 0  # bytes of a GPU that need not be there; 0: the device of this machine


@dataclass(frozen=True, slots=True)
class Place:
    """Where the model is to run."""

    kind: DeviceName
    name: str
    free: int
    dtype: DTypeName


def place_of(question: Question, config: ModelConfig) -> Place:
    """The device of this machine, or the card that was named."""
    wanted = question.config
    if question.card:
        own: DTypeName = "bfloat16" if config.dtype == "bfloat16" else "float16"
        own = "float32" if config.dtype == "float32" else own
        dtype = own if wanted.dtype == "auto" else wanted.dtype
        free = max(0, question.card - CONTEXT_BYTES)
        return Place("cuda", f"a GPU of {size(question.card)}", free, dtype)
    device = choose_device(wanted.device)
    dtype = choose_dtype(wanted.dtype, config.dtype, device)
    if device.type == "cuda":
        return Place("cuda", torch.cuda.get_device_name(device), free_bytes(device), dtype)
    return Place("cpu", "this CPU", free_bytes(device), dtype)


def memory_plan(wanted: EngineConfig, config: ModelConfig, place: Place) -> MemoryPlan:
    """What a start would come to: reckoned, where a start on a GPU would measure."""
    dtype = DTYPES[place.dtype]
    if place.kind == "cpu":
        taken = weight_bytes(config, dtype) + copy_bytes(config, dtype)
        return cpu_plan(wanted, max(0, place.free - taken))
    rows, tokens = step_limits(wanted, place.kind, place.free)
    longest = wanted.max_model_len or config.max_position
    if wanted.kv_tokens:
        longest = min(longest, wanted.kv_tokens + wanted.page_size)
    steps = StepSizes(tokens=tokens, rows=rows, max_len=longest, page_size=wanted.page_size)
    return estimate(config, dtype, steps, free=place.free, share=wanted.gpu_memory)


def settle(wanted: EngineConfig, config: ModelConfig, place: Place) -> Resolved:
    """Raises ConfigError."""
    kv_dtype = choose_kv_dtype(wanted.kv_dtype, place.dtype)
    return resolve(
        wanted,
        facts_of(config, kv_dtype),
        device=place.kind,
        dtype=place.dtype,
        kv_dtype=kv_dtype,
        attention="",
        memory=memory_plan(wanted, config, place),
        threads=1,
    )


def report(question: Question) -> str:
    """What fits, as a table.  Raises ConfigError, ModelError or UnsupportedAttention."""
    wanted = question.config
    config = read_config(Path(wanted.model))
    place = place_of(question, config)
    facts = facts_of(config, choose_kv_dtype(wanted.kv_dtype, place.dtype))
    machine = CARD if question.card else Machine.of(choose_device(wanted.device))
    choose_attention(wanted, config, place.dtype, machine)
    plan = memory_plan(wanted, config, place)
    parts = _parts(plan, config, place)
    try:
        resolved = settle(wanted, config, place)
    except ConfigError as error:
        print("\n".join([*_head(config, place, wanted), *parts]))
        raise error
    kv = resolved.num_pages * resolved.page_size * facts.kv_bytes_per_token
    each = size(facts.kv_bytes_per_token)
    parts.append(_line("KV", size(kv), f"{each} a token in {resolved.kv_dtype}, the rest"))
    if place.kind == "cuda":
        parts.append(_line("left", size(plan.free - plan.fixed - kv), "not used"))
    lines = [*_head(config, place, wanted), *parts, *_fits(resolved)]
    lines += _changes(wanted, config, place, resolved)
    if place.kind == "cuda":
        lines.append("`wavefill serve` measures what is estimated here, and gives KV what is left")
    return "\n".join(lines)


def _head(config: ModelConfig, place: Place, wanted: EngineConfig) -> list[str]:
    count = weight_bytes(config, torch.int8)
    number = f"{count / 1e9:.2f} billion" if count >= 1e8 else f"{count / 1e6:.1f} million"
    heads = f"{config.num_heads} heads of {config.head_dim}, {config.num_kv_heads} of KV"
    share = "" if place.kind == "cuda" else "half of "
    return [
        f"{config.model_type}: {number} parameters, {config.num_layers} layers, "
        f"hidden {config.hidden_size}, {heads}, vocabulary {config.vocab_size:,}",
        f"{place.name}: {size(place.free)} free; --gpu-memory {wanted.gpu_memory:g} of {share}it "
        "may be used",
    ]


def _parts(plan: MemoryPlan, config: ModelConfig, place: Place) -> list[str]:
    others = [
        f"{size(weight_bytes(config, DTYPES[name]))} in {name}"
        for name in ("float32", "bfloat16")
        if DTYPES[name].itemsize != DTYPES[place.dtype].itemsize
    ]
    weights = size(weight_bytes(config, DTYPES[place.dtype]))
    lines = [_line("weights", weights, f"{place.dtype}; {', '.join(others)}; exact")]
    if place.kind == "cpu" and (copies := copy_bytes(config, DTYPES[place.dtype])):
        lines.append(_line("copies", size(copies), "the head, laid out for products; exact"))
    reasons = {
        "state": (plan.state, "slots of sequences and plans of attention; estimated"),
        "work": (plan.work, "the largest step, and libraries; estimated"),
        "graphs": (plan.graphs, "captured steps; estimated"),
    }
    return lines + [_line(name, size(n), why) for name, (n, why) in reasons.items() if n]


def _line(name: str, amount: str, why: str) -> str:
    return f"  {name:<8} {amount:>11}   {why}"


def _fits(resolved: Resolved) -> list[str]:
    tokens, longest = resolved.num_pages * resolved.page_size, resolved.max_model_len
    lengths = [length for length in LENGTHS if length < longest]
    requests = [f"{tokens / length:,.1f} of {length:,}" for length in [*lengths, longest]]
    return [
        f"KV holds {tokens:,} tokens, enough for this many requests: {', '.join(requests)}",
        f"limits: {longest:,} tokens a request, {resolved.max_num_seqs} running, "
        f"{resolved.max_batched_tokens:,} tokens a step",
    ]


def _changes(
    wanted: EngineConfig, config: ModelConfig, place: Place, resolved: Resolved
) -> list[str]:
    """What would hold more, each change alone."""
    if wanted.kv_tokens:
        return []
    tried = {
        "--kv-dtype fp8_e4m3": replace(wanted, kv_dtype="fp8_e4m3"),
        "--gpu-memory 0.95": replace(wanted, gpu_memory=0.95),
    }
    tokens = max(2048, resolved.max_num_seqs)
    if place.kind == "cuda" and tokens < resolved.max_batched_tokens:
        tried[f"--max-batched-tokens {tokens}"] = replace(wanted, max_batched_tokens=tokens)
    if place.kind == "cuda" and resolved.max_num_seqs > FEW_ROWS:
        tried[f"--max-num-seqs {FEW_ROWS}"] = replace(wanted, max_num_seqs=FEW_ROWS)
    lines: list[str] = []
    for name, changed in tried.items():
        other = settle(changed, config, place)
        if other.num_pages > WORTH * resolved.num_pages:
            lines.append(f"  with {name}: {other.num_pages * other.page_size:,} tokens")
    return lines


def main() -> None:
    question = msgspec.json.decode(sys.stdin.readline(), type=Question)
    try:
        print(report(question))
    except (ConfigError, ModelError, UnsupportedAttention) as error:
        print(f"error: {error}", file=sys.stderr)
        raise SystemExit(2) from None


if __name__ == "__main__":
    main()
