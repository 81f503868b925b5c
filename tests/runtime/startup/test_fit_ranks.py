"""`wavefill plan`: what a model needs several devices for, and what they hold."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from transformers import Qwen3Config

from model_zoo.config import ModelError
from runtime.config import ConfigError, EngineConfig
from runtime.startup.fit_report import FitQuery, report

GIB = 2**30
TOKENS = re.compile(r"KV holds ([\d,]+) tokens")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of 1.3 billion parameters, 2.5 GiB in bfloat16."""
    directory = tmp_path_factory.mktemp("model")
    Qwen3Config(
        vocab_size=32_000,
        hidden_size=2048,
        intermediate_size=6144,
        num_hidden_layers=24,
        num_attention_heads=16,
        num_key_value_heads=8,
        head_dim=128,
        dtype="bfloat16",
        eos_token_id=1,
    ).save_pretrained(directory)
    return directory


def plan(model: Path, gib: int, ranks: int = 1) -> str:
    config = EngineConfig(model=str(model), tensor_parallel=ranks, max_batched_tokens=2048)
    return report(FitQuery(config=config, card=gib * GIB))


def tokens_of(text: str) -> int:
    found = TOKENS.search(text)
    assert found is not None, text
    return int(found[1].replace(",", ""))


def test_what_two_devices_hold_is_what_the_plan_with_two_ranks_says(model: Path):
    one, two = plan(model, 6), plan(model, 6, 2)
    assert f"with --tensor-parallel 2, on two of them: {tokens_of(two):,} tokens" in one
    assert tokens_of(two) > 2 * tokens_of(one)
    assert "divided among 2 devices: what follows is of each" in two
    assert "--tensor-parallel" not in two


def test_the_error_of_a_model_that_does_not_fit_says_how_many_devices_hold_it(model: Path):
    with pytest.raises(ConfigError, match=r"; --tensor-parallel 2, on 2 of them, holds") as error:
        plan(model, 3)
    held = int(str(error.value).rsplit(" ", 2)[1].replace(",", ""))
    assert held == tokens_of(plan(model, 3, 2))


def test_ranks_that_do_not_divide_the_model_are_refused(model: Path):
    with pytest.raises(ModelError, match="3 does not divide the 16 attention heads"):
        plan(model, 6, 3)
    with pytest.raises(ConfigError, match="--tensor-parallel 0: a model is on one device at least"):
        plan(model, 6, 0)
