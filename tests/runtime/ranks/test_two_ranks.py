"""A model that two processes share, by gloo: its answers are those of one process."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch

from runtime.config import EngineConfig
from runtime.engine.loop import Engine
from runtime.messages import EngineRequest, PoolingParams, RequestOutput, SamplingParams
from tests.support.engine.device_engine import FitRules
from tests.support.models.tiny_checkpoints import KINDS, write_checkpoint
from tests.support.parallel.gloo_engine import TwoRanks, answers, engine_of
from tests.support.quantization.quantized_models import FORMATS, write_quantized

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


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TwoRanks]:
    found = TwoRanks(tmp_path_factory.mktemp("ranks"))
    yield found
    found.close()


def config_of(directory: Path, **options: object) -> EngineConfig:
    sizes = {"max_num_seqs": 3, "max_batched_tokens": 16, "kv_tokens": 512, "threads": 1}
    options = {"dtype": "float32", **sizes, **options}
    return EngineConfig(model=str(directory), device="cpu", **options)  # type: ignore[arg-type]


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


def assert_same_answers(two_ranks: TwoRanks, config: EngineConfig) -> None:
    with engine_of(config) as (engine, _):
        expected = answers(engine, workload())
        cached_tokens = engine.stats().cached_tokens
        # Recurrent states need snapshots, of which these few steps make none.
        assert cached_tokens > 0 or engine.requests.states.num_states
    with two_ranks.engine(config) as engine:
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
    assert_same_answers(two_ranks, config_of(tmp_path, snapshot_every=64))


def tokens_by_id(engine: Engine, requests: list[EngineRequest]) -> dict[int, list[int]]:
    return {id: tokens_of(each) for id, each in answers(engine, requests).items()}


def test_two_processes_with_few_pages_preempt_as_one_does(two_ranks: TwoRanks, tmp_path: Path):
    write_checkpoint("qwen3", tmp_path)
    config = config_of(tmp_path, kv_tokens=96, max_model_len=64)
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
    config = config_of(tmp_path)
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
    config = config_of(tmp_path, kv_dtype="fp8_e4m3")
    with two_ranks.engine(config) as engine:
        found = answers(engine, workload())
    with engine_of(config) as (engine, _):
        expected = answers(engine, workload())
    vectors = [np.frombuffer(each[4][-1].embedding or b"", "<f4") for each in (found, expected)]
    np.testing.assert_allclose(vectors[0], vectors[1], atol=0.02)
    assert torch.cosine_similarity(*[torch.tensor(v) for v in vectors], 0) > 0.999
