"""On a GPU, queueing a step never waits for the one before."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from runtime.config import EngineConfig
from runtime.engine.loop import Engine
from runtime.messages import EngineRequest, PoolingParams, SamplingParams
from runtime.startup.loading import load
from tests.support.models.tiny_checkpoints import SHAPE

FEATURES = (
    SamplingParams(max_tokens=40, temperature=0),
    SamplingParams(max_tokens=40, top_p=0.9, top_k=20, min_p=0.01, logprobs=3),
    SamplingParams(max_tokens=40, repetition_penalty=1.2, frequency_penalty=0.5),
    SamplingParams(max_tokens=40, logit_bias={5: 2.0}, stop_ids=(1, 7), min_tokens=30),
    SamplingParams(max_tokens=40, prompt_logprobs=2),
    SamplingParams(max_tokens=40, allowed_ids=(5, 6, 7), banned=((5, 6), (7,))),
    SamplingParams(max_tokens=40, logprobs=2, logprob_ids=(5, 9)),
    SamplingParams(max_tokens=0, pooling=PoolingParams("last")),
    SamplingParams(max_tokens=0, pooling=PoolingParams("mean", dimensions=20)),
)


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype")
@pytest.mark.parametrize("tied", [False, True])
def test_queueing_a_step_waits_for_nothing(tmp_path: Path, tied: bool) -> None:
    from transformers import Qwen3Config

    Qwen3Config(**{**SHAPE, "tie_word_embeddings": tied}, head_dim=32).save_pretrained(tmp_path)
    config = EngineConfig(
        model=str(tmp_path), device="cuda", dtype="bfloat16", load_format="dummy",
        kv_tokens=1024, max_num_seqs=8, max_batched_tokens=16,
    )  # fmt: skip
    loaded = load(config, lambda phase, done, total: None)
    engine = Engine(loaded.resolved, loaded.ready.vocab_size, loaded.executor)
    for id, params in enumerate(FEATURES):
        engine.add(
            EngineRequest(id, 0, [(id + place) % 90 + 3 for place in range(9 + 17 * id)], params)
        )
    torch.cuda.set_sync_debug_mode("error")
    try:
        while not engine.idle:
            assert all(output.error is None for output in engine.step())
    finally:
        torch.cuda.set_sync_debug_mode("default")
