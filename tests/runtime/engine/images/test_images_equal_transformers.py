"""Through the whole engine, a model says of images what transformers says, token by token."""

from __future__ import annotations

import gc
from collections.abc import Callable
from pathlib import Path
from typing import Any
from weakref import ref

import pytest
import torch
from msgspec.structs import replace

from runtime.config import DeviceOption
from runtime.engine.loop import Engine
from runtime.executor.torch_executor import TorchExecutor
from runtime.messages import EngineRequest, PromptImage, SamplingParams
from runtime.scheduler.batch import Batch
from tests.support.engine.loaded_engine import loaded_engine
from tests.support.models.tiny_vision import (
    HYBRID_VISION_KINDS,
    VISION_KINDS,
    library_answer,
    picture,
    prompt_with,
    write_vision_checkpoint,
)

STEPS = 40
TEXT = [5, 9, 17, 33, 2, 71, 8, 40, 41, 42]
Prompt = tuple[list[int], tuple[PromptImage, ...]]
A, B, WIDE, LARGE = picture(3, 4, 0), picture(3, 4, 1), picture(2, 9, 2), picture(7, 6, 3)
PROMPTS: list[Prompt] = [
    prompt_with(TEXT, A, TEXT),
    prompt_with(TEXT, B, TEXT),  # as the first, but for what the image shows
    prompt_with(LARGE, TEXT, WIDE, A, TEXT * 2),
    prompt_with(TEXT * 3),
    prompt_with(TEXT, A, TEXT, WIDE, TEXT),  # a further turn of the first
    prompt_with(TEXT, A, TEXT * 2, B, TEXT),
]


@pytest.fixture(scope="module", params=VISION_KINDS)
def written(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, Any]:
    directory = tmp_path_factory.mktemp(request.param)
    return directory, write_vision_checkpoint(request.param, directory)


@pytest.fixture(scope="module")
def checkpoint(written: tuple[Path, Any]) -> Path:
    return written[0]


