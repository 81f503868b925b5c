"""EngineConfig (as requested, "auto" allowed) -> resolve() -> ResolvedConfig (every value set).

Both are frozen and hold plain values only, so that they travel as JSON between processes.
"""

from __future__ import annotations

from typing import Literal

from msgspec import Struct
from msgspec.structs import replace

from runtime.kv_capacity import KVCapacity
from runtime.memory_plan import MemoryPlan, remedies, size

DeviceOption = Literal["auto", "cpu", "cuda"]
DeviceName = Literal["cpu", "cuda"]
DType = Literal["auto", "float32", "bfloat16", "float16"]
DTypeName = Literal["float32", "bfloat16", "float16"]
AttentionOption = Literal["auto", "mha", "flash1", "flash2", "batch-invariant"]
SplitPlanner = Literal["auto", "fa3", "greedy", "stream-k"]
KVDType = Literal["auto", "fp8_e4m3"]
StateDType = Literal["auto", "float32", "bfloat16"]
KVDTypeName = Literal["float32", "bfloat16", "float16", "fp8_e4m3"]
LoadFormat = Literal["auto", "dummy"]
Quantization = Literal["auto", "fp8"]
PAGE_SIZES = (16, 32, 64, 128)
MAX_SEQS, MAX_TOKENS = 65535, 1 << 20  # of a step: the y of a CUDA grid; more gains no speed
SNAPSHOT_UNIT = 64  # as many tokens as kernels for prompts handle at once
DEFAULT_SNAPSHOT_BYTES: dict[DeviceName, int] = {"cpu": 1 << 30, "cuda": 4 << 30}
STATE_SHARE = 0.4  # of the memory for KV and recurrent states, at most, unless --kv-tokens is given
LEAST_STATES = 2  # a sequence with a grammar has two
SEQS_OF_A_SPARE_STATE = 8
MAX_IMAGE_PIXELS = 4 << 20  # of an image that the model sees
IMAGE_CACHE_BYTES = 512 << 20  # of features; one image's may be more
LARGE_GPU_BYTES = 32 << 30  # free: then the activations of 8192 tokens are a small part of it


class ConfigError(ValueError):
    """The configuration cannot work; the message names the value, the limit and the remedy."""


class EngineConfig(Struct, frozen=True, kw_only=True):
    """The configuration as the operator requested it.  0 means: derive it."""

    model: str  # a local directory
    device: DeviceOption = "auto"
    data_parallel: int = 1  # engines of the server; those on a CPU share its cores and memory
    dtype: DType = "auto"
    attention: AttentionOption = "auto"
    deterministic: bool = False  # batch-invariant: no bit of an answer depends on the batch
    split_planner: SplitPlanner = "auto"
    kv_dtype: KVDType = "auto"  # auto: that of the weights
    calculate_kv_scales: bool = False  # of fp8 pages, where the checkpoint has none
    snapshot_every: int = 4096  # tokens of a prompt between two snapshots of recurrent states
    snapshot_bytes: int = 0  # of host memory for them
    state_dtype: StateDType = "auto"  # of recurrent states; auto: float32
    load_format: LoadFormat = "auto"
    quantization: Quantization = "auto"  # auto: as the checkpoint is stored
    max_model_len: int = 0
    max_num_seqs: int = 0
    max_batched_tokens: int = 0
    page_size: int = 16
    max_image_pixels: int = MAX_IMAGE_PIXELS  # that it sees of an image; 0: text alone
    itl_target_ms: float = 0.0  # inter-token latency while other requests are prefilled
    kv_tokens: int = 0  # that KV pages of every layer hold; 0: what the memory allows
    gpu_memory: float = 0.9  # share of the free memory; on a CPU, of half of it
    prefix_cache: bool = True
    threads: int = 0  # compute threads on a CPU, of each rank
    expert_parallel: bool = False  # a rank has whole experts, not a part of each
    disable_custom_all_reduce: bool = False  # ranks add their products by NCCL alone
    tensor_parallel: int = 1  # ranks, each with a part of every layer; 0: as many as it needs
    seed: int = 0


# What --tensor-parallel auto says where it chooses 1 and --expert-parallel is given.
UNDIVIDED_EXPERTS = "; --expert-parallel changes nothing there"


