"""A tiny model through the whole engine on the Triton kernels: the same tokens as without them."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

from runtime.config import AttentionOption, DType, EngineConfig
from runtime.engine.loop import Engine
from runtime.messages import EngineRequest, PoolingParams, SamplingParams
from runtime.startup.loading import Loaded, load
from tests.support.models.tiny_checkpoints import write_checkpoint

PROMPTS = [[5, 9, 60], [44, 3, 17, 17, 80, 9, 12, 30, 7, 51, 29]]
STEPS = 5
PARAMS = (
    SamplingParams(max_tokens=3),
    SamplingParams(max_tokens=17, top_p=0.9, top_k=20, min_p=0.01, frequency_penalty=0.5),
    SamplingParams(max_tokens=9, temperature=0),
    SamplingParams(max_tokens=7, logprobs=2, prompt_logprobs=2, logit_bias={5: 2.0}),
    SamplingParams(max_tokens=5, allowed_ids=(5, 6, 7), banned=((5, 6), (7,))),
    SamplingParams(max_tokens=0, pooling=PoolingParams("mean")),
    SamplingParams(max_tokens=0, pooling=PoolingParams("last")),
)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("qwen3")
    write_checkpoint("qwen3", directory)
    return directory


def loaded(checkpoint: Path, attention: AttentionOption, device: str, **options: object) -> Loaded:
    config = EngineConfig(
        model=str(checkpoint), device=device, dtype="float32", attention=attention, kv_tokens=128,
        max_num_seqs=2, max_batched_tokens=7, max_model_len=64, threads=1, **options,
    )  # fmt: skip
    return load(config, lambda phase, done, total: None)


def answers(loaded: Loaded) -> list[list[int]]:
    """Greedy tokens; prompts are cut into chunks in steps with a row that decodes."""
    engine = Engine(loaded.resolved, loaded.ready.vocab_size, loaded.executor)
    found: list[list[int]] = [[] for _ in PROMPTS]
    for id, prompt in enumerate(PROMPTS):
        engine.add(EngineRequest(id, 0, prompt, SamplingParams(max_tokens=STEPS, temperature=0)))
    while not engine.idle:
        for output in engine.step():
            assert output.error is None
            found[output.id] += output.tokens
    return found


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> str:
    if request.param == "cpu" and os.environ.get("TRITON_INTERPRET") != "1":
        pytest.skip("kernels are compiled here: TRITON_INTERPRET=1 would interpret them")
    return request.param


@pytest.mark.parametrize("name", ["flash1", "flash2"])
def test_kernels_and_torch_say_the_same_tokens(
    checkpoint: Path, name: AttentionOption, device: str
):
    kernels, torch_itself = (loaded(checkpoint, which, device) for which in (name, "mha"))
    assert kernels.ready.attention.startswith(f"{name} (")
    assert answers(kernels) == answers(torch_itself)


def test_fp8_pages_take_a_quarter_of_what_float32_takes(checkpoint: Path):
    plain = loaded(checkpoint, "mha", "cpu")
    fp8 = loaded(checkpoint, "mha", "cpu", kv_dtype="fp8_e4m3")
    assert fp8.resolved.num_pages == plain.resolved.num_pages
    scales = 2 * 3 * 2 * 4  # layers, kv heads, bytes
    assert fp8.ready.kv_bytes == plain.ready.kv_bytes // 4 + scales
    assert fp8.ready.attention == "mha (in torch, pages fp8_e4m3)"
    assert [len(answer) for answer in answers(fp8)] == [STEPS, STEPS]


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("name", ["flash1", "flash2"])
def test_no_kernel_is_compiled_after_the_warm_up(
    checkpoint: Path, name: AttentionOption, dtype: DType
):
    """A compilation would stop every answer for a second."""
    import triton

    config = EngineConfig(
        model=str(checkpoint), device="cuda", dtype=dtype, attention=name, kv_tokens=4096,
        max_num_seqs=12, max_batched_tokens=48,
    )  # fmt: skip
    ready = load(config, lambda phase, done, total: None)
    engine = Engine(ready.resolved, ready.ready.vocab_size, ready.executor)
    for id in range(40):
        prompt = [(id + place) % 90 + 3 for place in range(1 + id * 7 % 301)]
        engine.add(EngineRequest(id, 0, prompt, PARAMS[id % len(PARAMS)]))
    compiled: list[str] = []
    hook = triton.knobs.runtime.jit_post_compile_hook
    triton.knobs.runtime.jit_post_compile_hook = lambda **facts: compiled.append(facts["repr"])
    try:
        while not engine.idle:
            assert all(output.error is None for output in engine.step())
    finally:
        triton.knobs.runtime.jit_post_compile_hook = hook
    assert compiled == []


@pytest.mark.gpu
def test_auto_is_flash2_on_a_gpu(checkpoint: Path):
    assert torch.cuda.is_available()
    assert loaded(checkpoint, "auto", "cuda").resolved.attention == "flash2"
