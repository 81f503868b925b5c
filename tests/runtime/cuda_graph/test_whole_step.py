"""Whole steps, padded and sampled on the device, give what the plain runner gives."""

from __future__ import annotations

import os
import random
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest
import torch

from attention.backend import Capacity, Shape
from attention.dispatch import choose
from attention.kv_pool import KVPool
from model_zoo.config import read_config
from runtime.config import ResolvedConfig
from runtime.cuda_graph import buffers
from runtime.cuda_graph.buffers import Layout
from runtime.cuda_graph.executor import GraphExecutor
from runtime.cuda_graph.launch import Launch, StepLaunch
from runtime.engine.loop import Engine
from runtime.executor.pending import DevicePendingOutput
from runtime.executor.torch_executor import TorchExecutor
from runtime.messages import EngineRequest, PoolingParams, RequestOutput, SamplingParams
from runtime.sampling.constrained_rows import DeferredRows
from runtime.sampling.sampler import SamplerOutput
from runtime.scheduler.batch import Batch, Masks, ModelRunnerOutput
from tests.support.models.loaded_model import load_model
from tests.support.models.tiny_checkpoints import write_checkpoint

# A kernel divides and multiplies lanes that it does not use; the interpreter, by NumPy, says so.
pytestmark = [
    pytest.mark.filterwarnings("ignore:divide by zero encountered"),
    pytest.mark.filterwarnings("ignore:invalid value encountered"),
    pytest.mark.filterwarnings("ignore:overflow encountered"),
]
SLOTS, PAGE, MAX_LEN = 5, 16, 64
JUNK = 0x5A5A5A5A
PARAMS = (
    SamplingParams(max_tokens=5, temperature=0),
    SamplingParams(max_tokens=5, temperature=0.8, top_p=0.9, top_k=30, min_p=0.01),
    SamplingParams(max_tokens=5, temperature=1.2, frequency_penalty=0.5, repetition_penalty=1.3),
    SamplingParams(max_tokens=3, temperature=0, logprobs=2),
    SamplingParams(max_tokens=3, temperature=0.5, logit_bias={5: 3.0}, presence_penalty=0.4),
    SamplingParams(max_tokens=4, temperature=0, prompt_logprobs=1),
    SamplingParams(max_tokens=4, temperature=0.7, min_tokens=3, stop_ids=tuple(range(0, 12, 2))),
    SamplingParams(max_tokens=3, temperature=0, banned=((7,), (8, 9)), allowed_ids=(3, 7, 8, 9)),
    SamplingParams(max_tokens=0, pooling=PoolingParams("mean")),
)


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> torch.device:
    if request.param == "cpu" and os.environ.get("TRITON_INTERPRET") != "1":
        pytest.skip("kernels are compiled here: TRITON_INTERPRET=1 would interpret them")
    return torch.device(request.param)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("qwen3")
    write_checkpoint("qwen3", directory)
    return directory


@cache
def model_of(checkpoint: Path, device: torch.device, dtype: torch.dtype) -> torch.nn.Module:
    return load_model(
        read_config(checkpoint), checkpoint, dtype=dtype, device=device, load_format="auto",
        progress=lambda phase, done, total: None,
    )  # fmt: skip


