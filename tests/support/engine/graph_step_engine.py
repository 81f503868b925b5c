"""Engines whose steps are whole graphs, on memory full of junk, and the same in plain torch."""

from __future__ import annotations

import random
from functools import cache
from pathlib import Path

import pytest
import torch

from model_zoo.config import read_config
from model_zoo.model import Model
from runtime.cuda_graph.executor import GraphExecutor
from runtime.engine.loop import Engine
from runtime.executor.torch_executor import TorchExecutor
from runtime.messages import EngineRequest, PoolingParams, RequestOutput, SamplingParams
from tests.support.engine.device_engine import engine_of, sizes
from tests.support.models.loaded_model import load_model

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


@cache
def model_of(checkpoint: Path, device: torch.device, dtype: torch.dtype) -> Model:
    return load_model(read_config(checkpoint), checkpoint, dtype=dtype, device=device)


def make_engine(
    checkpoint: Path,
    device: torch.device,
    *,
    graph_steps: bool,
    dtype: torch.dtype = torch.float32,
    pages: int = 7,
) -> tuple[Engine, TorchExecutor | GraphExecutor]:
    """With kernels and whole steps on memory full of junk, or in plain torch."""
    resolved = sizes(
        slots=SLOTS, budget=24, pages=pages, page_size=PAGE, max_len=MAX_LEN, prefix_cache=True
    )
    model = model_of(checkpoint, device, dtype)
    engine, runner = engine_of(
        read_config(checkpoint), model, device, resolved, graph_steps=graph_steps, dtype=dtype
    )
    if isinstance(runner, GraphExecutor):
        spoil(runner)
    return engine, runner


def spoil(steps: GraphExecutor) -> None:
    """Junk in everything that a step or a new sequence must write before it is read."""
    for part in (
        steps._step,
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


def results_of(outputs: list[RequestOutput]) -> tuple[list[int], list[float], torch.Tensor]:
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
            results_of(answer[request.id]) for answer in found
        )
        assert tokens == plain, request
        assert scores == pytest.approx(plain_scores, abs=1e-4)
        assert torch.allclose(embedding, plain_vector, atol=1e-4)
