"""Pooled vectors are those of transformers' hidden states, however a prompt was computed."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from runtime.config import DeviceOption, EngineConfig
from runtime.engine.loop import Engine
from runtime.messages import EngineRequest, PoolingParams, RequestOutput, SamplingParams
from runtime.startup.loading import load
from tests.support.models.tiny_checkpoints import write_checkpoint

LENGTHS = (1, 5, 16, 33, 47)
SHARED = 32  # tokens that all longer prompts begin with: two pages


@pytest.fixture(scope="module", params=["qwen3", "llama3", "gpt2"])
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp(request.param)
    write_checkpoint(request.param, directory)
    return directory


@pytest.fixture(scope="module", params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> DeviceOption:
    return request.param


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    noise = torch.Generator().manual_seed(5)
    common = torch.randint(3, 90, (SHARED,), generator=noise).tolist()
    others = [torch.randint(3, 90, (length,), generator=noise).tolist() for length in LENGTHS]
    return [(common + other)[: len(other)] if len(other) > SHARED else other for other in others]


@pytest.fixture(scope="module")
def states(checkpoint: Path, prompts: list[list[int]]) -> list[torch.Tensor]:
    """Of each prompt [T, hidden], after the last norm."""
    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)
    with torch.no_grad():
        return [
            model(torch.tensor([prompt]), output_hidden_states=True).hidden_states[-1][0]
            for prompt in prompts
        ]


def make_engine(checkpoint: Path, device: DeviceOption, *, kv_tokens: int, batched: int) -> Engine:
    config = EngineConfig(
        model=str(checkpoint), device=device, dtype="float32", kv_tokens=kv_tokens,
        max_num_seqs=4, max_batched_tokens=batched, threads=1,
    )  # fmt: skip
    loaded = load(config, lambda phase, done, total: None)
    assert loaded.ready.hidden_size == 64
    return Engine(loaded.resolved, loaded.ready.vocab_size, loaded.executor)


def pool(states: torch.Tensor, pooling_params: PoolingParams) -> torch.Tensor:
    embedding = states[-1] if pooling_params.kind == "last" else states.mean(0)
    embedding = embedding[: pooling_params.dimensions or None]
    return embedding / embedding.norm() if pooling_params.normalize else embedding


def run(engine: Engine, requests: list[EngineRequest]) -> dict[int, list[RequestOutput]]:
    got: dict[int, list[RequestOutput]] = {request.id: [] for request in requests}
    for request in requests:
        engine.add(request)
    while not engine.idle:
        for output in engine.step():
            got[output.id].append(output)
    assert engine.stats().pages_used == 0
    return got


def check(
    outputs: list[RequestOutput], states: torch.Tensor, pooling_params: PoolingParams
) -> None:
    [output] = outputs
    assert output.finish == "stop" and not output.tokens and output.started
    embedding = torch.from_numpy(np.frombuffer(output.embedding, "<f4").copy())
    torch.testing.assert_close(embedding, pool(states, pooling_params), atol=1e-4, rtol=1e-4)


POOLINGS = (
    PoolingParams("last"),
    PoolingParams("mean"),
    PoolingParams("last", dimensions=24),
    PoolingParams("mean", dimensions=24, normalize=False),
)


@pytest.mark.parametrize("pooling_params", POOLINGS, ids=str)
def test_one_prompt_alone(
    checkpoint: Path,
    device: DeviceOption,
    prompts: list[list[int]],
    states: list[torch.Tensor],
    pooling_params: PoolingParams,
) -> None:
    engine = make_engine(checkpoint, device, kv_tokens=1024, batched=64)
    params = SamplingParams(max_tokens=0, pooling=pooling_params)
    for id, prompt in enumerate(prompts):
        check(run(engine, [EngineRequest(id, 0, prompt, params)])[id], states[id], pooling_params)
    assert engine.stats().generated_tokens == 0


def test_chunks_among_answers_that_are_generated(
    checkpoint: Path, device: DeviceOption, prompts: list[list[int]], states: list[torch.Tensor]
) -> None:
    engine = make_engine(checkpoint, device, kv_tokens=1024, batched=7)
    answer = SamplingParams(max_tokens=30, temperature=0)
    alone = run(engine, [EngineRequest(0, 0, prompts[3], answer)])[0]
    for _ in range(2):  # the second time, pages are found in the prefix cache
        requests = [
            EngineRequest(
                10 * id + place, 0, prompt, SamplingParams(max_tokens=0, pooling=pooling_params)
            )
            for id, prompt in enumerate(prompts)
            for place, pooling_params in enumerate(POOLINGS)
        ]
        got = run(engine, [EngineRequest(99, 0, prompts[3], answer), *requests])
        for id in range(len(prompts)):
            for place, pooling_params in enumerate(POOLINGS):
                check(got[10 * id + place], states[id], pooling_params)
        tokens = [token for output in got[99] for token in output.tokens]
        assert tokens == [token for output in alone for token in output.tokens]
    cached = [got[40 + place][0].cached for place in range(len(POOLINGS))]
    assert cached[0] > 0 and cached[2] > 0, "the last token's state needs the last chunk only"
    assert cached[1] == cached[3] == 0, "a mean needs every state"


def test_preempted_prompts_give_the_same_embeddings(
    checkpoint: Path, device: DeviceOption, prompts: list[list[int]], states: list[torch.Tensor]
) -> None:
    engine = make_engine(checkpoint, device, kv_tokens=176, batched=4)
    answer = SamplingParams(max_tokens=60, temperature=0)
    # They leave one token a step for the prompts, and take their pages meanwhile.
    talk = [EngineRequest(id, 0, prompts[0], answer, priority=-1) for id in (90, 91, 92)]
    requests = [
        EngineRequest(
            10 * id + place, 0, prompts[id], SamplingParams(max_tokens=0, pooling=pooling_params)
        )
        for id in (3, 4)
        for place, pooling_params in enumerate(POOLINGS)
    ]
    got = run(engine, [*talk, *requests])
    for id in (3, 4):
        for place, pooling_params in enumerate(POOLINGS):
            check(got[10 * id + place], states[id], pooling_params)
    assert engine.stats().preemptions > 0