def make_engine(
    checkpoint: Path,
    device: torch.device,
    *,
    graph_steps: bool,
    dtype: torch.dtype = torch.float32,
    pages: int = 7,
    budget: int = 24,
) -> tuple[Engine, TorchExecutor | GraphExecutor]:
    """With kernels and whole steps on memory full of junk, or in plain torch."""
    config = read_config(checkpoint)
    name = "flash2" if graph_steps else "mha"
    shape = Shape(
        heads=config.num_heads, kv_heads=config.num_kv_heads, head_dim=config.head_dim,
        page_size=PAGE, dtype=dtype, kv_dtype=dtype,
    )  # fmt: skip
    resolved = ResolvedConfig(
        model="", device="cpu", dtype="float32", kv_dtype="float32", attention=name,
        load_format="auto", max_model_len=MAX_LEN, max_num_seqs=SLOTS, max_batched_tokens=budget,
        page_size=PAGE, num_pages=pages, prefix_cache=True, threads=1, seed=0,
    )  # fmt: skip
    kv = KVPool.allocate(
        layers=config.num_layers, pages=pages, kv_heads=config.num_kv_heads, page_size=PAGE,
        head_dim=config.head_dim, dtype=dtype, device=device,
    )  # fmt: skip
    runner = (GraphExecutor if graph_steps else TorchExecutor)(
        model_of(checkpoint, device, dtype),  # type: ignore[arg-type]
        resolved=resolved,
        vocab_size=config.vocab_size,
        kv=kv,
        backend=choose(device, name, shape, Capacity(rows=SLOTS, tokens=budget)),
        device=device,
    )
    if isinstance(runner, GraphExecutor):
        kv.k.fill_(torch.nan)
        kv.v.fill_(torch.nan)
        spoil(runner)
    runner.overlap = graph_steps
    return Engine(resolved, config.vocab_size, runner), runner


def spoil(steps: GraphExecutor) -> None:
    """Junk in everything that a step or a new sequence must write before it is read."""
    for part in (
        steps._step,
        steps._step.output_ring,
        steps._buffers,
        steps._sampler.state,
        steps._slots,
    ):
        for value in vars(part).values():
            if isinstance(value, torch.Tensor):
                value.fill_(JUNK % 100 if value.element_size() == 1 else JUNK % 30000)


def capture_all(steps: GraphExecutor) -> None:
    """Without a GPU there is nothing to capture."""
    while steps.prepare():
        pass


def requests(seed: int, count: int) -> list[EngineRequest]:
    """Prompts of all lengths; a third begin alike, so that pages are shared."""
    sample_tokens = random.Random(seed)
    common = [sample_tokens.randrange(131) for _ in range(40)]
    found: list[EngineRequest] = []
    for id in range(count):
        length = (
            47 if id < 2 else sample_tokens.randint(1, 30)
        )  # the first two do not fit side by side
        prompt = [sample_tokens.randrange(131) for _ in range(length)]
        if id >= 2 and sample_tokens.random() < 0.3:
            prompt = common[: sample_tokens.randint(1, 40)] + prompt[:9]
        params = PARAMS[id % len(PARAMS)]
        found.append(EngineRequest(id, 0, prompt[:50], params))
    return found


def answers(
    engine: Engine, wanted: list[EngineRequest], sample_tokens: random.Random
) -> dict[int, list[RequestOutput]]:
    """All outputs by request; requests come one after the other."""
    got: dict[int, list[RequestOutput]] = {request.id: [] for request in wanted}
    coming = list(wanted)
    while coming or not engine.idle:
        for _ in range(min(sample_tokens.randint(0, 2), len(coming))):
            engine.add(coming.pop(0))
        for output in engine.step():
            assert output.error is None
            got[output.id].append(output)
    return got


def told(outputs: list[RequestOutput]) -> tuple[list[int], list[float], torch.Tensor]:
    """Tokens, all log-probabilities, and the vector."""
    tokens = [token for output in outputs for token in output.tokens]
    scores = [score.logprob for output in outputs for score in output.logprobs or ()]
    for output in outputs:
        scores += [score.logprob for score in output.prompt_logprobs or () if score is not None]
    embedding = b"".join(output.embedding for output in outputs)
    return (
        tokens,
        scores,
        torch.frombuffer(bytearray(embedding or b"\0\0\0\0"), dtype=torch.float32),
    )


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
        found.append([told(got[request.id])[0] for request in wanted])
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


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["gpt2", "llama-yarn", "qwen2-moe", "qwen3-moe-some-layers"])
def test_whole_steps_serve_models_of_every_kind(kind: str, tmp_path: Path) -> None:
    """Learned positions, no norm of queries and keys, experts."""
    write_checkpoint(kind, tmp_path)
    check_answers(
        tmp_path,
        torch.device("cuda", torch.cuda.current_device()),
        requests(seed=4, count=60),
    )


