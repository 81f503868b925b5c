"""Memory profiling as for a GPU, on a CPU: the steps run, the memory counters are fake."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from msgspec.structs import replace

from runtime.config import ConfigError, EngineConfig, ResolvedConfig
from runtime.cuda_graph.buckets import MAX_MIXED
from runtime.executor.image_buffers import step_bytes
from runtime.memory_plan import MemoryPlan
from runtime.messages import PromptImage
from runtime.scheduler.batch import Batch, ImageStages, Masks, make_batch
from runtime.startup import loading, memory_profile
from runtime.startup.engine_spec import EngineSpec, resolve_engine_spec
from runtime.startup.memory_profile import MemoryProfiler
from runtime.startup.timeline import Timeline
from runtime.startup.warm_up import GREEDY, all_batch_kinds, largest, new_row
from tests.support.models.tiny_checkpoints import write_checkpoint
from tests.support.models.tiny_vision import SIDE, write_vision_checkpoint

MIB = 2**20


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("qwen3")
    write_checkpoint("qwen3", directory)
    return directory


def spec_for(checkpoint: Path, **changes: object) -> EngineSpec:
    config = EngineConfig(
        model=str(checkpoint), device="cpu", dtype="float32", max_num_seqs=4,
        max_batched_tokens=64, threads=1, gpu_memory=0.5,
    )  # fmt: skip
    return resolve_engine_spec(replace(config, **changes))


class Memory:
    """Counters of a device of 64 MiB on which every step keeps one MiB more."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.allocated = 0
        self.steps: list[Batch] = []
        self.fits: Callable[[Batch], bool] = lambda batch: True
        monkeypatch.setattr(torch.cuda, "memory_allocated", self._allocate)
        monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
        none = contextlib.nullcontext(contextlib.nullcontext)
        monkeypatch.setattr(memory_profile, "compiling_only", lambda compilers: none)
        monkeypatch.setattr(memory_profile, "free_bytes", self._free)
        monkeypatch.setattr(loading, "free_bytes", self._free)
        really = memory_profile.run

        def run(runner: object, batch: Batch, masks: Masks | None = None) -> None:
            if not self.fits(batch):
                raise torch.OutOfMemoryError("made up")
            self.steps.append(batch)
            really(runner, batch, masks)  # type: ignore[arg-type]

        monkeypatch.setattr(memory_profile, "run", run)

    def _allocate(self, device: torch.device) -> int:
        self.allocated += 3 * MIB  # the second call finds 3 MiB of state
        return self.allocated

    def _free(self, device: torch.device) -> int:
        return (64 - len(self.steps)) * MIB


@pytest.fixture
def memory(monkeypatch: pytest.MonkeyPatch) -> Iterator[Memory]:
    yield Memory(monkeypatch)


