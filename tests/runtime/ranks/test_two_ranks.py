"""A model that two processes share: its answers are those of one process.

By gloo on a CPU; where there are two GPUs also by NCCL, in the graphs of whole steps.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
from msgspec import structs

from runtime.config import EngineConfig
from runtime.engine.loop import Engine
from runtime.messages import EngineRequest, PoolingParams, RequestOutput, SamplingParams
from tests.support.engine.device_engine import FitRules
from tests.support.models.tiny_checkpoints import KINDS, write_checkpoint
from tests.support.models.tiny_vision import picture, prompt_with, write_vision_checkpoint
from tests.support.parallel.gloo_engine import TwoRanks, answers, engine_of
from tests.support.quantization.gpt_oss_model import write_gpt_oss
from tests.support.quantization.quantized_models import (
    FORMATS,
    write_quantized,
    write_quantized_experts,
)

ONE_KEY_HEAD = ("qwen3.5", "qwen3.5-moe", "qwen3.5-moe-text")
FAMILIES = ("qwen3", "qwen2-moe")
SCHEMES = ("fp8-block", "awq", "nvfp4")
CASES = [(write_checkpoint, kind, kind in FAMILIES) for kind in KINDS if kind not in ONE_KEY_HEAD]
CASES += [
    (lambda name, at: write_quantized(at, name), name, name in SCHEMES)
    for name in FORMATS
    # int8-row: activations are rounded, with a scale for each rank's part of a row.
    if "act-order" not in name and not name.startswith("int8-row")
]


@pytest.fixture(scope="module", params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def two_ranks(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[TwoRanks]:
    if request.param == "cuda" and torch.cuda.device_count() < 2:
        pytest.skip("needs two CUDA devices")
    found = TwoRanks(tmp_path_factory.mktemp("ranks"), request.param)
    yield found
    found.close()


def config_of(directory: Path, two_ranks: TwoRanks, **options: object) -> EngineConfig:
    sizes = {"max_num_seqs": 3, "max_batched_tokens": 16, "kv_tokens": 512, "threads": 1}
    options = {"dtype": "float32", **sizes, **options}
    return EngineConfig(model=str(directory), device=two_ranks.device, **options)  # type: ignore[arg-type]


def workload() -> list[EngineRequest]:
    """Prompts longer than a step, with and without a common beginning; every kind of sampling."""
    random = np.random.default_rng(0)
    common = random.integers(2, 96, 70).tolist()
    request = partial(SamplingParams, max_tokens=9)
    params = [
        request(temperature=0.0, logprobs=2),
        request(temperature=1.0, top_p=0.9, seed=7),
        request(temperature=0.7, repetition_penalty=1.2, logit_bias={5: 3.0}),
        SamplingParams(max_tokens=2, temperature=0.0, prompt_logprobs=1),
        SamplingParams(max_tokens=0, pooling=PoolingParams(kind="mean")),
        request(temperature=1.0, top_k=5, presence_penalty=0.5, banned=((7,),)),
    ]
    prompts = [common, [*common, 3, 4], random.integers(2, 96, 5).tolist()] * 2
    return [
        EngineRequest(id=id, client=0, tokens=prompt, params=each)
        for id, (prompt, each) in enumerate(zip(prompts, params, strict=True))
    ]


def tokens_of(outputs: list[RequestOutput]) -> list[int]:
    assert outputs[-1].finish not in (None, "error"), outputs[-1]
    return [token for output in outputs for token in output.tokens]


def write_narrow_experts(name: str, directory: Path) -> None:
    """Of which two ranks would have one and a half blocks of 128 inner values each."""
    write_quantized_experts(directory, name, inner=384)


def assert_same_answers(
    two_ranks: TwoRanks, config: EngineConfig, *, expert_parallel: bool = False
) -> None:
    with engine_of(config) as (engine, _):
        expected = answers(engine, workload())
        cached_tokens = engine.stats().cached_tokens
        # Recurrent states need snapshots, of which these few steps make none.
        assert cached_tokens > 0 or engine.requests.states.num_states
    divided = structs.replace(config, expert_parallel=expert_parallel)
    with two_ranks.engine(divided) as engine:
        found = answers(engine, workload())
        assert engine.stats().cached_tokens == cached_tokens
    assert {id: tokens_of(each) for id, each in found.items()} == {
        id: tokens_of(each) for id, each in expected.items()
    }
    vectors = [np.frombuffer(each[4][-1].embedding or b"", "<f4") for each in (found, expected)]
    assert len(vectors[0]) > 0
    np.testing.assert_allclose(vectors[0], vectors[1], atol=1e-4)
    scores = [
        [score.logprob for output in each[0] for score in output.logprobs or []]
        for each in (found, expected)
    ]
    assert len(scores[0]) == 9
    np.testing.assert_allclose(scores[0], scores[1], atol=1e-3)


@pytest.mark.parametrize(
    ("write", "name"),
    [
        pytest.param(write, name, id=name, marks=() if fast else pytest.mark.slow)
        for write, name, fast in CASES
    ],
)
def test_two_processes_answer_with_the_tokens_of_one(
    write: object, name: str, two_ranks: TwoRanks, tmp_path: Path
):
    write(name, tmp_path)  # type: ignore[operator]
    assert_same_answers(two_ranks, config_of(tmp_path, two_ranks, snapshot_every=64))


EXPERT_PARALLEL = {"gpt-oss": write_checkpoint, "qwen2-moe": write_checkpoint}
EXPERT_PARALLEL |= {"fp8-block": write_narrow_experts, "mxfp4": lambda name, at: write_gpt_oss(at)}


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=() if name in ("qwen2-moe", "fp8-block") else pytest.mark.slow)
        for name in EXPERT_PARALLEL
    ],
)
def test_two_processes_with_half_of_the_experts_answer_with_the_tokens_of_one(
    name: str, two_ranks: TwoRanks, tmp_path: Path
):
    EXPERT_PARALLEL[name](name, tmp_path)
    assert_same_answers(two_ranks, config_of(tmp_path, two_ranks), expert_parallel=True)


def tokens_by_id(engine: Engine, requests: list[EngineRequest]) -> dict[int, list[int]]:
    return {id: tokens_of(each) for id, each in answers(engine, requests).items()}


VISION = {
    "qwen3-vl": {},
    "qwen3-vl-moe": {},
    "qwen3.5": {"linear_num_key_heads": 2, "linear_num_value_heads": 4},
}


@pytest.mark.parametrize(
    "kind", ["qwen3-vl", *(pytest.param(k, marks=pytest.mark.slow) for k in list(VISION)[1:])]
)
def test_two_processes_see_the_images_of_a_prompt(kind: str, two_ranks: TwoRanks, tmp_path: Path):
    """An image takes several steps, one is in two prompts, and one sequence is aborted."""
    write_vision_checkpoint(kind, tmp_path, **VISION[kind])
    text = [5, 9, 17, 33]
    pictures = [picture(7, 6, 1), picture(3, 4, 2), picture(9, 10, 3)]
    parts = [(text, pictures[0], text), (pictures[1], text, pictures[0]), (text, pictures[2], text)]
    requests = [
        EngineRequest(id, 0, tokens, SamplingParams(max_tokens=8, temperature=0.0), images=images)
        for id, (tokens, images) in enumerate(prompt_with(*each) for each in parts)
    ]
    sizes = {"max_batched_tokens": 32, "kv_tokens": 4096, "snapshot_every": 64}
    config = config_of(tmp_path, two_ranks, **sizes)
    with engine_of(config) as (engine, _):
        expected = tokens_by_id(engine, requests)
    with two_ranks.engine(config) as engine:
        engine.add(structs.replace(requests[2], id=9))
        for _ in range(3):
            engine.step()
        engine.abort(9)
        while not engine.idle:
            engine.step()
        assert tokens_by_id(engine, requests) == expected


def test_two_processes_go_on_from_snapshots_of_recurrent_states(
    two_ranks: TwoRanks, tmp_path: Path
):
    write_checkpoint("qwen3.5-text", tmp_path)
    sizes = {"max_batched_tokens": 48, "kv_tokens": 1024, "snapshot_every": 64}
    config = config_of(tmp_path, two_ranks, **sizes)
    prompt = np.random.default_rng(2).integers(3, 90, 150).tolist()

    def turns(engine: Engine) -> list[list[int]]:
        params = SamplingParams(max_tokens=6, temperature=0.0)
        said: list[list[int]] = []
        for tokens in (prompt, prompt, [*prompt[:130], 5, 6, 7]):
            request = EngineRequest(id=len(said), client=0, tokens=tokens, params=params)
            said.append(tokens_by_id(engine, [request])[request.id])
        return said

    with engine_of(config) as (engine, _):
        expected, cached = turns(engine), engine.stats().cached_tokens
    assert cached >= 2 * 128
    with two_ranks.engine(config) as engine:
        assert turns(engine) == expected
        assert engine.stats().cached_tokens == cached


def test_two_processes_with_few_pages_preempt_as_one_does(two_ranks: TwoRanks, tmp_path: Path):
    write_checkpoint("qwen3", tmp_path)
    config = config_of(tmp_path, two_ranks, kv_tokens=96, max_model_len=64)
    params = SamplingParams(max_tokens=30, temperature=1.0, seed=5)
    requests = [
        EngineRequest(id=id, client=0, tokens=[2 + id] * 14, params=params) for id in range(3)
    ]
    with two_ranks.engine(config) as engine:
        found = tokens_by_id(engine, requests)
        assert engine.stats().preemptions > 0
    with engine_of(config) as (engine, _):
        assert tokens_by_id(engine, requests) == found


def test_masks_of_a_grammar_reach_both_processes(two_ranks: TwoRanks, tmp_path: Path):
    """Some are late, so that their rows are held back after the forward pass."""
    write_checkpoint("qwen3", tmp_path)
    config = config_of(tmp_path, two_ranks)
    requests = [
        EngineRequest(
            id=id,
            client=0,
            tokens=[2 + id] * 5,
            params=SamplingParams(max_tokens=20, grammar=str(7 + id), temperature=1.0, seed=id),
        )
        for id in range(3)
    ]
    with two_ranks.engine(config, FitRules(131)) as engine:
        found = tokens_by_id(engine, requests)
    for id, tokens in found.items():
        assert len(tokens) == 7 + id
        assert all(left % 3 != right % 3 for left, right in pairwise(tokens))
    with engine_of(config, grammars=FitRules(131)) as (engine, _):
        assert tokens_by_id(engine, requests) == found


def test_two_processes_store_keys_and_values_in_8_bits(two_ranks: TwoRanks, tmp_path: Path):
    """Their rounding makes answers depend on the last bits: they are compared with a tolerance."""
    write_checkpoint("qwen3", tmp_path)
    config = config_of(tmp_path, two_ranks, kv_dtype="fp8_e4m3")
    with two_ranks.engine(config) as engine:
        found = answers(engine, workload())
    with engine_of(config) as (engine, _):
        expected = answers(engine, workload())
    vectors = [np.frombuffer(each[4][-1].embedding or b"", "<f4") for each in (found, expected)]
    np.testing.assert_allclose(vectors[0], vectors[1], atol=0.02)
    assert torch.cosine_similarity(*[torch.tensor(v) for v in vectors], 0) > 0.999
