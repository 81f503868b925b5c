"""Steps with images, padded and in kernels, give what transformers gives; others replay graphs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from msgspec import structs

from model_zoo.config import read_config
from runtime.cuda_graph.executor import GraphExecutor
from runtime.cuda_graph.launch import Buckets, LaunchPlanner, StepLaunch
from runtime.engine.loop import Engine
from runtime.executor.images import RowImages
from runtime.messages import EngineRequest, SamplingParams
from runtime.scheduler.batch import make_batch
from tests.support.engine.device_engine import engine_of, sizes
from tests.support.interpreter.unused_lanes import UNUSED_LANES
from tests.support.models.loaded_model import load_model
from tests.support.models.tiny_vision import (
    SIDE,
    library_answer,
    picture,
    prompt_with,
    write_vision_checkpoint,
)

pytestmark = UNUSED_LANES
SLOTS, PAGE, MAX_LEN, STEPS = 3, 16, 96, 6
TEXT = [5, 9, 17, 33, 2, 71, 8]
PROMPTS = [
    prompt_with(TEXT, picture(3, 4, 0), TEXT),
    prompt_with(TEXT * 2),
    prompt_with(picture(2, 2, 1), TEXT, picture(1, 8, 2), TEXT),
    prompt_with(TEXT * 3),  # in a slot that had images
]


def make_engine(checkpoint: Path, device: torch.device) -> tuple[Engine, GraphExecutor]:
    config = read_config(checkpoint)
    assert config.vision is not None
    model: Any = load_model(config, checkpoint, dtype=torch.float32, device=device)
    plain = sizes(
        slots=SLOTS, budget=24, pages=20, page_size=PAGE, max_len=MAX_LEN, prefix_cache=True
    )
    resolved = structs.replace(
        plain,
        image_token_side=SIDE,
        image_token_bytes=4 * config.vision.feature_size,
        encoder_stages=config.vision.stage_operations,
    )
    images = RowImages(model.vision, token_side=SIDE, num_slots=SLOTS, device=device)
    engine, executor = engine_of(config, model, device, resolved, graph_steps=True, images=images)
    assert isinstance(executor, GraphExecutor)
    return engine, executor


def test_padded_steps_with_images_give_the_tokens_of_transformers(
    tmp_path: Path, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    reference = write_vision_checkpoint("qwen3-vl", tmp_path)
    engine, executor = make_engine(tmp_path, device)
    launches: list[tuple[StepLaunch, bool]] = []  # and whether tokens are of images
    run, row_images = executor.run, executor._images
    assert row_images is not None

    def noted(launch: Any) -> None:
        launches.append((launch, row_images.in_step(launch.batch)))
        run(launch)

    monkeypatch.setattr(executor, "run", noted)
    params = SamplingParams(max_tokens=STEPS, temperature=0)
    for id, (tokens, images) in enumerate(PROMPTS):
        engine.add(EngineRequest(id, 0, tokens, params, images=images))
    answers: list[list[int]] = [[] for _ in PROMPTS]
    while not engine.idle:
        for output in engine.step():
            assert output.error is None
            answers[output.id] += output.tokens
    assert answers == [library_answer(reference, *prompt, STEPS) for prompt in PROMPTS]
    decoding = [
        with_images
        for launch, with_images in launches
        if launch.batch.decode_rows == len(launch.batch.slots)
    ]
    assert decoding and not any(decoding)
    assert any(with_images for _, with_images in launches)


def test_a_step_with_images_replays_no_graph_and_any_other_does() -> None:
    buckets = Buckets(4, 64)
    planner = LaunchPlanner(
        buckets, set(buckets.graphs()), free_bytes=lambda: 1 << 40, uncaptured=[]
    )
    batch = make_batch([0], [0], [2], [1, 2], [1], [0], [True], 0, [])
    launch = planner.plan(batch, all_hidden_states=False, has_images=True)
    assert not launch.graph and planner.counts.steps_without == 1
    assert planner.plan(batch, all_hidden_states=False).graph
