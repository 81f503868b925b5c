"""Steps with images, padded and in kernels, give what transformers gives, and replay graphs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from msgspec import structs
from torch import Tensor

from model_zoo.config import read_config
from model_zoo.inputs import ModelInput, StepImages
from runtime.cuda_graph.buckets import Bucket
from runtime.cuda_graph.encoder_graphs import EncoderGraphs
from runtime.cuda_graph.executor import GraphExecutor
from runtime.cuda_graph.graphs import CapturedGraph
from runtime.cuda_graph.launch import CaptureLaunch, LaunchPlanner, StepLaunch
from runtime.engine.loop import Engine
from runtime.executor.images import RowImages
from runtime.messages import EngineRequest, PromptImage, SamplingParams
from tests.support.engine.device_engine import engine_of, sizes
from tests.support.engine.graph_step_engine import capture_all
from tests.support.images.padded_encoder import pool_of, read_lengths_on_device
from tests.support.interpreter.unused_lanes import UNUSED_LANES
from tests.support.models.loaded_model import load_model
from tests.support.models.tiny_vision import (
    SIDE,
    library_tokens,
    picture,
    prompt_with,
    write_vision_checkpoint,
)

pytestmark = UNUSED_LANES
SLOTS, PAGE, MAX_LEN, STEPS = 3, 16, 96, 4
TEXT = [5, 9, 17, 33, 2, 71, 8]
Prompt = tuple[list[int], tuple[PromptImage, ...]]
# The budget of 24 tokens cuts images, and has the ends of two prompts with images in one step.
LAYERS = {"qwen3-vl": 3, "qwen3.5": 5}  # two that add features of an image, and one that does not
PROMPTS = [
    prompt_with(TEXT, picture(3, 4, 0), TEXT),
    prompt_with(TEXT * 2),
    prompt_with(picture(2, 2, 1), TEXT, picture(1, 8, 2), TEXT),
    prompt_with(TEXT * 3),  # in a slot that had images
    prompt_with(picture(2, 2, 3), picture(1, 4, 4), TEXT),  # two images in one step
]


def make_engine(
    checkpoint: Path,
    device: torch.device,
    *,
    dtype: torch.dtype = torch.float32,
    encoder_rows: tuple[int, ...] = (),
) -> tuple[Engine, GraphExecutor]:
    """With junk in the buffers of a step's images; encoder_rows: of EncoderGraphs."""
    config = read_config(checkpoint)
    assert config.vision is not None
    model: Any = load_model(config, checkpoint, dtype=dtype, device=device)
    plain = sizes(
        slots=SLOTS, budget=24, pages=20, page_size=PAGE, max_len=MAX_LEN,
        prefix_cache=config.delta_net is None,
        states=0 if config.delta_net is None else SLOTS + 1,
    )  # fmt: skip
    resolved = structs.replace(
        plain,
        image_token_side=SIDE,
        image_token_bytes=dtype.itemsize * config.vision.feature_size,
        encoder_stages=config.vision.stage_operations,
    )
    encoder = model.vision
    if encoder_rows:
        encoder = EncoderGraphs(encoder, encoder_rows, device)
    images = RowImages(
        encoder,
        token_side=SIDE,
        num_slots=SLOTS,
        max_tokens=resolved.max_batched_tokens,
        device=device,
    )
    images.buffers._features.fill_(torch.nan)
    images.buffers._numbers.fill_(1 << 40)
    engine, executor = engine_of(
        config, model, device, resolved, graph_steps=True, dtype=dtype, images=images
    )
    assert isinstance(executor, GraphExecutor)
    if device.type == "cpu":
        interpret_graphs(executor)
    return engine, executor


class InterpretedGraph:
    """Stands for a captured graph: runs its step again, and writes the outputs that it has."""

    def __init__(self, executor: GraphExecutor, bucket: Bucket) -> None:
        self._step, self._bucket = executor._step, bucket
        self.outputs = self._step.run(bucket)

    def replay(self) -> None:
        found = self._step.run(self._bucket)
        self.outputs.hidden.copy_(found.hidden)
        self.outputs.logits.copy_(found.logits)


