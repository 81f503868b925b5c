"""On a GPU, published shapes of few layers say what transformers says, token by token."""

from __future__ import annotations

import gc
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.shapes import SHAPES
from runtime.config import DeviceOption, EngineConfig
from runtime.engine.loop import Engine
from runtime.messages import EngineRequest, SamplingParams
from runtime.startup.loading import load

STEPS = 24
PROMPT_LENS = (1, 77, 300, 1100)  # the last one in chunks, in steps with rows that decode
CUTS = {
    "qwen3-0.6b": {"num_hidden_layers": 3},
    "qwen3-8b": {"num_hidden_layers": 2, "vocab_size": 8192},
    "llama-3.1-8b": {"num_hidden_layers": 2, "vocab_size": 8192},
}


def prompts(vocab: int) -> list[list[int]]:
    noise = torch.Generator().manual_seed(3)
    return [torch.randint(vocab, (length,), generator=noise).tolist() for length in PROMPT_LENS]


def write_and_ask(shape: dict[str, Any], directory: Path, device: DeviceOption) -> list[list[int]]:
    """A checkpoint of random weights, and what transformers answers, one prompt at a time."""
    from transformers import AutoConfig, AutoModelForCausalLM

    (directory / "config.json").write_text(json.dumps(shape))
    torch.manual_seed(7)
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(
            AutoConfig.from_pretrained(directory), dtype=torch.float32
        ).eval()
    model.save_pretrained(directory)
    model.generation_config.eos_token_id = None  # it would be masked
    answers: list[list[int]] = []
    for prompt in prompts(shape["vocab_size"]):
        tokens = torch.tensor([prompt], device=device)
        generated = model.generate(
            tokens,
            attention_mask=torch.ones_like(tokens),
            max_new_tokens=STEPS,
            min_new_tokens=STEPS,
            do_sample=False,
            pad_token_id=0,
            eos_token_id=None,
        )
        answers.append(generated[0, len(prompt) :].tolist())
    return answers


def check(shape: dict[str, Any], directory: Path, device: DeviceOption) -> None:
    expected = write_and_ask(shape, directory, device)
    gc.collect()
    if device == "cuda":
        torch.cuda.empty_cache()
    config = EngineConfig(
        model=str(directory), device=device, dtype="float32", kv_tokens=8192, max_num_seqs=8,
        max_batched_tokens=512, threads=1,
    )  # fmt: skip
    loaded = load(config, lambda phase, done, total: None)
    engine = Engine(loaded.resolved, loaded.ready.vocab_size, loaded.executor)
    found: list[list[int]] = [[] for _ in expected]
    for id, prompt in enumerate(prompts(shape["vocab_size"])):
        engine.add(EngineRequest(id, 0, prompt, SamplingParams(max_tokens=STEPS, temperature=0)))
    while not engine.idle:
        for output in engine.step():
            assert output.error is None
            found[output.id] += output.tokens
    assert found == expected


@pytest.mark.gpu
@pytest.mark.parametrize("name", CUTS)
def test_greedy_tokens_of_real_shapes_are_those_of_transformers(name: str, tmp_path: Path) -> None:
    check(SHAPES[name] | CUTS[name], tmp_path, "cuda")
