"""On a GPU: graphs with images, answers that do not depend on their company, no waiting."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch

from runtime.config import EngineConfig
from runtime.cuda_graph.executor import GraphExecutor
from runtime.cuda_graph.launch import StepLaunch
from runtime.engine.loop import Engine
from runtime.messages import EngineRequest, PromptImage, SamplingParams
from runtime.startup.loading import Loaded, load
from tests.support.models.tiny_vision import (
    PROCESSOR,
    library_answer,
    picture,
    prompt_with,
    write_vision_checkpoint,
)

pytestmark = pytest.mark.gpu

TEXT = [5, 9, 17, 33, 2, 71, 8, 40, 41, 42]
Prompt = tuple[list[int], tuple[PromptImage, ...]]
# Widths of a published model, and few layers.
LARGE = {
    "model_type": "qwen3_vl",
    "text_config": {
        "model_type": "qwen3_vl_text", "vocab_size": 5003, "hidden_size": 1024,
        "intermediate_size": 3072, "num_hidden_layers": 4, "num_attention_heads": 16,
        "num_key_value_heads": 8, "head_dim": 128, "max_position_embeddings": 8192,
        "rms_norm_eps": 1e-6, "tie_word_embeddings": False,
        "rope_scaling": {"mrope_section": [24, 20, 20], "mrope_interleaved": True,
                         "rope_type": "default"},
        "rope_theta": 5_000_000,
    },
    "vision_config": {
        "depth": 4, "hidden_size": 1152, "intermediate_size": 4304, "num_heads": 16,
        "out_hidden_size": 1024, "num_position_embeddings": 2304,
        "deepstack_visual_indexes": [0, 1, 2],
    },
    "image_token_id": 130,
    "eos_token_id": 1,
    "dtype": "bfloat16",
}  # fmt: skip


def engine_of(model: Path, **options: Any) -> tuple[Engine, Loaded]:
    chosen = {"kv_tokens": 1 << 15, "max_num_seqs": 16, "max_model_len": 2048, **options}
    loaded = load(EngineConfig(model=str(model), device="cuda", **chosen), lambda *_: None)
    return Engine(loaded.resolved, loaded.ready.vocab_size, loaded.executor), loaded


def answer(engine: Engine, prompts: Iterable[Prompt], steps: int) -> list[list[int]]:
    params = SamplingParams(max_tokens=steps, temperature=0)
    answers: list[list[int]] = []
    for id, (tokens, images) in enumerate(prompts):
        engine.add(EngineRequest(id, 0, tokens, params, images=images))
        answers.append([])
    while not engine.idle:
        for output in engine.step():
            assert output.error is None, output.error
            answers[output.id] += output.tokens
    return answers


def test_steps_with_images_and_rows_that_decode_after_them_replay_graphs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reference = write_vision_checkpoint("qwen3-vl", tmp_path)
    engine, loaded = engine_of(tmp_path, dtype="float32")
    executor = loaded.executor
    assert isinstance(executor, GraphExecutor)
    while executor.prepare():
        pass
    launches: list[tuple[bool, bool]] = []  # whether it replays a graph, and has images
    run, images = executor.run, executor._images
    assert images is not None

    def noted(launch: Any) -> None:
        if isinstance(launch, StepLaunch):
            launches.append((launch.graph, images.in_step(launch.batch)))
        run(launch)

    monkeypatch.setattr(executor, "run", noted)
    prompts = [
        prompt_with(TEXT, picture(3, 4, 0), TEXT),
        prompt_with(picture(7, 6, 3), TEXT, picture(2, 9, 2), TEXT),
        prompt_with(TEXT * 3),
    ]
    found = answer(engine, prompts, 48)
    assert found == [library_answer(reference, *prompt, 48) for prompt in prompts]
    assert all(graph for graph, _ in launches)
    assert sum(with_images for _, with_images in launches) < 10 < len(launches)


def large(folder: Path, **options: Any) -> tuple[Engine, Loaded]:
    (folder / "config.json").write_text(json.dumps(LARGE))
    (folder / "preprocessor_config.json").write_text(json.dumps(PROCESSOR))
    return engine_of(folder, load_format="dummy", **options)


def mixed_prompts() -> list[Prompt]:
    return [
        prompt_with(TEXT * 5, picture(9, 14, 1), TEXT),
        prompt_with(picture(20, 20, 2), TEXT, picture(3, 3, 3), TEXT * 9),
        prompt_with(TEXT * 40),
        prompt_with(picture(4, 4, 4)),
    ]


def test_deterministic_answers_about_images_do_not_depend_on_their_company(tmp_path: Path) -> None:
    engine, _ = large(tmp_path, deterministic=True, prefix_cache=False)
    prompts = mixed_prompts()
    alone = [answer(engine, [prompt], 40)[0] for prompt in prompts]
    crowd = [prompt_with(TEXT * size, picture(5, 1 + size, size)) for size in range(1, 9)]
    together = answer(engine, [*crowd, *prompts], 40)[len(crowd) :]
    assert together == alone
    small, _ = large(tmp_path, deterministic=True, max_batched_tokens=64, prefix_cache=False)
    assert answer(small, prompts, 40) == alone


@pytest.mark.parametrize("deterministic", [False, True])
def test_the_encoders_graphs_change_no_token_and_are_there_from_the_start(
    deterministic: bool, tmp_path: Path
) -> None:
    """Nine images; the last has 1,600 patches: it is neither padded nor has it a graph."""
    prompts = [
        *mixed_prompts(),
        *(prompt_with(TEXT, picture(side, side + 1, side), TEXT) for side in (5, 9, 13, 15)),
        prompt_with(picture(20, 20, 7), TEXT),
    ]
    found: list[list[list[int]]] = []
    for captured in (True, False):
        engine, loaded = large(tmp_path, deterministic=deterministic, prefix_cache=False)
        executor = loaded.executor
        assert isinstance(executor, GraphExecutor) and loaded.resolved.whole_image_tokens == 256
        graphs = executor._encoder_graphs
        assert graphs is not None and len(graphs.captured) == 8
        if not captured:
            graphs.captured.clear()
        # One after the other: steps are the same whatever the encoder takes.
        found.append([answer(engine, [prompt], 24)[0] for prompt in prompts])
        assert executor.image_counts.encoded == 9
    assert found[0] == found[1]


def test_small_images_beside_rows_that_decode_have_the_answers_that_they_have_alone(
    tmp_path: Path,
) -> None:
    """They are encoded whole, a large one stage by stage."""
    engine, _ = large(tmp_path, deterministic=True, prefix_cache=False, itl_target_ms=5.0)
    decoding = [prompt_with(TEXT * size) for size in range(1, 6)]
    prompts = [prompt_with(TEXT, picture(4 + n, 8, n), TEXT) for n in range(8)]
    prompts.append(prompt_with(picture(20, 20, 9), TEXT))
    alone = [answer(engine, [prompt], 24)[0] for prompt in prompts]
    assert answer(engine, [*decoding, *prompts], 24)[len(decoding) :] == alone


@pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype")
def test_queueing_a_step_with_images_waits_for_nothing(tmp_path: Path) -> None:
    engine, loaded = large(tmp_path, max_batched_tokens=96, prefix_cache=False)
    answer(engine, [prompt_with(TEXT, picture(2, 2, 9))], 4)
    for _ in range(2):  # without the graphs of steps with images, and with them
        torch.cuda.set_sync_debug_mode("error")
        try:
            found = answer(engine, mixed_prompts(), 16)
        finally:
            torch.cuda.set_sync_debug_mode("default")
        assert all(len(one) == 16 for one in found)
        while loaded.executor.prepare():
            pass
