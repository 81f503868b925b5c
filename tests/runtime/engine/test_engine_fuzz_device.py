"""Random workloads on a real model: a request's answer does not depend on other requests.

Each request's tokens, scores and end are those that it has alone, in a pool with room for all of
it, computed by PyTorch's operations.
"""

from __future__ import annotations

import os
import random
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from attention.kv_groups import kv_layout
from model_zoo.config import read_config
from runtime.config import ResolvedConfig
from runtime.engine.loop import Engine
from runtime.kv_capacity import KVCapacity
from runtime.messages import (
    BACKGROUND,
    EngineRequest,
    PoolingParams,
    RequestOutput,
    SamplingParams,
    TokenLogprob,
)
from tests.support.engine.device_engine import POISON, device_engine, sizes
from tests.support.interpreter.unused_lanes import UNUSED_LANES
from tests.support.models.tiny_checkpoints import write_checkpoint

pytestmark = UNUSED_LANES
TOLERANCE = 1e-4  # of scores and vectors, in float32


@pytest.fixture(scope="module", params=["qwen3", "qwen2-windows", "gemma3-text", "qwen3.5-text"])
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp(request.param)
    write_checkpoint(request.param, directory)
    return directory


def windows_of(checkpoint: Path, max_len: int) -> tuple[int, ...]:
    """Of the groups of layers that share pages."""
    return kv_layout(read_config(checkpoint).attention_specs, max_len).windows


@dataclass
class DeviceVisit:
    request: EngineRequest
    arrives: int
    leaves: int | None  # step of its abort


def random_sizes(draw: random.Random, page_sizes: list[int], checkpoint: Path) -> ResolvedConfig:
    """Few pages, so that sequences make way for each other; but a request of full length fits."""
    page_size, slots = draw.choice(page_sizes), draw.randint(1, 6)
    max_len = draw.choice([40, 64])
    budget = max(slots, draw.choice([3, 7, 16, 24, 100]))
    windows = windows_of(checkpoint, max_len)
    least = KVCapacity.of(page_size, windows, 1, budget).needed(max_len)
    has_states = read_config(checkpoint).delta_net is not None
    states = draw.choice([2, slots + 1, 2 * slots]) if has_states else 0
    return sizes(
        slots=slots,
        budget=budget,
        pages=draw.randint(least, least + 3 * len(windows)),
        group_windows=windows,
        page_size=page_size,
        max_len=max_len,
        prefix_cache=draw.random() < 0.8 and not states,
        states=states,
    )


def random_params(draw: random.Random, vocab: int) -> SamplingParams:
    if draw.random() < 0.1:
        return SamplingParams(
            0, pooling=PoolingParams(draw.choice(["last", "mean"]), normalize=False)
        )

    def ids(count: int) -> tuple[int, ...]:
        return tuple(draw.sample(range(vocab), count))

    def sometimes(share: float, value: Callable[[], object], otherwise: object) -> object:
        return value() if draw.random() < share else otherwise

    most = draw.choice([1, 3, 6, 15, 30])
    options: dict[str, object] = {
        "temperature": draw.choice([0, 0, 0.4, 1.0, 1.7]),
        "top_p": sometimes(0.4, lambda: draw.choice([0.05, 0.6, 0.95]), 1.0),
        "top_k": sometimes(0.3, lambda: draw.choice([1, 5, 60]), 0),
        "min_p": sometimes(0.2, lambda: draw.choice([0.02, 0.3]), 0.0),
        "presence_penalty": sometimes(0.2, lambda: 0.7, 0.0),
        "frequency_penalty": sometimes(0.2, lambda: -0.6, 0.0),
        "repetition_penalty": sometimes(0.2, lambda: 1.4, 1.0),
        "seed": draw.getrandbits(64),
        "stop_ids": sometimes(0.5, lambda: ids(draw.choice([3, 20, 60])), ()),
        "min_tokens": sometimes(0.3, lambda: draw.randint(0, most), 0),
        "logit_bias": sometimes(0.1, lambda: dict.fromkeys(ids(9), 6.0), {}),
        "logprobs": sometimes(0.2, lambda: draw.randint(0, 5), None),
        "prompt_logprobs": sometimes(0.12, lambda: draw.randint(0, 3), None),
        "allowed_ids": sometimes(0.1, lambda: ids(7), ()),
        "banned": sometimes(0.1, lambda: (ids(1), ids(2), ids(1)), ()),
        "grammar": sometimes(0.12, lambda: str(draw.randint(2, 12)), ""),
    }
    return SamplingParams(most, **options)  # type: ignore[arg-type]


