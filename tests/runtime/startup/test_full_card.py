"""A GPU whose memory is short: before the start, or taken by another process after it."""

from __future__ import annotations

import gc
import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from benchmarks.shapes import SHAPES
from model_zoo.config import read_config
from runtime.config import ConfigError, EngineConfig
from runtime.cuda_graph.executor import GraphExecutor
from runtime.engine.loop import Engine
from runtime.messages import EngineRequest, PoolingParams, RequestOutput, SamplingParams
from runtime.startup.loading import Loaded, load
from runtime.startup.memory_estimate import StepSizes, estimate
from tests.support.engine.device_engine import FitRules

pytestmark = pytest.mark.gpu

MIB, GIB = 2**20, 2**30
BALLAST = """
import sys, torch
held, step, left = [], 1 << 30, int(sys.argv[1])
while step >= 2 << 20:
    try:
        assert torch.cuda.mem_get_info()[0] - step >= left
        held.append(torch.empty(step, dtype=torch.uint8, device="cuda"))
    except (AssertionError, torch.OutOfMemoryError):
        step //= 2
print(torch.cuda.mem_get_info()[0], flush=True)
sys.stdin.read()
"""
EVERYTHING = SamplingParams(
    max_tokens=4,
    temperature=0.5,
    top_p=0.9,
    top_k=1000,
    min_p=0.001,
    presence_penalty=0.1,
    repetition_penalty=1.1,
    logit_bias={5: 1.0},
    min_tokens=2,
    stop_ids=(0, 1),
    logprobs=20,
    banned=((7,), (8, 9)),
    grammar="9",
)


@contextmanager
def ballast(left: int) -> Iterator[None]:
    """Another program takes all of the GPU's memory but `left` bytes."""
    with subprocess.Popen(
        [sys.executable, "-c", BALLAST, str(left)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as process:
        assert process.stdin is not None and process.stdout is not None
        try:
            assert abs(int(process.stdout.readline()) - left) < 64 * MIB
            yield
        finally:
            process.stdin.close()


@pytest.fixture(autouse=True)
def empty_device() -> None:
    gc.collect()
    torch.cuda.empty_cache()


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Qwen3-0.6B, cut to two layers: half a gigabyte, with a vocabulary of 151,936."""
    directory = tmp_path_factory.mktemp("shape")
    shape = SHAPES["qwen3-0.6b"] | {"num_hidden_layers": 2}
    (directory / "config.json").write_text(json.dumps(shape))
    return directory


def loaded(model: Path, **options: object) -> Loaded:
    config = EngineConfig(model=str(model), device="cuda", load_format="dummy", **options)  # type: ignore[arg-type]
    return load(config, lambda phase, done, total: None)


def worst_requests(rows: int, longest: int) -> list[EngineRequest]:
    """Rows that want everything, prompts that are scored from end to end, and one vector."""
    row_params = [EVERYTHING] * rows
    row_params += [SamplingParams(1, temperature=0, prompt_logprobs=20, logprobs=20)] * 2
    row_params += [SamplingParams(0, pooling=PoolingParams("mean"))]
    lengths = [33] * rows + [longest] * 3
    return [
        EngineRequest(id, 0, [(id * 7 + place) % 1000 for place in range(length)], params)
        for id, (length, params) in enumerate(zip(lengths, row_params, strict=True))
    ]


def check_answers(found: Loaded, requests: list[EngineRequest]) -> None:
    """Each request gets all of its tokens, or its vector; idle moments are used, too."""
    vocab = found.ready.vocab_size
    engine = Engine(found.resolved, vocab, found.executor, grammars=FitRules(vocab))  # type: ignore[arg-type]
    for request in requests:
        engine.add(request)
    outputs: dict[int, list[RequestOutput]] = {request.id: [] for request in requests}
    while not engine.idle:
        found.executor.prepare()
        for output in engine.step():
            assert output.error is None
            outputs[output.id].append(output)
    for request in requests:
        tokens = [token for output in outputs[request.id] for token in output.tokens]
        assert len(tokens) == request.params.max_tokens
        assert outputs[request.id][-1].embedding or request.params.pooling is None


def test_steps_of_the_worst_requests_need_no_memory_that_was_free_after_the_start(
    model: Path,
) -> None:
    found = loaded(model, max_model_len=16_384, kv_tokens=200_000)
    with ballast(left=32 * MIB):
        check_answers(found, worst_requests(found.resolved.max_num_seqs, 16_000))


def test_a_card_of_three_gigabytes_serves_with_graphs(model: Path) -> None:
    with ballast(left=3 * GIB):
        found = loaded(model, max_model_len=4096)
        report = dict(found.ready.memory)
        assert report["unused"] >= 0 and report["KV"] > 256 * MIB
        check_answers(found, worst_requests(64, 3000))
        executor = found.executor
        assert isinstance(executor, GraphExecutor)
        assert executor.graphs.captured.keys() >= set(executor._buckets.startup_set())


def test_a_card_that_is_too_small_ends_the_start_with_numbers_to_change(model: Path) -> None:
    with (
        ballast(left=900 * MIB),
        pytest.raises(ConfigError, match=r"memory: .*--max-batched-tokens \d+"),
    ):
        loaded(model)
    torch.cuda.empty_cache()
    with (
        ballast(left=200 * MIB),
        pytest.raises(ConfigError, match=r"weights in bfloat16 take \d+.* MiB, .* MiB are free"),
    ):
        loaded(model)


def test_the_memory_estimate_of_a_start_is_near_what_it_measures(model: Path) -> None:
    config = EngineConfig(model=str(model), device="cuda", load_format="dummy", max_num_seqs=64)
    found = load(config, lambda phase, done, total: None)
    resolved, report = found.resolved, dict(found.ready.memory)
    steps = StepSizes(
        tokens=resolved.max_batched_tokens,
        rows=resolved.max_num_seqs,
        max_len=resolved.max_model_len,
        page_size=resolved.page_size,
    )
    estimated = estimate(read_config(model), torch.bfloat16, steps, free=80 * GIB, share=0.9)
    assert report["weights"] == pytest.approx(estimated.weights, rel=0.001)
    assert report["state"] == pytest.approx(estimated.state, rel=0.5)
    assert report["activations"] == pytest.approx(estimated.activations, rel=0.5)
    # What graphs take depends on what PyTorch's allocator has left over.
    measured = sum(report[name] for name in ("state", "activations", "graphs"))
    assert measured == pytest.approx(
        estimated.state + estimated.activations + estimated.graphs, rel=0.5
    )
