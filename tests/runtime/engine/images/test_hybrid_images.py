"""Snapshots of recurrent states are found by prompts with the same images alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from runtime.config import DeviceOption
from runtime.engine.loop import Engine
from runtime.messages import EngineRequest, PromptImage, SamplingParams
from tests.support.engine.loaded_engine import loaded_engine
from tests.support.models.tiny_vision import picture, prompt_with, write_vision_checkpoint

TEXT = [5, 9, 17, 33, 2, 71, 8, 40, 41, 42]
Prompt = tuple[list[int], tuple[PromptImage, ...]]
ONE, OTHER = picture(7, 6, 0), picture(7, 6, 1)


@pytest.fixture(scope="module", params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> DeviceOption:
    return request.param


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("qwen3.5")
    write_vision_checkpoint("qwen3.5", directory)
    return directory


def make_engine(checkpoint: Path, device: DeviceOption, **options: Any) -> Engine:
    options = {"max_batched_tokens": 48, "snapshot_every": 64} | options
    return loaded_engine(checkpoint, device, **options)


def answer(engine: Engine, prompt: Prompt, steps: int = 10) -> tuple[list[int], int]:
    """-> its tokens, and how many of the prompt were found in the cache."""
    params = SamplingParams(max_tokens=steps, temperature=0)
    engine.add(EngineRequest(1, 0, prompt[0], params, images=prompt[1]))
    said: list[int] = []
    cached: list[int] = []
    while not engine.idle:
        for output in engine.step():
            assert output.error is None, output.error
            said += output.tokens
            cached.append(output.cached)
    return said, cached[0]


def test_a_snapshot_within_an_image_is_of_that_image(
    checkpoint: Path, device: DeviceOption
) -> None:
    """Prompts of 134 tokens, the same but for what 42 of them show."""
    plain = make_engine(checkpoint, device, prefix_cache=False)
    engine = make_engine(checkpoint, device)
    prompts = [prompt_with(TEXT * 3, image, TEXT * 6) for image in (ONE, OTHER)]
    said = [answer(plain, prompt)[0] for prompt in prompts]
    assert said[0] != said[1]
    for number, cached in ((0, 0), (1, 0), (0, 128), (1, 128)):
        assert answer(engine, prompts[number]) == (said[number], cached)
    assert engine.stats().images_encoded == 2


def test_a_snapshot_where_an_answer_ends_is_of_the_images_before_it(
    checkpoint: Path, device: DeviceOption
) -> None:
    """The page that the answer ends in, of 128 tokens, has the image, and no border after it.

    Ids of images' tokens that are sent as text are text: another prompt again.
    """
    sizes = {"page_size": 128, "kv_tokens": 4096, "max_batched_tokens": 512}
    engine = make_engine(checkpoint, device, **sizes, snapshot_every=512)
    plain = make_engine(checkpoint, device, **sizes, prefix_cache=False)
    first = TEXT * 38
    begun = first + answer(engine, (first, ()), 151)[0]
    assert len(begun) == 531
    shown = {image: prompt_with(begun, TEXT * 24, image, TEXT) for image in (ONE, OTHER)}
    tokens, images = shown[ONE]
    assert images[0].start == 772
    said, cached = answer(engine, (tokens, images))
    assert cached == 530
    turn, position = [*tokens, *said, *TEXT], len(tokens) + len(said) - 1
    for seen, found in ((shown[OTHER][1], 530), ((), 530), (images, position)):
        assert answer(engine, (turn, seen)) == (answer(plain, (turn, seen))[0], found)
