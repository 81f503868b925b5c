"""Whole steps, padded and sampled on the device, give what the plain runner gives."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from runtime.cuda_graph import buffers
from runtime.cuda_graph.buffers import Layout
from runtime.cuda_graph.executor import GraphExecutor
from runtime.cuda_graph.launch import Launch, StepLaunch
from runtime.executor.pending import DevicePendingOutput
from runtime.messages import EngineRequest, RequestOutput
from runtime.sampling.constrained_rows import DeferredRows
from runtime.sampling.sampler import SamplerOutput
from runtime.scheduler.batch import Batch, Masks, ModelRunnerOutput
from tests.support.engine.graph_step_engine import (
    PARAMS,
    answers,
    capture_all,
    check_answers,
    make_engine,
    model_of,
    requests,
    results_of,
)
from tests.support.interpreter.unused_lanes import UNUSED_LANES

pytestmark = UNUSED_LANES


def test_whole_steps_answer_as_torch_executor_does(checkpoint: Path, device: torch.device) -> None:
    """Chunks, preemption, shared pages, slots started over, parameters that the sampler serves."""
    check_answers(checkpoint, device, requests(seed=1, count=9 if device.type == "cpu" else 150))


@pytest.fixture
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Blocks of steps have room for three new sequences, for none if no prompt is fed."""
    with monkeypatch.context() as patched:
        patched.setattr(buffers, "NEW_ROWS", 3)
        patched.setattr(buffers, "EXTRA_PAGES", 0)
        Layout.of.cache_clear()
        yield
    Layout.of.cache_clear()


@pytest.mark.slow
@pytest.mark.usefixtures("small_blocks")
def test_what_a_block_has_no_room_for_reaches_the_device_all_the_same(
    checkpoint: Path, device: torch.device
) -> None:
    """Five sequences begin at once, with more pages than a page a row."""
    wanted = [
        EngineRequest(id, 0, [id * 9 + place for place in range(length)], PARAMS[1 + id % 2])
        for id, length in enumerate([1, 1, 1, 33, 1])
    ]
    found: list[list[list[int]]] = []
    for graph_steps in (True, False):
        engine, _ = make_engine(checkpoint, device, graph_steps=graph_steps, pages=20)
        for request in wanted:
            engine.add(request)
        got: dict[int, list[RequestOutput]] = {request.id: [] for request in wanted}
        while not engine.idle:
            for output in engine.step():
                got[output.id].append(output)
        found.append([results_of(got[request.id])[0] for request in wanted])
    assert found[0] == found[1] and all(len(tokens) == 5 for tokens in found[0])


def test_only_constrained_and_scored_rows_are_deferred(
    checkpoint: Path, device: torch.device
) -> None:
    """A row without such parameters is sampled within the step, whatever the others need."""
    engine, runner = make_engine(checkpoint, device, graph_steps=True, pages=20)
    assert isinstance(runner, GraphExecutor)
    sampler, found = runner._sampler, list[tuple[list[int], list[int]]]()
    sample_deferred = sampler.sample_deferred

    def note(
        logits: torch.Tensor, deferred: DeferredRows, batch: Batch, masks: Masks | None
    ) -> SamplerOutput:
        found.append(
            (batch.slots[deferred.constrained].tolist(), batch.slots[deferred.scored].tolist())
        )
        return sample_deferred(logits, deferred, batch, masks)

    sampler.sample_deferred = note  # type: ignore[method-assign]
    for id, params in enumerate((PARAMS[1], PARAMS[3], PARAMS[4], PARAMS[2])):
        engine.add(EngineRequest(id, 0, [id + 1], params))
    while not engine.idle:
        engine.step()
    # They have the slots 0 to 3; of five steps, three have such rows.
    assert found == [([2], [1])] * 3


