"""EngineConfig (what was asked for, "auto" allowed) -> resolve() -> Resolved (no question left).

Both are frozen and hold plain values only, so that they travel as JSON between processes.
"""

from __future__ import annotations

from typing import Literal

from msgspec import Struct

Device = Literal["auto", "cpu", "cuda"]
DType = Literal["auto", "float32", "bfloat16", "float16"]
Attention = Literal["auto", "mha", "flash1", "flash2"]
SplitPlanner = Literal["auto", "fa3", "greedy", "uneven"]
KVDType = Literal["auto", "fp8_e4m3"]
KVDTypeName = Literal["float32", "bfloat16", "float16", "fp8_e4m3"]
LoadFormat = Literal["auto", "dummy"]


class ConfigError(ValueError):
    """The configuration cannot work; the message names the value, the limit and the remedy."""


class EngineConfig(Struct, frozen=True, kw_only=True):
    """What the operator asked for.  0 means: derive it."""

    model: str  # a local directory
    device: Device = "auto"
    dtype: DType = "auto"
    attention: Attention = "auto"
    split_planner: SplitPlanner = "auto"
    kv_dtype: KVDType = "auto"  # auto: that of the weights
    load_format: LoadFormat = "auto"
    max_model_len: int = 0
    max_num_seqs: int = 0
    max_batched_tokens: int = 0
    page_size: int = 16
    itl_target_ms: float = 0.0  # between two tokens of a sequence while others' prompts run
    kv_tokens: int = 0  # capacity of the KV pool in tokens; 0: what the memory allows
    gpu_memory: float = 0.9  # share of what is free; on a CPU of the half of it
    prefix_cache: bool = True
    threads: int = 0  # compute threads on a CPU
    seed: int = 0


class ModelFacts(Struct, frozen=True, kw_only=True):
    """The numbers of a model that a memory plan needs."""

    model_type: str
    max_position: int
    vocab_size: int
    kv_bytes_per_token: int


class Resolved(Struct, frozen=True, kw_only=True):
    """What the engine runs with."""

    model: str
    device: Literal["cpu", "cuda"]
    dtype: Literal["float32", "bfloat16", "float16"]
    kv_dtype: KVDTypeName
    attention: str
    load_format: LoadFormat
    max_model_len: int
    max_num_seqs: int
    max_batched_tokens: int
    page_size: int
    num_pages: int
    prefix_cache: bool
    threads: int
    seed: int
    itl_target_ms: float = 0.0  # 0: none was asked for

    @property
    def max_pages_per_seq(self) -> int:
        return -(-self.max_model_len // self.page_size)


def resolve(
    wanted: EngineConfig,
    facts: ModelFacts,
    *,
    device: Literal["cpu", "cuda"],
    dtype: Literal["float32", "bfloat16", "float16"],
    kv_dtype: KVDTypeName,
    attention: str,
    kv_budget_bytes: int,
    threads: int,
) -> Resolved:
    """Settle every number.  `kv_budget_bytes` is the memory left for KV after the weights.

    Raises ConfigError if a wish exceeds what the model or the memory allows.
    """
    if wanted.page_size not in (16, 32, 64, 128):
        raise ConfigError(f"--page-size {wanted.page_size}: choose one of 16, 32, 64, 128")
    if wanted.max_model_len > facts.max_position:
        raise ConfigError(
            f"--max-model-len {wanted.max_model_len} exceeds the {facts.max_position} positions "
            f"of this {facts.model_type} model: lower it, or leave it out to use the model's limit"
        )
    on_gpu = device == "cuda"
    budget = wanted.max_batched_tokens
    max_num_seqs = wanted.max_num_seqs or min(256 if on_gpu else 64, budget or 256)
    max_batched_tokens = budget or max(8192 if on_gpu else 512, max_num_seqs)
    if max_batched_tokens < max_num_seqs:
        raise ConfigError(
            f"--max-batched-tokens {max_batched_tokens} is less than --max-num-seqs "
            f"{max_num_seqs}, of which each may need a token in every step: raise the one or "
            "lower the other"
        )
    longest = wanted.max_model_len or facts.max_position
    page_bytes = wanted.page_size * facts.kv_bytes_per_token
    num_pages = _num_pages(wanted, longest, max_num_seqs, page_bytes, kv_budget_bytes)
    max_model_len = min(longest, num_pages * wanted.page_size)
    if max_model_len < 2:
        raise ConfigError(
            f"KV pool: no page of {page_bytes} bytes fits in {kv_budget_bytes} bytes after the "
            "weights: use a smaller model, a smaller --page-size or a larger --gpu-memory"
        )
    return Resolved(
        model=wanted.model,
        device=device,
        dtype=dtype,
        kv_dtype=kv_dtype,
        attention=attention,
        load_format=wanted.load_format,
        max_model_len=max_model_len,
        max_num_seqs=max_num_seqs,
        max_batched_tokens=max_batched_tokens,
        page_size=wanted.page_size,
        num_pages=num_pages,
        prefix_cache=wanted.prefix_cache,
        threads=threads,
        seed=wanted.seed,
        itl_target_ms=wanted.itl_target_ms,
    )


def _num_pages(
    wanted: EngineConfig, longest: int, max_num_seqs: int, page_bytes: int, kv_budget_bytes: int
) -> int:
    """Pages of KV; `longest` is the length of a sequence that --max-model-len or the model allows.

    Raises ConfigError if they do not fit, or do not hold a sequence of --max-model-len.
    """
    fits = kv_budget_bytes // page_bytes
    if wanted.kv_tokens:
        num_pages = -(-wanted.kv_tokens // wanted.page_size)
        if num_pages > fits:
            raise ConfigError(
                f"--kv-tokens {wanted.kv_tokens} needs {num_pages * page_bytes / 2**30:.2f} GiB, "
                f"{kv_budget_bytes / 2**30:.2f} GiB are left after the weights: "
                f"ask for at most {fits * wanted.page_size}"
            )
    else:
        # More pages than every slot at full length could use would only waste memory.
        num_pages = min(fits, max_num_seqs * -(-longest // wanted.page_size))
    if wanted.max_model_len and num_pages * wanted.page_size < longest:
        raise ConfigError(
            f"KV pool: {num_pages} pages of {wanted.page_size} tokens fit in "
            f"{kv_budget_bytes / 2**30:.2f} GiB, one request of --max-model-len {longest} needs "
            f"{-(-longest // wanted.page_size)}: lower --max-model-len to "
            f"{num_pages * wanted.page_size}, or raise --kv-tokens or --gpu-memory"
        )
    return num_pages
