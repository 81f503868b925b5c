"""Values of options that were renamed, and those that vLLM has."""

from __future__ import annotations

import argparse

import pytest

from server.cli.flags import add_engine_flags, read_engine_flags
from server.cli.main import UsageError

NAMES = ("split_planner", "attention")


def test_old_values_are_taken_as_the_new_ones_from_commands_and_environments():
    parser = argparse.ArgumentParser()
    add_engine_flags(parser, NAMES)
    args = parser.parse_args(["--split-planner", "uneven"])
    found = read_engine_flags(args, {"WAVEFILL_ATTENTION": "fixed"}, NAMES)
    assert found == {"split_planner": "stream-k", "attention": "batch-invariant"}


def values(*words: str) -> dict[str, object]:
    names = ("dtype", "kv_dtype", "quantization", "max_model_len")
    parser = argparse.ArgumentParser()
    add_engine_flags(parser, names)
    return read_engine_flags(parser.parse_args(words), {}, names)


def test_values_of_vllm_are_taken_as_those_of_this_server():
    assert values("--dtype", "half") == {"dtype": "float16"}
    assert values("--dtype", "float") == {"dtype": "float32"}
    assert values("--dtype", "BFloat16") == {"dtype": "bfloat16"}
    assert values("--kv-dtype", "fp8") == {"kv_dtype": "fp8_e4m3"}
    assert values("--quantization", "fp8") == {"quantization": "fp8"}
    for length in ("auto", "-1", "0"):
        assert values("--max-model-len", length) == {"max_model_len": 0}


def test_a_value_that_another_option_has_is_refused_as_it_was_written():
    with pytest.raises(UsageError, match="--dtype fp8: choose one of auto, float32"):
        values("--dtype", "fp8")


def test_the_format_of_a_quantized_checkpoint_need_not_be_chosen():
    with pytest.raises(UsageError, match=r"--quantization awq: .*; auto runs a quantized checkpoi"):
        values("--quantization", "awq")