def test_kv_gets_the_share_less_what_was_measured(checkpoint: Path, memory: Memory) -> None:
    made = loading._on_gpu(spec_for(checkpoint), lambda *report: None, Timeline())
    sizes = dict(made.memory)
    pages_of_trial = made.kv.num_bytes // made.kv.num_pages * memory_profile.PAGES
    assert sizes["state"] == 3 * MIB
    assert (
        sizes["weights"] + sizes["state"] + sizes["activations"] + pages_of_trial
        == len(memory.steps) * MIB
    )
    assert sum(sizes.values()) == 64 * MIB
    available = int(64 * MIB * 0.5) - sizes["weights"] - sizes["state"] - sizes["activations"]
    whole = 4 * -(-made.resolved.max_model_len // 16)  # more would never be used
    fits = available // (made.kv.num_bytes // made.kv.num_pages)
    assert made.resolved.num_pages == made.kv.num_pages == min(fits, whole)


def test_the_runner_goes_on_with_the_real_pool(checkpoint: Path, memory: Memory) -> None:
    made = loading._on_gpu(spec_for(checkpoint), lambda *report: None, Timeline())
    batch = next(all_batch_kinds(made.resolved))
    batch = replace(batch, new_pages=np.full_like(batch.new_pages, made.kv.num_pages - 1))
    made.executor.forward(batch)
    assert made.executor.sample(batch).wait().tokens[0] >= 0
    assert made.kv.k[:, -1].any() and not made.kv.k[:, :-1].any()


def test_features_of_the_largest_step_have_their_memory_from_the_start(
    tmp_path: Path, memory: Memory
) -> None:
    write_vision_checkpoint("qwen3-vl", tmp_path)
    engine_spec, free = spec_for(tmp_path, max_image_pixels=(4 * SIDE) ** 2), 64 * MIB
    model = engine_spec.begin_loading(free).model
    profiler = MemoryProfiler(MemoryPlan(free=free, share=0.5), engine_spec, model)
    row_images = profiler.executor._images
    assert row_images is not None
    buffers, resolved = row_images.buffers, profiler._resolved
    assert resolved.max_batched_tokens == 64
    assert buffers.num_bytes == step_bytes(64, resolved.image_token_bytes) > 64 * 32
    pixels, rows = bytes(3 * (4 * SIDE) ** 2), range(4)
    images = [PromptImage(0, 16, 4 * SIDE, 4 * SIDE, pixels, bytes([row] * 32)) for row in rows]
    batch = make_batch(
        slots=[*rows],
        starts=[0] * 4,
        q_lens=[16] * 4,  # max_batched_tokens in all
        tokens=[0] * 64,
        num_new_pages=[1] * 4,
        new_pages=[0] * 4,
        sample=[True] * 4,
        decode_rows=0,
        new_rows=[replace(new_row(row, GREEDY, 16), images=(images[row],)) for row in rows],
    )
    stages = [
        ImageStages(one.digest, 0, engine_spec.config.vision.depth + 1, one)  # type: ignore[union-attr]
        for one in images
    ]
    with torch.inference_mode():
        found = row_images.prepare(replace(batch, image_stages=stages), batch.num_tokens)
    assert found is not None
    tensors = found.features, found.index, found.positions
    assert sum(tensor.nbytes for tensor in tensors) == buffers.num_bytes
    storages = {tensor.untyped_storage().data_ptr() for tensor in tensors}
    assert storages == {buffers._features.data_ptr(), buffers._numbers.data_ptr()}


def test_a_step_that_does_not_fit_names_numbers_that_do(checkpoint: Path, memory: Memory) -> None:
    memory.fits = lambda batch: batch.num_tokens <= 40
    with pytest.raises(ConfigError, match=r"--max-batched-tokens 256 .* --max-batched-tokens 64,"):
        loading._on_gpu(
            spec_for(checkpoint, max_batched_tokens=256),
            lambda *report: None,
            Timeline(),
        )


@pytest.fixture
def resolved(checkpoint: Path) -> ResolvedConfig:
    plan = MemoryPlan(free=1 << 30, share=1.0)
    return replace(spec_for(checkpoint).resolve_config(plan), device="cuda", max_num_seqs=12)


def test_every_kind_of_step_keeps_to_the_limits_and_meets_them(resolved: ResolvedConfig) -> None:
    batches = list(all_batch_kinds(resolved))
    for batch in batches:
        assert batch.num_tokens <= resolved.max_batched_tokens
        assert len(batch.slots) == len(set(batch.slots)) <= resolved.max_num_seqs
        assert max(map(sum, zip(batch.starts, batch.q_lens, strict=True))) < resolved.max_model_len
    decodes = [len(batch.slots) for batch in batches if batch.decode_rows == batch.num_tokens]
    assert decodes[:5] == [1, 2, 4, 8, 12]
    prompts = [batch.num_tokens for batch in batches if not batch.decode_rows]
    assert prompts == [8, 16, 32, 64]
    assert any(0 < batch.decode_rows < batch.num_tokens for batch in batches)


def test_the_largest_steps_end_the_longest_sequence_and_fill_all_rows(
    resolved: ResolvedConfig,
) -> None:
    (prompt, _), (rows, masks) = largest(resolved, resolved.max_batched_tokens, 97)
    assert prompt.num_tokens == resolved.max_batched_tokens
    assert prompt.starts[0] + prompt.q_lens[0] == resolved.max_model_len - 1
    assert len(rows.slots) == resolved.max_num_seqs
    assert masks is not None and len(masks.bits) == 13 * len(masks.rows) == 13 * len(rows.slots)
    short = replace(resolved, max_model_len=20)
    (prompt, _), _ = largest(short, short.max_batched_tokens, 97)
    assert (prompt.starts, prompt.q_lens) == ([0], [19])


def test_the_time_from_the_beginning_is_divided_among_phases() -> None:
    clock = iter([10.0, 11.5, 12.0, 15.0])
    timeline = Timeline(9.0, lambda: next(clock))
    for phase in ("imports", "weights", "memory", "weights"):
        timeline.mark(phase)
    assert timeline.phases() == [("imports", 1.0), ("weights", 4.5), ("memory", 0.5)]
    assert timeline.seconds == 6.0 == sum(seconds for _, seconds in timeline.phases())


def test_graphs_that_do_not_fit_name_numbers_too(
    checkpoint: Path, memory: Memory, monkeypatch: pytest.MonkeyPatch
) -> None:
    def measure() -> int:
        raise torch.OutOfMemoryError("made up")

    monkeypatch.setattr(memory_profile, "run", lambda runner, batch, masks=None: None)
    engine_spec = spec_for(checkpoint)
    plan = MemoryPlan(free=64 * MIB, share=0.5)
    loaded = memory_profile.MemoryProfiler(
        plan, engine_spec, engine_spec.begin_loading(64 * MIB).model
    )
    monkeypatch.setattr(loaded.executor, "measure_graphs", measure)
    with pytest.raises(ConfigError, match=r"try --max-batched-tokens \d+, --max-num-seqs \d+"):
        loaded.measure()


class ExtendedGraphs:
    """The executor's graphs: `first` bytes, and `second` with those of large steps."""

    def __init__(
        self, profiler: MemoryProfiler, monkeypatch: pytest.MonkeyPatch, *, first: int, second: int
    ) -> None:
        self.asked: list[int] = []
        executor = profiler.executor
        sizes = iter([first, second])
        monkeypatch.setattr(executor, "measure_graphs", lambda: next(sizes))
        monkeypatch.setattr(executor, "extend_graphs", self._extend)

    def _extend(self, tokens: int) -> bool:
        self.asked.append(tokens)
        return tokens > MAX_MIXED


def profiler_of(engine_spec: EngineSpec, max_batched_tokens: int = 8192) -> MemoryProfiler:
    plan = MemoryPlan(free=64 * MIB, share=0.5)
    profiler = MemoryProfiler(plan, engine_spec, engine_spec.begin_loading(64 * MIB).model)
    profiler._resolved = replace(profiler._resolved, max_batched_tokens=max_batched_tokens)
    return profiler


def let_another_rank_say(
    profiler: MemoryProfiler,
    memory: Memory,
    monkeypatch: pytest.MonkeyPatch,
    tokens: int,
    fits: int = 1,
) -> None:
    """What it has measured, and whether it has room; the largest steps leave 10 MiB."""
    kind = type(profiler._ranks)
    monkeypatch.setattr(kind, "most", lambda self, own: [max(own, tokens)])
    monkeypatch.setattr(kind, "least", lambda self, own: [min(own, fits)])
    memory.steps.clear()
    monkeypatch.setattr(
        profiler, "_run_largest", lambda tokens: memory.steps.extend([make_batch()] * 10)
    )


@pytest.mark.parametrize(("tokens", "asked"), [(2048, 2048), (3000, 3000), (1 << 40, 8192), (0, 0)])
def test_graphs_of_steps_that_are_launched_slowly_on_any_rank_are_planned_on_all(
    tokens: int, asked: int, checkpoint: Path, memory: Memory, monkeypatch: pytest.MonkeyPatch
) -> None:
    profiler = profiler_of(spec_for(checkpoint))
    let_another_rank_say(profiler, memory, monkeypatch, tokens)
    graphs = ExtendedGraphs(profiler, monkeypatch, first=MIB // 16, second=MIB // 8)
    measured = profiler.measure()
    assert graphs.asked == [asked]
    assert measured.graphs == (MIB // 8 if asked > MAX_MIXED else MIB // 16)


def test_graphs_of_large_steps_take_little_of_kv(
    checkpoint: Path, memory: Memory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of half of 64 MiB: those of 8,192 tokens would take 3 MiB more."""
    profiler = profiler_of(spec_for(checkpoint))
    let_another_rank_say(profiler, memory, monkeypatch, 1 << 40)
    graphs = ExtendedGraphs(profiler, monkeypatch, first=MIB, second=4 * MIB)
    assert profiler.measure().graphs == MIB and not graphs.asked


def test_graphs_of_large_steps_take_nothing_of_the_kv_that_was_asked_for(
    checkpoint: Path, memory: Memory, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = profiler_of(spec_for(checkpoint))
    let_another_rank_say(plain, memory, monkeypatch, 0)
    ExtendedGraphs(plain, monkeypatch, first=MIB // 16, second=0)
    room = plain.measure().for_kv
    page = plain._kv.num_bytes // plain._kv.num_pages
    all_of_it = room // page * plain._resolved.page_size
    profiler = profiler_of(spec_for(checkpoint, kv_tokens=all_of_it))
    let_another_rank_say(profiler, memory, monkeypatch, 1 << 40)
    graphs = ExtendedGraphs(profiler, monkeypatch, first=MIB // 16, second=MIB // 4)
    assert profiler.measure().graphs == MIB // 16 and not graphs.asked


def test_a_rank_without_room_for_graphs_of_large_steps_keeps_all_from_them(
    checkpoint: Path, memory: Memory, monkeypatch: pytest.MonkeyPatch
) -> None:
    profiler = profiler_of(spec_for(checkpoint))
    let_another_rank_say(profiler, memory, monkeypatch, 1 << 40, fits=0)
    graphs = ExtendedGraphs(profiler, monkeypatch, first=MIB // 16, second=MIB // 4)
    assert profiler.measure().graphs == MIB // 16 and not graphs.asked


def test_the_largest_steps_are_run_again_when_all_else_is_there(
    checkpoint: Path, memory: Memory
) -> None:
    """Through two layers: what follows them takes the same memory."""
    made = loading._on_gpu(spec_for(checkpoint), lambda *report: None, Timeline())
    assert made.profiler is not None
    before = len(memory.steps)
    made.profiler.keep_peak_memory()
    prompt, rows = memory.steps[before:]
    assert prompt.num_tokens == made.resolved.max_batched_tokens
    assert len(rows.slots) == made.resolved.max_num_seqs
    assert len(made.model.layers) == 3


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB"),
        RuntimeError("Triton Error [CUDA]: out of memory"),
        RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
    ],
)
def test_memory_that_runs_out_while_loading_names_what_took_it_and_three_numbers(
    checkpoint: Path, memory: Memory, monkeypatch: pytest.MonkeyPatch, error: RuntimeError
) -> None:
    def fail(self: EngineSpec, *sizes: object) -> None:
        raise error

    monkeypatch.setattr(EngineSpec, "kv_pool", fail)
    expected = (
        r"of 64.0 MiB that were free .* weights in float32 take \S+ \S+; --max-batched-tokens 64, "
        r"--max-num-seqs 4 and --gpu-memory 0.5 of it need more .* try --max-batched-tokens 64, "
        r"--max-num-seqs 4, --gpu-memory 0.5"
    )
    with pytest.raises(ConfigError, match=expected):
        loading._on_gpu(spec_for(checkpoint), lambda *report: None, Timeline())


def test_other_mistakes_while_loading_are_not_taken_for_a_lack_of_memory(
    checkpoint: Path, memory: Memory, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(self: EngineSpec, *sizes: object) -> None:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    monkeypatch.setattr(EngineSpec, "kv_pool", fail)
    with pytest.raises(RuntimeError, match="illegal memory access"):
        loading._on_gpu(spec_for(checkpoint), lambda *report: None, Timeline())


def test_weights_that_do_not_fit_are_refused_before_they_are_read(checkpoint: Path) -> None:
    engine_spec = spec_for(checkpoint)
    with pytest.raises(ConfigError, match=r"weights in float32 take \S+ KiB, 1.0 KiB are free"):
        engine_spec.begin_loading(1024)
