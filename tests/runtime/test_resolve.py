"""What becomes of the operator's wishes."""

from __future__ import annotations

import pytest

from runtime.config import ConfigError, EngineConfig, ModelFacts, Resolved, resolve

FACTS = ModelFacts(model_type="fake", max_position=512, vocab_size=100, kv_bytes_per_token=1024)


def settle(*, budget: int = 1 << 30, **wishes: int) -> Resolved:
    return resolve(
        EngineConfig(model="", **wishes),
        FACTS,
        device="cpu",
        dtype="float32",
        kv_dtype="float32",
        attention="mha",
        kv_budget_bytes=budget,
        threads=1,
    )


def test_a_small_token_budget_is_kept_and_bounds_the_sequences_that_run() -> None:
    resolved = settle(max_batched_tokens=24)
    assert (resolved.max_batched_tokens, resolved.max_num_seqs) == (24, 24)
    assert settle(max_num_seqs=900).max_batched_tokens == 900


def test_a_token_budget_below_the_sequences_asked_for_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"--max-batched-tokens 8 .* --max-num-seqs 16"):
        settle(max_batched_tokens=8, max_num_seqs=16)


def test_a_pool_too_small_for_one_request_of_the_length_asked_for_is_refused() -> None:
    with pytest.raises(ConfigError, match="lower --max-model-len to 64"):
        settle(budget=64 * 1024, max_model_len=128)
    assert settle(budget=64 * 1024).max_model_len == 64


def test_more_kv_tokens_than_memory_holds_are_refused() -> None:
    with pytest.raises(ConfigError, match="ask for at most 64"):
        settle(budget=64 * 1024, kv_tokens=80)