@pytest.fixture(scope="module", params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> DeviceOption:
    return request.param


@pytest.fixture(scope="module")
def expected(written: tuple[Path, Any]) -> list[list[int]]:
    return [library_answer(written[1], *prompt, STEPS) for prompt in PROMPTS]


def answer(engine: Engine, prompts: list[Prompt]) -> list[list[int]]:
    params = SamplingParams(max_tokens=STEPS, temperature=0)
    answers: list[list[int]] = [[] for _ in prompts]
    for id, (tokens, images) in enumerate(prompts):
        engine.add(EngineRequest(id, 0, tokens, params, images=images))
    while not engine.idle:
        for output in engine.step():
            assert output.error is None, output.error
            if output.id < len(answers):
                answers[output.id] += output.tokens
    return answers


def test_a_request_that_is_aborted_leaves_no_pixels(checkpoint: Path, device: DeviceOption) -> None:
    engine = loaded_engine(checkpoint, device, max_batched_tokens=7)
    tokens, images = prompt_with(TEXT, picture(7, 6, 4), TEXT)
    pixels = ref(images[0])
    engine.add(EngineRequest(0, 0, tokens, SamplingParams(max_tokens=2), images=images))
    for _ in range(3):
        engine.step()
    engine.abort(0)
    del images
    while not engine.idle:
        engine.step()
    gc.collect()
    assert pixels() is None


def test_the_encoders_work_is_part_of_what_a_step_is_known_to_have_done(
    checkpoint: Path, device: DeviceOption
) -> None:
    engine = loaded_engine(checkpoint, device)
    for id, (tokens, images) in enumerate((PROMPTS[0], PROMPTS[3])):  # the second is of text
        engine.add(EngineRequest(id, 0, tokens, SamplingParams(max_tokens=1), images=images))
        while not engine.idle:
            engine.step()
    (with_image, _), (text, _) = engine.scheduler.times.recent
    stages = len(engine.requests.resolved.encoder_stages)
    assert (with_image.encoder_stages, with_image.has_images) == (stages, 1)
    assert with_image.encoder_operations > 0
    assert (text.encoder_stages, text.encoder_operations, text.has_images) == (0, 0.0, 0)


def cutting_engine(checkpoint: Path, device: DeviceOption, **options: Any) -> Engine:
    """With a target that no step can keep, and without the CUDA graphs of small images, which are
    encoded whole."""
    attention = "mha" if device == "cuda" else "auto"
    options = {"itl_target_ms": 1e-3, "attention": attention, **options}
    return loaded_engine(checkpoint, device, **options)


def test_an_image_that_is_encoded_over_many_steps_changes_no_token(
    checkpoint: Path, device: DeviceOption, expected: list[list[int]]
) -> None:
    """One stage of the encoder, or one chunk, at a time."""
    engine = cutting_engine(checkpoint, device, prefix_cache=False)
    slices: list[tuple[int, int]] = []
    forward = engine._executor.forward

    def noted(batch: Batch) -> None:
        slices.extend((one.first, one.end) for one in batch.image_stages)
        forward(batch)

    engine._executor.forward = noted  # type: ignore[method-assign]
    engine.add(EngineRequest(99, 0, TEXT, SamplingParams(max_tokens=150, temperature=0)))
    for _ in range(3):
        engine.step()
    assert answer(engine, PROMPTS[:3]) == expected[:3]
    assert len(slices) > 4, "no image was cut"


def test_an_abort_in_the_middle_of_an_image_leaves_nothing_on_the_device(
    checkpoint: Path, device: DeviceOption
) -> None:
    engine = cutting_engine(checkpoint, device)
    engine.add(EngineRequest(1, 0, TEXT, SamplingParams(max_tokens=200, temperature=0)))
    for _ in range(3):
        engine.step()
    tokens, images = PROMPTS[2]
    engine.add(EngineRequest(2, 0, tokens, SamplingParams(max_tokens=2), images=images))
    held: Any = engine._executor._images  # type: ignore[attr-defined]
    for _ in range(200):
        engine.step()
        if held._begun is not None:
            break
    assert held._begun is not None
    engine.abort(2)
    engine.step()
    assert held._begun is None and engine.requests.images.begun is None


@pytest.mark.parametrize("batched", [7, 48, 512])
def test_chunks_that_cut_images_change_no_token(
    checkpoint: Path, device: DeviceOption, expected: list[list[int]], batched: int
) -> None:
    engine = loaded_engine(checkpoint, device, max_batched_tokens=batched)
    assert answer(engine, PROMPTS) == expected
    stats = engine.stats()
    assert stats.images_encoded == 4 and stats.image_encoder_seconds > 0


def test_preempted_sequences_see_their_images_again(
    checkpoint: Path, device: DeviceOption, expected: list[list[int]]
) -> None:
    engine = loaded_engine(checkpoint, device, kv_tokens=224, max_batched_tokens=64)
    assert answer(engine, PROMPTS) == expected
    assert engine.stats().preemptions > 0


def skip_hybrids(checkpoint: Path) -> None:
    if checkpoint.name.startswith(HYBRID_VISION_KINDS):
        pytest.skip("its prefixes need snapshots: test_hybrid_images.py")


def test_a_prefix_is_cached_for_the_same_images_alone(
    checkpoint: Path, device: DeviceOption, expected: list[list[int]]
) -> None:
    skip_hybrids(checkpoint)
    engine = loaded_engine(checkpoint, device)
    for number in (0, 1):
        assert answer(engine, [PROMPTS[number]]) == [expected[number]]
    assert engine.stats().cached_tokens == 0  # the first page has the image's first tokens
    assert answer(engine, [PROMPTS[0]]) == [expected[0]]
    cached = engine.stats().cached_tokens
    assert cached == (len(PROMPTS[0][0]) - 1) // 16 * 16
    assert answer(engine, [PROMPTS[4]]) == [expected[4]]
    assert engine.stats().cached_tokens > cached
    assert engine.stats().images_encoded == 3


def test_an_image_behind_a_cached_prefix_is_not_encoded(
    checkpoint: Path, device: DeviceOption
) -> None:
    skip_hybrids(checkpoint)
    engine = loaded_engine(checkpoint, device)
    prompt = prompt_with(A, TEXT * 4)
    first = answer(engine, [prompt])
    forget_features(engine)
    assert answer(engine, [prompt]) == first
    assert engine.stats().images_encoded == 1 and engine.stats().image_cache_hits == 0


def test_answers_of_one_prompt_encode_its_image_once(
    checkpoint: Path, device: DeviceOption
) -> None:
    engine = loaded_engine(checkpoint, device, max_batched_tokens=16, prefix_cache=False)
    first, *others = answer(engine, [PROMPTS[0]] * 4)
    assert others == [first] * 3
    assert engine.stats().images_encoded == 1 and engine.stats().image_cache_hits == 3


def forget_features(engine: Engine) -> None:
    """Features that no prompt reads next are dropped, for every other image."""
    images = engine.requests.images
    images.limit = 1
    for digest in list(images._tokens):
        images._unread.discard(digest)
        images._drop(digest, images._tokens.pop(digest))


def test_images_whose_features_were_dropped_are_encoded_again(
    checkpoint: Path, device: DeviceOption, expected: list[list[int]]
) -> None:
    engine = loaded_engine(checkpoint, device, max_batched_tokens=16)
    forget_features(engine)
    assert answer(engine, PROMPTS) == expected
    assert engine.stats().images_encoded > 4


def without_pixels(image: PromptImage) -> PromptImage:
    return replace(image, pixels=image.pixels[:-1])


WRONG: list[tuple[Callable[[PromptImage], PromptImage], str]] = [
    (lambda image: replace(image, start=200), "not within the prompt"),
    (lambda image: replace(image, num_tokens=11), "does not take 11 tokens"),
    (lambda image: replace(image, width=100), "multiples of 32"),
    (without_pixels, "not 3 for each pixel"),
]


@pytest.mark.parametrize(("change", "message"), WRONG)
def test_images_that_do_not_fit_their_prompt_fail_alone(
    checkpoint: Path, change: Callable[[PromptImage], PromptImage], message: str
) -> None:
    engine = loaded_engine(checkpoint, "cpu")
    tokens, [image] = PROMPTS[0]
    params = SamplingParams(max_tokens=2, temperature=0)
    engine.add(EngineRequest(1, 0, tokens, params, images=(change(image),)))
    engine.add(EngineRequest(2, 0, tokens, params, images=(image,)))
    errors: dict[int, str | None] = {}
    while not engine.idle:
        errors |= {output.id: output.error for output in engine.step() if output.finish}
    assert message in (errors[1] or "") and errors[2] is None


def test_text_alone_makes_no_call_that_images_need(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = loaded_engine(checkpoint, "cpu")
    executor = engine._executor
    assert isinstance(executor, TorchExecutor)

    def refuse(*_: Any) -> None:
        raise AssertionError("no image is there")

    for name in ("_encode", "_step_images"):
        monkeypatch.setattr(executor._images, name, refuse)
    answer(engine, [PROMPTS[3]])
    assert torch.count_nonzero(executor._images.position_deltas) == 0  # type: ignore[union-attr]