def random_visits(draw: random.Random, resolved: ResolvedConfig, count: int) -> list[DeviceVisit]:
    """Prompts of all lengths, of which many begin alike; a few hold what spoils their sequence."""
    vocab = 131
    common = [draw.randrange(POISON) for _ in range(resolved.max_model_len)]
    visits: list[DeviceVisit] = []
    for id in range(count):
        longest = resolved.max_model_len - 2
        shared = draw.choice([0, 0, resolved.page_size, draw.randint(0, longest)])
        own = [draw.randrange(POISON) for _ in range(draw.choice([1, 2, 9, 15, longest]))]
        prompt = (common[:shared] + own)[: draw.randint(max(1, shared), longest)]
        salt = draw.choice([b"", b"", b"", b"other"])
        if draw.random() < 0.06:
            prompt[draw.randrange(len(prompt))] = POISON
            # 0 * NaN is NaN: earlier pages of its prompt hold NaN, too, until it has failed.
            salt = b"spoilt"
        request = EngineRequest(
            id,
            0,
            prompt,
            random_params(draw, vocab),
            priority=draw.choice([0, 0, 0, 1, BACKGROUND]),
            salt=salt,
        )
        arrives = draw.randint(0, count)
        leaves = arrives + draw.randint(0, 12) if draw.random() < 0.15 else None
        visits.append(DeviceVisit(request, arrives, leaves))
    return visits


def play(engine: Engine, visits: list[DeviceVisit]) -> dict[int, list[RequestOutput]]:
    """All outputs by request."""
    got: dict[int, list[RequestOutput]] = {visit.request.id: [] for visit in visits}
    step, last = 0, max(max(visit.arrives, visit.leaves or 0) for visit in visits)
    tokens = sum(len(v.request.tokens) + v.request.params.max_tokens for v in visits)
    while step <= last or not engine.idle:
        for visit in visits:
            if visit.arrives == step:
                engine.add(visit.request)
            if visit.leaves == step:
                engine.abort(visit.request.id)
        for output in engine.step():
            assert not (got[output.id] and got[output.id][-1].finish), "something after the end"
            got[output.id].append(output)
        engine.requests.check_integrity()
        step += 1
        assert step < last + 20 * tokens, "no end in sight"
    assert engine.requests.pool.num_used == 0
    return got


class ReceivedOutputs:
    """What the outputs of a request come to."""

    def __init__(self, outputs: list[RequestOutput]) -> None:
        end = outputs[-1]
        self.tokens = [token for output in outputs for token in output.tokens]
        self.end = end.finish, end.stop_id, end.error
        self.scores = [score for output in outputs for score in output.logprobs or ()]
        self.prompt_scores = outputs[0].prompt_logprobs
        self.embedding = torch.frombuffer(
            bytearray(end.embedding or b"\0\0\0\0"), dtype=torch.float32
        )


def numbers(scores: list[TokenLogprob] | list[TokenLogprob | None] | None) -> list[float]:
    """Without the ids of alternatives: two of the same likelihood may change places."""
    return [
        number
        for score in scores or ()
        if score is not None
        for number in (score.logprob, *(logprob for _, logprob in score.top))
    ]