def test_launches_run_elsewhere_give_the_same_tokens_without_a_look_at_clock_or_memory(
    checkpoint: Path, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another process with the same weights runs what the first one decided."""
    engine, runner = make_engine(checkpoint, device, graph_steps=True, pages=20)
    assert isinstance(runner, GraphExecutor)
    launches: list[StepLaunch] = []
    run = runner.run

    def note(launch: Launch) -> None:
        assert isinstance(launch, StepLaunch)  # without a GPU there is nothing to capture
        launches.append(launch)
        run(launch)

    runner.run = note  # type: ignore[method-assign]
    sampled: list[list[int]] = []
    sample = runner.sample

    def note_tokens(batch: Batch, masks: Masks | None = None) -> DevicePendingOutput:
        pending = sample(batch, masks)
        wait = pending.wait

        def note_wait() -> ModelRunnerOutput:
            output = wait()
            sampled.append(output.tokens.tolist())
            return output

        pending.wait = note_wait  # type: ignore[method-assign]
        return pending

    runner.sample = note_tokens  # type: ignore[method-assign]
    for request in requests(seed=7, count=5):
        engine.add(request)
    while not engine.idle:
        engine.step()
    assert len(launches) == len(sampled) > 5
    _, other = make_engine(checkpoint, device, graph_steps=True, pages=20)
    assert isinstance(other, GraphExecutor)
    for name in ("plan", "fit", "take", "_has_room"):
        monkeypatch.setattr(other.planner, name, None)  # a call would raise
    found = []
    for launch in launches:
        other.run(launch)
        found.append(other.sample(launch.batch).wait().tokens.tolist())
    assert found == sampled


@pytest.mark.slow
def test_requests_that_end_while_their_steps_are_under_way_change_no_other(
    checkpoint: Path, device: torch.device
) -> None:
    """Their slots and pages go to others while the device still writes to them."""
    wanted = requests(seed=5, count=6 if device.type == "cpu" else 150)
    engine, _ = make_engine(checkpoint, device, graph_steps=False)
    plain = answers(engine, wanted, random.Random(1))
    engine, runner = make_engine(checkpoint, device, graph_steps=True)
    assert isinstance(runner, GraphExecutor)
    capture_all(runner)
    sample_tokens, run = random.Random(5), engine.step

    def step_and_abort() -> list[RequestOutput]:
        outputs = run()
        if sample_tokens.random() < 0.2:
            engine.abort(sample_tokens.randrange(len(wanted)))
        return outputs

    engine.step = step_and_abort  # type: ignore[method-assign]
    got = answers(engine, wanted, random.Random(1))
    engine.requests.check_integrity()
    ends = [got[request.id][-1].finish for request in wanted]
    assert "abort" in ends and set(ends) > {"abort"}
    for request in wanted:
        tokens = results_of(got[request.id])[0]
        assert tokens == results_of(plain[request.id])[0][: len(tokens)], request


@pytest.mark.filterwarnings("ignore:All-NaN slice encountered")
def test_a_chunk_that_is_not_finite_ends_its_request_at_once_and_its_pages_are_not_shared(
    checkpoint: Path, device: torch.device
) -> None:
    engine, runner = make_engine(checkpoint, device, graph_steps=True)
    weight = model_of(checkpoint, device, torch.float32).embedding.weight
    assert isinstance(runner, GraphExecutor) and isinstance(weight, torch.Tensor)
    capture_all(runner)
    before = weight[130].clone()
    weight[130] = torch.nan
    try:
        bad, good = [1] * 10 + [130] + [2] * 39, [3] * 5
        engine.add(EngineRequest(0, 0, good, PARAMS[0]))
        engine.add(EngineRequest(1, 0, bad, PARAMS[0]))
        outputs = [output for _ in range(3) for output in engine.step()]
    finally:
        weight[130] = before
    [end] = [output for output in outputs if output.id == 1]
    assert end.finish == "error" and not end.tokens
    assert engine.requests.num_running == 1 and not engine.requests.pool.cached_pages