def check_answers(checkpoint: Path, device: torch.device, wanted: list[EngineRequest]) -> None:
    found: list[dict[int, list[RequestOutput]]] = []
    for graph_steps in (True, False):
        engine, runner = make_engine(checkpoint, device, graph_steps=graph_steps)
        if isinstance(runner, GraphExecutor):
            capture_all(runner)
        found.append(answers(engine, wanted, random.Random(1)))
        assert engine.requests.num_preemptions > 0
    for request in wanted:
        (tokens, scores, embedding), (plain, plain_scores, plain_vector) = (
            told(answer[request.id]) for answer in found
        )
        assert tokens == plain, request
        assert scores == pytest.approx(plain_scores, abs=1e-4)
        assert torch.allclose(embedding, plain_vector, atol=1e-4)


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
        tokens = told(got[request.id])[0]
        assert tokens == told(plain[request.id])[0][: len(tokens)], request


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


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_graphs_answer_as_the_same_steps_without_graphs(
    checkpoint: Path, dtype: torch.dtype
) -> None:
    """To the bit: the same kernels run on the same padded steps."""
    device = torch.device("cuda", torch.cuda.current_device())
    wanted = requests(seed=2, count=150)
    found: list[dict[int, list[RequestOutput]]] = []
    for with_graphs in (True, False):
        engine, runner = make_engine(checkpoint, device, graph_steps=True, dtype=dtype)
        assert isinstance(runner, GraphExecutor)
        if with_graphs:
            capture_all(runner)
        found.append(answers(engine, wanted, random.Random(1)))
    for request in wanted:
        graph, plain = (told(answer[request.id]) for answer in found)
        assert graph[:2] == plain[:2], request
        assert torch.equal(graph[2], plain[2])


@pytest.mark.gpu
def test_graphs_that_are_captured_between_steps_change_no_answer(checkpoint: Path) -> None:
    device = torch.device("cuda", torch.cuda.current_device())
    wanted = requests(seed=3, count=40)
    engine, _ = make_engine(checkpoint, device, graph_steps=True)
    plain = answers(engine, wanted, random.Random(1))
    engine, runner = make_engine(checkpoint, device, graph_steps=True)
    assert isinstance(runner, GraphExecutor)
    graphs = runner.graphs
    run = engine.step

    def step_and_capture() -> list[RequestOutput]:
        runner.prepare()
        return run()

    engine.step = step_and_capture  # type: ignore[method-assign]
    got = answers(engine, wanted, random.Random(1))
    assert len(graphs.captured) > 5
    for request in wanted:
        assert told(got[request.id])[0] == told(plain[request.id])[0]


@pytest.mark.gpu
def test_a_load_right_after_the_start_captures_nothing_and_is_answered_the_same(
    checkpoint: Path,
) -> None:
    """Steps of sizes that have no graph yet run in larger ones."""
    device = torch.device("cuda", torch.cuda.current_device())
    wanted = requests(seed=6, count=60)
    engine, _ = make_engine(checkpoint, device, graph_steps=True)
    plain = answers(engine, wanted, random.Random(1))
    engine, runner = make_engine(checkpoint, device, graph_steps=True)
    assert isinstance(runner, GraphExecutor)
    runner.capture_startup_set()
    known, counts = set(runner.graphs.captured), runner.graph_counts
    counts.reset()
    got = answers(engine, wanted, random.Random(1))
    assert set(runner.graphs.captured) == known
    assert counts.captures == 0 and counts.steps_in_larger > 0
    for request in wanted:
        assert told(got[request.id])[0] == told(plain[request.id])[0]
