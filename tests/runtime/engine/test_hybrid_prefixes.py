"""Gated delta nets go on from snapshots of their states, and answer as from nothing."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from msgspec import structs

from runtime.config import DeviceOption
from runtime.engine.loop import Engine
from runtime.messages import EngineRequest, RequestOutput, SamplingParams
from tests.support.engine.device_engine import device_engine, sizes
from tests.support.engine.loaded_engine import loaded_engine
from tests.support.models.tiny_checkpoints import write_checkpoint

LENGTH, STEPS, EVERY = 200, 90, 64


@pytest.fixture(scope="module", params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> DeviceOption:
    return request.param


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("qwen3.5-text")
    write_checkpoint("qwen3.5-text", directory)
    return directory


@pytest.fixture(scope="module")
def prompt() -> list[int]:
    noise = torch.Generator().manual_seed(5)
    return torch.randint(3, 90, (LENGTH,), generator=noise).tolist()


def make_engine(checkpoint: Path, device: DeviceOption, **options: Any) -> Engine:
    options = {"max_batched_tokens": 48, "snapshot_every": EVERY} | options
    return loaded_engine(checkpoint, device, **options)


def answer(engine: Engine, *prompts: list[int], count: int = STEPS) -> list[tuple[list[int], int]]:
    """-> `count` tokens, and how many of the prompt were found, of each."""
    params, outputs = SamplingParams(max_tokens=count, temperature=0), dict[int, list]()
    for id, tokens in enumerate(prompts):
        engine.add(EngineRequest(id, 0, tokens, params))
        outputs[id] = []
    while not engine.idle:
        for output in engine.step():
            outputs[output.id].append(output)

    def of(said: list[RequestOutput]) -> tuple[list[int], int]:
        return [token for output in said for token in output.tokens], said[0].cached

    return [of(outputs[id]) for id in range(len(prompts))]


def test_prompts_turns_and_branches_are_found_and_change_no_answer(
    checkpoint: Path, device: DeviceOption, prompt: list[int]
) -> None:
    plain = make_engine(checkpoint, device, prefix_cache=False)
    engine = make_engine(checkpoint, device)
    [(said, cached)] = answer(engine, prompt)
    assert cached == 0 and answer(plain, prompt) == [(said, 0)]
    turn = [*prompt, *said, 7, 8, 9]
    branch = [*prompt[:150], *range(3, 40)]
    for tokens, found in ((prompt, 192), (turn, LENGTH + STEPS - 1), (branch, 128), (turn, 289)):
        [(expected, _)] = answer(plain, tokens)
        assert answer(engine, tokens) == [(expected, found)]
    assert engine.stats().cached_tokens == 192 + LENGTH + STEPS - 1 + 128 + 289


def test_a_prompt_is_not_cut_where_its_snapshot_is_taken(
    checkpoint: Path, device: DeviceOption, prompt: list[int]
) -> None:
    """One step computes all of it, and a later prompt goes on from the last border within."""
    tokens = prompt + prompt[:120]
    engine = make_engine(checkpoint, device, max_batched_tokens=512, snapshot_every=4096)
    plain = make_engine(checkpoint, device, max_batched_tokens=512, prefix_cache=False)
    steps = {}
    for one in (engine, plain):
        before = one.stats().steps
        [(said, _)] = answer(one, tokens)
        steps[one] = one.stats().steps - before, said
    assert steps[engine] == steps[plain]
    assert answer(engine, tokens) == [(steps[plain][1], 256)]


@pytest.mark.filterwarnings("ignore:divide by zero encountered")
@pytest.mark.filterwarnings("ignore:invalid value encountered")
@pytest.mark.filterwarnings("ignore:overflow encountered")
def test_whole_steps_take_snapshots_within_their_rows(checkpoint: Path, prompt: list[int]) -> None:
    """As graphs run them; of two prompts in one step, each at a position of its own."""
    prompts = [prompt[:140], prompt[50:130]]
    answers = []
    for graph_steps in (False, True):
        resolved = sizes(
            slots=2, budget=224, pages=40, page_size=16, max_len=200, prefix_cache=True,
            states=4, snapshots=4,
        )  # fmt: skip
        resolved = structs.replace(resolved, snapshot_every=64)
        engine, _ = device_engine(
            checkpoint, torch.device("cpu"), resolved, graph_steps=graph_steps
        )
        first = answer(engine, *prompts, count=2)
        steps = engine.stats().steps
        answers.append((first, steps, answer(engine, *prompts, count=2)))
    assert answers[0] == answers[1]
    first, _, again = answers[0]
    assert [found for _, found in first] == [0, 0] and [found for _, found in again] == [128, 64]
    assert [said for said, _ in first] == [said for said, _ in again]


def test_preempted_sequences_go_on_from_their_snapshots(
    checkpoint: Path, device: DeviceOption, prompt: list[int]
) -> None:
    prompts = [prompt, prompt[:70] + prompt, prompt[100:]]
    plain = make_engine(checkpoint, device, prefix_cache=False)
    tight = make_engine(checkpoint, device, kv_tokens=640, max_batched_tokens=100)
    found = answer(tight, *prompts)
    assert [said for said, _ in found] == [answer(plain, one)[0][0] for one in prompts]
    assert tight.stats().preemptions > 0


def test_states_in_bfloat16_answer_nearly_the_same(
    checkpoint: Path, device: DeviceOption, prompt: list[int]
) -> None:
    """The first tokens, and the log-probabilities of the prompt's."""
    scored = SamplingParams(max_tokens=4, temperature=0, prompt_logprobs=0)
    scores: list[torch.Tensor] = []
    for state_dtype in ("float32", "bfloat16"):
        engine = make_engine(checkpoint, device, state_dtype=state_dtype)
        engine.add(EngineRequest(1, 0, prompt, scored))
        outputs: list[RequestOutput] = []
        while not engine.idle:
            outputs += engine.step()
        prompt_scores = outputs[0].prompt_logprobs or []
        scores.append(torch.tensor([score.logprob for score in prompt_scores if score]))
    error = (scores[1] - scores[0]).abs()
    assert 0 < error.max() < 0.05