def interpret_graphs(executor: GraphExecutor) -> None:
    """Let the executor, which is on a CPU, capture graphs."""
    captured = executor.graphs.captured

    def capture(bucket: Bucket) -> None:
        executor._dry_run(bucket)
        graph: Any = InterpretedGraph(executor, bucket)
        captured[bucket] = CapturedGraph(graph, graph.outputs)

    executor.graphs.capture = capture  # type: ignore[method-assign]
    executor.planner = LaunchPlanner(
        executor._buckets,
        captured,
        free_bytes=lambda: 1 << 40,
        uncaptured=executor._buckets.graphs(),
    )
    executor.graph_counts = executor.planner.counts


def steps_of(executor: GraphExecutor) -> list[tuple[StepLaunch, bool]]:
    """The steps that the executor will run, and whether tokens of them are of images."""
    launches: list[tuple[StepLaunch, bool]] = []
    run, row_images = executor.run, executor._images
    assert row_images is not None

    def noted(launch: Any) -> None:
        if isinstance(launch, StepLaunch):
            launches.append((launch, row_images.in_step(launch.batch)))
        run(launch)

    executor.run = noted  # type: ignore[method-assign]
    return launches


def answer(
    engine: Engine, prompts: Sequence[Prompt], executor: GraphExecutor | None = None
) -> list[tuple[list[int], list[float]]]:
    """Tokens and their log-probabilities; executor: may capture a graph before each step."""
    params = SamplingParams(max_tokens=STEPS, temperature=0, logprobs=1)
    for id, (tokens, images) in enumerate(prompts):
        engine.add(EngineRequest(id, 0, tokens, params, images=images))
    answers: list[tuple[list[int], list[float]]] = [([], []) for _ in prompts]
    while not engine.idle:
        if executor is not None:
            executor.prepare()
        for output in engine.step():
            assert output.error is None
            answers[output.id][0].extend(output.tokens)
            answers[output.id][1].extend(score.logprob for score in output.logprobs or ())
    return answers


def check(answers: list[tuple[list[int], list[float]]], reference: Any) -> None:
    """That the answers to PROMPTS are those of transformers."""
    for prompt, (tokens, _) in zip(PROMPTS, answers, strict=True):
        assert len(tokens) == STEPS
        assert tokens == library_tokens(reference, *prompt, tokens)


@pytest.mark.parametrize("kind", ["qwen3-vl", "qwen3.5"])
@pytest.mark.parametrize("graphs", ["none", "all", "captured between steps"])
def test_padded_steps_with_images_give_the_tokens_of_transformers(
    kind: str, graphs: str, tmp_path: Path, device: torch.device
) -> None:
    reference = write_vision_checkpoint(kind, tmp_path, num_hidden_layers=LAYERS[kind])
    engine, executor = make_engine(tmp_path, device)
    if graphs == "all":
        capture_all(executor)
    launches = steps_of(executor)
    found = answer(engine, PROMPTS, executor if graphs == "captured between steps" else None)
    check(found, reference)
    assert all(launch.bucket.images == with_images for launch, with_images in launches)
    decoding = [
        with_images
        for launch, with_images in launches
        if launch.batch.decode_rows == len(launch.batch.slots)
    ]
    assert decoding and not any(decoding)
    replayed = {with_images for launch, with_images in launches if launch.graph}
    assert replayed == (set() if graphs == "none" else {True, False})
    assert graphs != "all" or all(launch.graph for launch, _ in launches)


