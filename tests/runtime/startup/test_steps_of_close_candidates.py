"""The steps of a start by which kernels of nearly the same time are chosen."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from model_zoo.layers.gemm import autotune_cache
from model_zoo.layers.gemm.in_step import CloseCandidates
from model_zoo.layers.linear import Linear
from runtime.config import EngineConfig
from runtime.memory_plan import MemoryPlan
from runtime.scheduler.batch import Batch
from runtime.startup import loading, memory_profile
from runtime.startup.engine_spec import EngineSpec, resolve_engine_spec
from runtime.startup.memory_profile import CONTEXT, PAGES, MemoryProfiler
from runtime.startup.timeline import Timeline
from tests.support.models.tiny_checkpoints import write_checkpoint

FREE = 64 << 20


@pytest.fixture
def spec(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> EngineSpec:
    """Of a model of some layers, as for a GPU, on a CPU."""
    none = contextlib.nullcontext(contextlib.nullcontext)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: 0)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    monkeypatch.setattr(memory_profile, "compiling_only", lambda compilers: none)
    for module in (memory_profile, loading):
        monkeypatch.setattr(module, "free_bytes", lambda device: FREE)
    monkeypatch.setattr(autotune_cache, "write_choices", lambda *made: None)
    monkeypatch.setattr(autotune_cache, "environment_key", lambda device: "a GPU")
    write_checkpoint("qwen3", tmp_path)
    config = EngineConfig(
        model=str(tmp_path), device="cpu", dtype="float32", max_num_seqs=8,
        max_batched_tokens=64, threads=1, gpu_memory=0.5,
    )  # fmt: skip
    return resolve_engine_spec(config)


class Steps:
    """What is asked of the executor, and what is used in the end."""

    def __init__(self, spec: EngineSpec, monkeypatch: pytest.MonkeyPatch) -> None:
        model = spec.begin_loading(FREE).model
        self.profiler = MemoryProfiler(MemoryPlan(free=FREE, share=0.5), spec, model)
        self.layers = list(model.layers)
        self.batches: list[Batch] = []
        self.ran: list[int] = []
        self.used: list[tuple[int, str]] = []
        monkeypatch.setattr(self.profiler.executor, "step_times", self._times)

    def _times(self, batch: Batch, choices: Sequence[Callable[[], None]]) -> list[float]:
        self.batches.append(batch)
        self.ran.append(len(self.profiler._model.layers))
        return [20.0, 10.0]

    def close(self, rows: int, layers: Sequence[torch.nn.Module]) -> CloseCandidates:
        def use(name: str) -> None:
            self.used.append((rows, name))

        return CloseCandidates(f"{rows}", rows, layers, ["one", "other"], use)


def linears(layer: torch.nn.Module) -> list[Linear]:
    return [module for module in layer.modules() if isinstance(module, Linear)]


def test_they_have_some_layers_and_a_thousand_tokens_before(
    spec: EngineSpec, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(memory_profile, "LAYERS", 1)
    steps = Steps(spec, monkeypatch)
    close = [steps.close(rows, linears(steps.layers[0])[:2]) for rows in (1, 8, 16)]
    steps.profiler.choose_in_steps(close)
    before = min(CONTEXT, steps.profiler._resolved.max_model_len - 1)
    assert [list(batch.starts) for batch in steps.batches] == [[before], [before] * 8]
    for batch in steps.batches:
        assert batch.decode_rows == batch.num_tokens == len(batch.slots)
        assert set(batch.new_pages) == set(range(PAGES))
        pages = before // steps.profiler._resolved.page_size + 1
        assert set(batch.num_new_pages) == {pages}
        assert {row.prompt_len for row in batch.new_rows} == {before + 1}
        assert list(batch.tokens) == list(range(batch.num_tokens)), "others have other experts"
    assert steps.ran == [1, 1] and list(steps.profiler._model.layers) == steps.layers
    assert len(steps.layers) > 1
    # A server of eight rows has no step of sixteen.
    assert steps.used == [(1, "other"), (8, "other"), (16, "one")]


def test_what_they_run_once_or_not_at_all_is_not_compared(
    spec: EngineSpec, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(memory_profile, "LAYERS", 1)
    steps = Steps(spec, monkeypatch)
    first, second = (linears(layer)[0] for layer in steps.layers[:2])
    steps.profiler.choose_in_steps([steps.close(1, [first, second])])
    assert not steps.batches and not steps.used
    monkeypatch.setattr(memory_profile, "LAYERS", 2)
    steps.profiler.choose_in_steps([steps.close(1, [first, second])])
    assert steps.used == [(1, "other")]


def test_ranks_of_a_divided_model_keep_what_each_has_timed(
    spec: EngineSpec, monkeypatch: pytest.MonkeyPatch
) -> None:
    steps = Steps(spec, monkeypatch)
    monkeypatch.setattr(steps.profiler, "_ranks", SimpleNamespace(size=2))
    steps.profiler.choose_in_steps([steps.close(1, linears(steps.layers[0]))])
    assert not steps.batches and not steps.used


def test_a_start_gives_them_what_has_been_timed_of_experts_and_gemms(
    spec: EngineSpec, monkeypatch: pytest.MonkeyPatch
) -> None:
    found: list[object] = []
    monkeypatch.setattr(loading, "autotune_gemms", lambda model: ["gemms"])
    monkeypatch.setattr(loading, "autotune_experts", lambda model: ["experts"])
    monkeypatch.setattr(MemoryProfiler, "choose_in_steps", lambda self, close: found.extend(close))
    loading._on_gpu(spec, lambda *report: None, Timeline())
    assert found == ["experts", "gemms"]
