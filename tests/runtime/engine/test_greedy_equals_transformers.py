"""Through the whole engine, a model says what transformers says, token by token."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from runtime.config import DeviceOption
from runtime.engine.loop import Engine
from runtime.messages import EngineRequest, SamplingParams
from tests.support.engine.loaded_engine import loaded_engine
from tests.support.models.tiny_checkpoints import HYBRID_KINDS, KINDS, write_checkpoint
from tests.support.quantization.gpt_oss_model import write_gpt_oss
from tests.support.quantization.quantized_models import write_quantized

STEPS = 64
FEW_STEPS = 40  # past the windows, and several pages
PROMPT_LENS = (1, 5, 16, 33, 47)


# One of each kind of codes; in float32, their weights are dequantized when they are loaded.
QUANTIZED = ("awq", "gptq-act-order", "int8-g128", "fp8-block", "nvfp4")
GPT_OSS = "gpt-oss-mxfp4"
ALL = [*KINDS, *QUANTIZED, GPT_OSS]
# One of each way to keep keys, values and states; quantized weights make no difference to those.
PREEMPTED = {"qwen3", "qwen3-one-kv-head", "gpt2", "mistral-window", "qwen2-windows", "qwen3-moe"}
PREEMPTED |= {"gpt-oss", "gemma2", "gemma3", "qwen3.5", "qwen3.5-text", "qwen3-next", GPT_OSS}


@pytest.fixture(scope="module", params=ALL)
def written(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, Any]:
    """A checkpoint and transformers' model of it, in float32."""
    directory = tmp_path_factory.mktemp("models") / request.param
    directory.mkdir()
    if request.param in QUANTIZED:
        return directory, write_quantized(directory, request.param)
    if request.param == GPT_OSS:
        return directory, write_gpt_oss(directory)
    write_checkpoint(request.param, directory)
    return directory, AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)


@pytest.fixture(scope="module", params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> DeviceOption:
    return request.param


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    noise = torch.Generator().manual_seed(11)
    return [torch.randint(3, 90, (length,), generator=noise).tolist() for length in PROMPT_LENS]


@torch.no_grad()
def said_by_transformers(model: Any, prompt: list[int], answer: list[int]) -> list[int]:
    """After the prompt and after each token but the last of the answer.  That is the answer itself
    if it is what transformers answers."""
    logits = model(torch.tensor([prompt + answer[:-1]]), use_cache=False).logits
    return logits[0, len(prompt) - 1 :].argmax(-1).tolist()


def answer(engine: Engine, prompts: list[list[int]], steps: int) -> list[list[int]]:
    params = SamplingParams(max_tokens=steps, temperature=0)
    answers: list[list[int]] = [[] for _ in prompts]
    for id, prompt in enumerate(prompts):
        engine.add(EngineRequest(id, 0, prompt, params))
    while not engine.idle:
        for output in engine.step():
            answers[output.id] += output.tokens
    return answers


def check(model: Any, prompts: list[list[int]], answers: list[list[int]], steps: int) -> None:
    """That the answers, of so many tokens, are those of transformers."""
    assert [len(tokens) for tokens in answers] == [steps] * len(prompts)
    for prompt, tokens in zip(prompts, answers, strict=True):
        assert tokens == said_by_transformers(model, prompt, tokens)


def test_chunks_of_prompts_among_decoding_rows_change_no_token(
    written: tuple[Path, Any], device: DeviceOption, prompts: list[list[int]]
) -> None:
    checkpoint, model = written
    engine = loaded_engine(checkpoint, device, kv_tokens=1024, max_batched_tokens=7)
    answers = answer(engine, prompts, FEW_STEPS)
    check(model, prompts, answers, FEW_STEPS)
    # A second time, the prompts and answers are found in the prefix cache, but not in models whose
    # recurrent states are not cached.
    assert answer(engine, prompts, FEW_STEPS) == answers
    has_states = checkpoint.name in HYBRID_KINDS
    assert (engine.stats().cached_tokens > 0) == (not has_states)


@pytest.mark.parametrize(
    "written",
    [pytest.param(kind, marks=() if kind in PREEMPTED else pytest.mark.slow) for kind in ALL],
    indirect=True,
)
def test_preempted_sequences_go_on_with_the_same_tokens(
    written: tuple[Path, Any], device: DeviceOption, prompts: list[list[int]]
) -> None:
    checkpoint, model = written
    # One window of 32 positions in all layers takes few pages.
    kv_tokens = 112 if "mistral-window" in checkpoint.name else 208
    engine = loaded_engine(checkpoint, device, kv_tokens=kv_tokens, max_batched_tokens=16)
    check(model, prompts, answer(engine, prompts, STEPS), STEPS)
    assert engine.stats().preemptions > 0