def check(visit: DeviceVisit, got: list[RequestOutput], alone: list[RequestOutput]) -> None:
    found, reference = ReceivedOutputs(got), ReceivedOutputs(alone)
    if found.end[0] == "abort":
        assert visit.leaves is not None
        assert found.tokens == reference.tokens[: len(found.tokens)]
        return
    assert (found.tokens, found.end) == (reference.tokens, reference.end)
    assert numbers(found.scores) == pytest.approx(numbers(reference.scores), abs=TOLERANCE)
    scores, expected = found.prompt_scores, reference.prompt_scores
    assert (scores is None) == (expected is None)
    assert numbers(scores) == pytest.approx(numbers(expected), abs=TOLERANCE, nan_ok=True)
    assert torch.allclose(found.embedding, reference.embedding, atol=TOLERANCE, equal_nan=True)


class Alone:
    """Answers to one request at a time, with room for all of it and nothing remembered."""

    def __init__(self, checkpoint: Path, device: torch.device, resolved: ResolvedConfig) -> None:
        longest = resolved.max_model_len
        windows = resolved.group_windows
        room = sizes(
            slots=1, budget=longest, pages=-(-longest // 16) * len(windows), page_size=16,
            max_len=longest, prefix_cache=False, group_windows=windows,
            states=2 if resolved.num_states else 0,
        )  # fmt: skip
        self._make = lambda: device_engine(checkpoint, device, room, graph_steps=False)[0]

    def answer(self, request: EngineRequest) -> list[RequestOutput]:
        return play(self._make(), [DeviceVisit(request, 0, None)])[request.id]


def seeds(count: int) -> list[int]:
    """FUZZ_SEED=n begins elsewhere."""
    first = int(os.environ.get("FUZZ_SEED", "0"))
    return list(range(first, first + count))


def run_workload(
    checkpoint: Path,
    device: torch.device,
    seed: int,
    *,
    graph_steps: bool,
    count: int,
    page_sizes: list[int],
) -> int:
    """Returns how often a sequence made way for another."""
    draw = random.Random(seed)
    resolved = random_sizes(draw, page_sizes, checkpoint)
    visits = random_visits(draw, resolved, count)
    engine, runner = device_engine(checkpoint, device, resolved, graph_steps=graph_steps)
    if graph_steps and draw.random() < 0.7:
        while runner.prepare():  # without a GPU there is nothing to capture
            pass
    got = play(engine, visits)
    alone = Alone(checkpoint, device, resolved)
    for visit in visits:
        try:
            check(visit, got[visit.request.id], alone.answer(visit.request))
        except AssertionError as error:
            error.add_note(f"FUZZ_SEED={seed} {visit} {resolved}")
            raise
    return engine.requests.num_preemptions


@pytest.mark.parametrize("count", [8, pytest.param(25, marks=pytest.mark.slow)])
def test_answers_in_plain_torch_are_those_that_each_request_has_alone(
    checkpoint: Path, count: int
) -> None:
    device = torch.device("cpu")
    preemptions = [
        run_workload(
            checkpoint, device, seed, graph_steps=False, count=8, page_sizes=[1, 3, 4, 8, 16]
        )
        for seed in seeds(count)
    ]
    assert sum(preemptions) > count // 3


# Seeds with which six requests on a CPU have a preemption, by kind of model; of others 11.
WITH_PREEMPTION = {"qwen3": 175, "qwen3.5-text": 5}


@pytest.mark.slow
def test_answers_of_whole_steps_are_those_that_each_request_has_alone(
    checkpoint: Path, device: str
) -> None:
    place = torch.device(device, torch.cuda.current_device() if device == "cuda" else None)
    with_preemption = WITH_PREEMPTION.get(checkpoint.name[:-1], 11)  # pytest adds a digit
    workloads = [(with_preemption, 6, [16])]
    if device == "cuda":  # interpreted steps take a tenth of a second
        workloads += [(seed, 30, [16, 32]) for seed in seeds(4)]
    preemptions = [
        run_workload(checkpoint, place, seed, graph_steps=True, count=count, page_sizes=page_sizes)
        for seed, count, page_sizes in workloads
    ]
    assert any(preemptions)