class ModelFacts(Struct, frozen=True, kw_only=True):
    """The numbers of a model that a memory plan needs."""

    model_type: str
    max_position: int
    vocab_size: int
    kv_bytes_per_token: int  # of a page: of as many layers as share one
    group_windows: tuple[int, ...] = (0,)  # as in ResolvedConfig
    state_bytes: int = 0  # of a sequence's recurrent state; 0: the model has none
    image_token_side: int = 0  # as in ResolvedConfig, and
    image_token_bytes: int = 0
    encoder_stages: tuple[tuple[float, float], ...] = ()


class ResolvedConfig(Struct, frozen=True, kw_only=True):
    """The configuration that the engine runs with."""

    model: str
    device: DeviceName
    dtype: DTypeName
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
    itl_target_ms: float = 0.0  # 0: automatic
    full_wave_sizes: tuple[int, ...] = ()  # tokens of steps whose GEMMs fill the device
    # Of each group of layers that share pages: the positions that a query sees, 0 for all.
    group_windows: tuple[int, ...] = (0,)
    num_snapshots: int = 0  # of recurrent states, in host memory
    snapshot_every: int = 4096  # tokens of a prompt from one of them to the next
    num_states: int = 0  # recurrent states that sequences can have; 0: the model has none
    # That the device drafts for a decode row in a step, at most: no executor does so far.
    num_speculative_tokens: int = 0
    # Pixels of a side of the square of an image that a token stands for; 0: images are not read.
    image_token_side: int = 0
    max_image_pixels: int = MAX_IMAGE_PIXELS  # for which memory is planned
    image_token_bytes: int = 0  # of the features of a token
    image_cache_bytes: int = IMAGE_CACHE_BYTES
    # Of each stage of the image encoder, 10^9 operations for a token of an image, and for a pair.
    encoder_stages: tuple[tuple[float, float], ...] = ()
    whole_image_tokens: int = 0  # an image of at most so many runs all stages in one step

    @property
    def max_tokens_per_row(self) -> int:
        """Tokens of a decode row in a step: the last one, and those drafted after it."""
        return self.num_speculative_tokens + 1

    @property
    def kv_capacity(self) -> KVCapacity:
        """How many pages a sequence needs."""
        return KVCapacity.of(
            self.page_size, self.group_windows, self.max_tokens_per_row, self.max_batched_tokens
        )

    @property
    def num_groups(self) -> int:
        return len(self.group_windows)

    @property
    def max_pages_per_seq(self) -> int:
        """Of each group, those behind a window included."""
        return -(-self.max_model_len // self.page_size)


def dtype_for(
    requested: DType,
    model_dtype: str,
    device: DeviceName,
    *,
    has_bfloat16: bool = True,
    fits_float16: bool = True,
) -> DTypeName:
    """The data type for `--dtype requested`; auto: the model's own where the device is fast at it.

    No CPU is fast at float16.
    model_dtype: of config.json; has_bfloat16: the device does not emulate it; fits_float16: as in
    ModelConfig.  Raises ConfigError if float16 is requested and does not fit.
    """
    if requested == "float16" and not fits_float16:
        raise ConfigError(
            "--dtype float16: this model's activations exceed its largest number, 65,504: use "
            "bfloat16 or float32"
        )
    if requested != "auto":
        return requested
    if model_dtype == "float32":
        return "float32"
    if device == "cpu":
        return "bfloat16" if model_dtype == "bfloat16" and has_bfloat16 else "float32"
    if has_bfloat16 and (model_dtype == "bfloat16" or not fits_float16):
        return "bfloat16"
    return "float16" if fits_float16 else "float32"


def check_values(requested: EngineConfig) -> None:
    """Raises ConfigError for options that are invalid whatever the model."""
    if requested.page_size not in PAGE_SIZES:
        sizes = ", ".join(map(str, PAGE_SIZES))
        raise ConfigError(f"--page-size {requested.page_size}: choose one of {sizes}")
    for name, value, limit in (
        ("--max-num-seqs", requested.max_num_seqs, MAX_SEQS),
        ("--max-batched-tokens", requested.max_batched_tokens, MAX_TOKENS),
    ):
        if value > limit:
            raise ConfigError(f"{name} {value}: a step has at most {limit} of them: lower it")
    if requested.snapshot_every < SNAPSHOT_UNIT:
        raise ConfigError(
            f"--snapshot-every {requested.snapshot_every}: at least {SNAPSHOT_UNIT} tokens lie "
            "between two snapshots: raise it, or use --no-prefix-cache, which takes none"
        )
    if requested.max_model_len == 1:
        raise ConfigError("--max-model-len 1: a prompt and its answer take 2 tokens: raise it")


def check(
    requested: EngineConfig, facts: ModelFacts, attention: str = "", max_rows: int | None = None
) -> None:
    """Raises ConfigError, before anything is loaded, for options invalid whatever the memory.

    max_rows: that the back end `attention` can plan for a step; None: any number
    """
    check_values(requested)
    if max_rows is not None and requested.max_num_seqs > max_rows:
        raise ConfigError(
            f"--max-num-seqs {requested.max_num_seqs}: --attention {attention} plans at most "
            f"{max_rows} sequences a step: lower it, or use --attention flash1, which plans none"
        )
    if requested.prefix_cache and 0 < requested.snapshot_bytes < facts.state_bytes:
        raise ConfigError(
            f"--snapshot-bytes {requested.snapshot_bytes}: a snapshot of the recurrent state of "
            f"this {facts.model_type} model takes {facts.state_bytes} bytes "
            f"({size(facts.state_bytes)}): raise it, or use --no-prefix-cache, which takes none"
        )
    if requested.max_model_len > facts.max_position:
        raise ConfigError(
            f"--max-model-len {requested.max_model_len} exceeds the {facts.max_position} positions "
            f"of this {facts.model_type} model: lower it, or leave it out to use the model's limit"
        )


def resolve(
    requested: EngineConfig,
    facts: ModelFacts,
    *,
    device: DeviceName,
    dtype: DTypeName,
    kv_dtype: KVDTypeName,
    attention: str,
    memory: MemoryPlan,
    threads: int,
) -> ResolvedConfig:
    """Derive every number of a configuration that `check` has passed.

    Raises ConfigError if one exceeds what the memory allows.
    """
    max_num_seqs, max_batched_tokens = step_limits(requested, device, memory.free)
    max_len = requested.max_model_len or facts.max_position
    capacity = KVCapacity.of(requested.page_size, facts.group_windows, 1, max_batched_tokens)
    page_bytes = requested.page_size * facts.kv_bytes_per_token
    num_states, num_snapshots, unit = 0, 0, max(SNAPSHOT_UNIT, requested.page_size)
    if facts.state_bytes:
        if requested.prefix_cache:
            wanted = requested.snapshot_bytes or DEFAULT_SNAPSHOT_BYTES[device]
            num_snapshots = wanted // facts.state_bytes
        num_states = _num_states(requested, memory, facts, capacity, page_bytes, max_num_seqs)
        memory = replace(memory, sequence_states=num_states * facts.state_bytes)
    num_pages = _num_pages(
        requested,
        memory,
        capacity,
        page_bytes=page_bytes,
        max_len=max_len,
        max_num_seqs=max_num_seqs,
        max_batched_tokens=max_batched_tokens,
    )
    return ResolvedConfig(
        model=requested.model,
        device=device,
        dtype=dtype,
        kv_dtype=kv_dtype,
        attention=attention,
        load_format=requested.load_format,
        max_model_len=capacity.longest(num_pages, max_len),
        max_num_seqs=max_num_seqs,
        max_batched_tokens=max_batched_tokens,
        page_size=requested.page_size,
        num_pages=num_pages,
        # A prefix of a sequence's pages is of no use without a snapshot of the state after it.
        prefix_cache=requested.prefix_cache and (not num_states or num_snapshots > 0),
        threads=threads,
        seed=requested.seed,
        itl_target_ms=requested.itl_target_ms,
        group_windows=facts.group_windows,
        num_states=num_states,
        num_snapshots=num_snapshots,
        snapshot_every=-(-requested.snapshot_every // unit) * unit,
        image_token_side=facts.image_token_side,
        max_image_pixels=requested.max_image_pixels,
        image_token_bytes=facts.image_token_bytes,
        encoder_stages=facts.encoder_stages,
    )


def _num_states(
    requested: EngineConfig,
    memory: MemoryPlan,
    facts: ModelFacts,
    capacity: KVCapacity,
    page_bytes: int,
    max_num_seqs: int,
) -> int:
    """The number of recurrent states, which share the memory with the KV pages.

    One for each sequence that may run, and more for those with a grammar, which have two; but at
    most STATE_SHARE of the memory.  Raises ConfigError if not even LEAST_STATES fit, or fewer than
    --max-num-seqs asks for.
    """
    most = max(LEAST_STATES, max_num_seqs + -(-max_num_seqs // SEQS_OF_A_SPARE_STATE))
    tokens = requested.kv_tokens or requested.max_model_len or 2
    pages = capacity.pages_of(tokens) * len(capacity.windows)
    beside_kv = memory.for_kv - pages * page_bytes
    room = beside_kv if requested.kv_tokens else min(beside_kv, int(memory.for_kv * STATE_SHARE))
    least = LEAST_STATES * facts.state_bytes
    if beside_kv < least:
        raise ConfigError(
            f"memory: {LEAST_STATES} recurrent states of {size(facts.state_bytes)} and KV for "
            f"{tokens} tokens take {size(memory.for_kv - beside_kv + least)}: "
            f"{memory.explain()}: use a larger --gpu-memory, fewer --kv-tokens or a shorter "
            "--max-model-len, --state-dtype bfloat16 or a smaller model"
        )
    num_states = max(LEAST_STATES, min(most, room // facts.state_bytes))
    if requested.max_num_seqs > num_states:
        part = "beside --kv-tokens" if requested.kv_tokens else f"{STATE_SHARE:.0%} of it"
        raise ConfigError(
            f"--max-num-seqs {requested.max_num_seqs}: a sequence has a recurrent state of "
            f"{size(facts.state_bytes)}, and {num_states} fit into what they get of the memory "
            f"({part}): {memory.explain()}: lower it to {num_states}, or use a larger "
            "--gpu-memory, a small --kv-tokens, which leaves the rest to states, or --state-dtype "
            "bfloat16"
        )
    return num_states


def step_limits(requested: EngineConfig, device: DeviceName, free: int) -> tuple[int, int]:
    """The most sequences and tokens of a step, on a device with `free` bytes.

    Raises ConfigError if they do not agree.
    """
    default_seqs, default_tokens = 64, 512
    if device == "cuda":
        default_seqs, default_tokens = 256, 8192 if free >= LARGE_GPU_BYTES else 2048
    budget = requested.max_batched_tokens
    max_num_seqs = requested.max_num_seqs or min(default_seqs, budget or default_seqs)
    max_batched_tokens = budget or max(default_tokens, max_num_seqs)
    if max_batched_tokens < max_num_seqs:
        raise ConfigError(
            f"--max-batched-tokens {max_batched_tokens} is less than --max-num-seqs "
            f"{max_num_seqs}, of which each may need a token in every step: raise the one or "
            "lower the other"
        )
    return max_num_seqs, max_batched_tokens


def _num_pages(
    requested: EngineConfig,
    memory: MemoryPlan,
    capacity: KVCapacity,
    *,
    page_bytes: int,
    max_len: int,
    max_num_seqs: int,
    max_batched_tokens: int,
) -> int:
    """The number of KV pages.

    Raises ConfigError if --kv-tokens does not fit, or cannot hold a request of --max-model-len.
    """
    available_pages = memory.for_kv // page_bytes
    groups = len(capacity.windows)
    requested_pages = capacity.pages_of(requested.kv_tokens) * groups
    min_pages = capacity.needed(requested.max_model_len or 2)  # for one request
    if 0 < requested_pages < min_pages:
        raise ConfigError(
            f"--kv-tokens {requested.kv_tokens} is less than "
            f"--max-model-len {requested.max_model_len}, "
            "and a request has to fit: raise the one or lower the other"
        )
    if requested_pages > available_pages:
        raise ConfigError(
            f"--kv-tokens {requested.kv_tokens} needs {size(requested_pages * page_bytes)}: "
            f"{memory.explain()}: ask for at most {available_pages // groups * requested.page_size}"
        )
    if available_pages < min_pages:
        length = requested.max_model_len
        what = f"one request of --max-model-len {length}" if length else "the shortest request"
        raise ConfigError(
            f"memory: KV for {what} takes {size(min_pages * page_bytes)}: "
            f"{memory.explain()}: "
            + remedies(
                memory,
                min_pages * page_bytes,
                length_that_fits=capacity.longest(available_pages, max_len),
                batched_tokens=max_batched_tokens,
                max_num_seqs=max_num_seqs,
            )
        )
    # More pages than every slot at full length could use, and the largest step besides, would only
    # waste memory.
    step_pages = capacity.pages_of(max_batched_tokens) * sum(map(bool, capacity.windows))
    max_pages = max_num_seqs * capacity.needed(max_len) + 2 * step_pages
    return requested_pages or min(available_pages, max_pages)
