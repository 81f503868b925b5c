"""Ranks whose norms add the products of all: two processes that map each other's memory."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from msgspec import structs

from model_zoo.parallel.communicator import ProcessGroupCommunicator
from runtime.config import EngineConfig
from runtime.engine.loop import Engine
from runtime.messages import EngineRequest, SamplingParams
from tests.support.models.tiny_checkpoints import write_checkpoint
from tests.support.parallel.gloo_engine import TwoRanks, answers, engine_of

# Dense, with experts, with sinks and biases, with recurrent states, with norms around the sum.
KINDS = ("qwen3", "qwen2-moe", "gpt-oss", "qwen3.5-text", "gemma3")


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TwoRanks]:
    found = TwoRanks(tmp_path_factory.mktemp("ranks"), fused_sums=True)
    yield found
    found.close()


def config_of(directory: Path) -> EngineConfig:
    return EngineConfig(
        model=str(directory),
        device="cpu",
        dtype="float32",
        max_num_seqs=3,
        max_batched_tokens=16,
        kv_tokens=256,
        threads=1,
    )


def tokens_by_id(engine: Engine) -> dict[int, list[int]]:
    """Of two prompts that have more tokens than a buffer has rows, and one that has fewer."""
    random = np.random.default_rng(0)
    requests = [
        EngineRequest(
            id=id,
            client=0,
            tokens=random.integers(2, 96, length).tolist(),
            params=SamplingParams(max_tokens=5, temperature=float(id), seed=id),
        )
        for id, length in enumerate((21, 5, 12))
    ]
    found = answers(engine, requests)
    assert all(outputs[-1].finish == "length" for outputs in found.values())
    return {id: [token for each in found[id] for token in each.tokens] for id in found}


def communicator_of(two_ranks: TwoRanks) -> ProcessGroupCommunicator:
    communicator = two_ranks.ranks.communicator
    assert isinstance(communicator, ProcessGroupCommunicator)
    return communicator


@pytest.mark.parametrize("kind", KINDS)
def test_two_processes_whose_norms_add_answer_with_the_tokens_of_one(
    kind: str, two_ranks: TwoRanks, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    write_checkpoint(kind, tmp_path)
    config = config_of(tmp_path)
    with engine_of(config) as (engine, _):
        expected = tokens_by_id(engine)
    rows: list[int] = []
    with two_ranks.engine(config) as engine:
        sums = communicator_of(two_ranks).fused
        assert sums is not None and 1 < sums.max_rows < 16
        begin = sums.begin

        def recorded(count: int, *, of_embeddings: bool = False):
            where = begin(count, of_embeddings=of_embeddings)
            rows.append(count if where is not None else -count)
            return where

        monkeypatch.setattr(sums, "begin", recorded)
        assert tokens_by_id(engine) == expected
    # Of chunks of prompts the library's sums, of the rows that decode those of the norms.
    assert {row for row in rows if row > 0} >= {1, 2, 3} and min(rows) == -16


def test_with_disable_custom_all_reduce_the_library_adds(two_ranks: TwoRanks, tmp_path: Path):
    write_checkpoint("qwen3", tmp_path)
    config = config_of(tmp_path)
    with engine_of(config) as (engine, _):
        expected = tokens_by_id(engine)
    with two_ranks.engine(structs.replace(config, disable_custom_all_reduce=True)) as engine:
        assert communicator_of(two_ranks).fused is None
        assert tokens_by_id(engine) == expected


def test_models_whose_norms_are_not_rms_norms_keep_the_sums_of_the_library(
    two_ranks: TwoRanks, tmp_path: Path
):
    write_checkpoint("gpt2", tmp_path)
    config = config_of(tmp_path)
    with engine_of(config) as (engine, _):
        expected = tokens_by_id(engine)
    with two_ranks.engine(config) as engine:
        assert communicator_of(two_ranks).fused is None
        assert tokens_by_id(engine) == expected