@pytest.mark.parametrize("kind", ["qwen3-vl", "qwen3.5"])
def test_images_whose_encoder_is_padded_or_replayed_give_the_tokens_of_transformers(
    kind: str, tmp_path: Path, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The largest has 48 patches and is not padded; all are encoded whole."""
    read_lengths_on_device(monkeypatch, device)
    reference = write_vision_checkpoint(kind, tmp_path, num_hidden_layers=LAYERS[kind])
    found: list[list[tuple[list[int], list[float]]]] = []
    for captured in (True, False):
        engine, executor = make_engine(tmp_path, device, encoder_rows=(24, 40))
        graphs = executor._encoder_graphs
        assert graphs is not None
        if captured:
            graphs.capture(pool_of(device))
        found.append(answer(engine, PROMPTS))
        check(found[-1], reference)
        assert executor.image_counts.encoded == 5
    assert found[0] == found[1]


class BothWays:
    """A model that compares steps with images in the static buffers to steps with them alone."""

    def __init__(self, model: Any) -> None:
        self._model = model
        self.logits, self.shortened = model.logits, model.shortened
        self.compared: list[int] = []  # tokens of images

    def __call__(self, inp: ModelInput) -> Tensor:
        images = inp.images
        if images is None:
            return self._model(inp)
        count = int((images.index >= 0).sum())
        self.compared.append(count)
        alone = StepImages(
            images.features[:count].clone(), images.index.clone(), images.positions.contiguous()
        )
        # Keys and values are written twice, the same ones.
        expected = self._model(replace(inp, images=alone)).clone()
        found = self._model(inp)
        assert torch.equal(found, expected)
        return found


def test_static_buffers_give_the_bits_of_tensors_that_hold_a_steps_features_alone(
    tmp_path: Path, device: torch.device
) -> None:
    write_vision_checkpoint("qwen3-vl", tmp_path, num_hidden_layers=LAYERS["qwen3-vl"])
    engine, executor = make_engine(tmp_path, device)
    model: Any = BothWays(executor._model)
    executor._step._model = model
    answer(engine, PROMPTS)
    # Each image's tokens once; the one of 12 is cut by a budget of 24 tokens, or the next.
    assert sum(model.compared) == 12 + 4 + 8 + 4 + 4
    assert len(model.compared) < len(PROMPTS) + 2


def test_a_capture_changes_nothing_that_a_later_step_reads(
    tmp_path: Path, device: torch.device
) -> None:
    """Its step is one of padding alone, whatever the buffers held."""
    write_vision_checkpoint("qwen3-vl", tmp_path, num_hidden_layers=LAYERS["qwen3-vl"])
    _, executor = make_engine(tmp_path, device)
    executor._slots.last_token.fill_(3)
    kv, images = executor._step.kv, executor._images
    assert images is not None
    kept = [kv.k, kv.v, executor._slots.page_tables, executor._slots.last_token]
    before = [tensor.clone() for tensor in (*kept, images.position_deltas)]
    buckets = [bucket for bucket in executor._buckets.graphs() if bucket.images]
    assert {bucket.tokens for bucket in buckets} == {16, 24}
    for bucket in buckets:
        images.buffers._numbers.fill_(1 << 40)
        executor.run(CaptureLaunch(bucket))
        step_images = images.buffers.of_step(bucket.tokens)
        assert (step_images.index == -1).all() and not step_images.positions.any()
    for tensor, past in zip((*kept, images.position_deltas), before, strict=True):
        torch.testing.assert_close(tensor, past, rtol=0, atol=0, equal_nan=True)


def run_again(
    executor: GraphExecutor, launches: Sequence[StepLaunch], *, graph: bool
) -> list[tuple[list[int], Tensor]]:
    """Of each step the tokens and the logits of its rows."""
    found: list[tuple[list[int], Tensor]] = []
    for launch in launches:
        executor.run(structs.replace(launch, graph=graph))
        tokens = executor.sample(launch.batch).wait().tokens.tolist()
        assert executor._outputs is not None
        found.append((tokens, executor._outputs.logits[: len(tokens)].clone()))
    return found


@pytest.mark.parametrize("kind", ["qwen3-vl", "qwen3.5"])
@pytest.mark.parametrize(
    "dtype", [torch.float32, pytest.param(torch.bfloat16, marks=pytest.mark.gpu)]
)
def test_replayed_steps_with_images_give_the_bits_of_those_without_graphs(
    kind: str, dtype: torch.dtype, tmp_path: Path, device: torch.device
) -> None:
    """The same steps, with text and rows that decode among them, before and after captures."""
    write_vision_checkpoint(kind, tmp_path, num_hidden_layers=LAYERS[kind])
    engine, executor = make_engine(tmp_path, device, dtype=dtype)
    steps = steps_of(executor)
    answer(engine, PROMPTS)
    launches = [launch for launch, _ in steps]
    assert {with_images for _, with_images in steps} == {True, False}
    plain = run_again(executor, launches, graph=False)
    capture_all(executor)
    assert {launch.bucket for launch in launches} <= executor.graphs.captured.keys()
    for graph in (True, False):
        found = run_again(executor, launches, graph=graph)
        for (tokens, logits), (plain_tokens, plain_logits) in zip(found, plain, strict=True):
            assert tokens == plain_tokens
            torch.testing.assert_close(logits, plain_logits, rtol=0, atol=0, equal_nan=True)
    assert all(logits.isfinite().all() for _, logits in plain)
