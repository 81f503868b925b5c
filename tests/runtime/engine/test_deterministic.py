"""--deterministic: the same bits alone, in a batch, in other chunks, cached and preempted."""

from __future__ import annotations

import json
import random
from collections.abc import Iterable
from pathlib import Path

import pytest
from msgspec.structs import replace

from runtime.config import ConfigError, EngineConfig
from runtime.engine.loop import Engine
from runtime.messages import EngineRequest, RequestOutput, SamplingParams, TokenLogprob
from runtime.startup.deterministic import requested_attention
from runtime.startup.loading import Loaded, load
from tests.support.models.tiny_checkpoints import write_checkpoint

VOCAB = 5003
# Widths at which bfloat16 answers do differ by what runs beside them.
SHAPE = {
    "model_type": "qwen3",
    "architectures": ["Qwen3ForCausalLM"],
    "vocab_size": VOCAB,
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_hidden_layers": 3,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1_000_000,
    "hidden_act": "silu",
    "attention_bias": False,
    "tie_word_embeddings": False,
    "eos_token_id": 1,
}
# Windows in two layers of three: a prefix hit lacks pages of these.
WINDOWS = {
    "use_sliding_window": True,
    "sliding_window": 300,
    "layer_types": ["full_attention", "sliding_attention", "sliding_attention"],
}
GREEDY = SamplingParams(max_tokens=40, temperature=0.0)
SEEDED = replace(GREEDY, temperature=0.9, top_p=0.95, top_k=50, seed=7)
SCORED = replace(GREEDY, logprobs=3)
PARAMS = (GREEDY, SEEDED, SCORED, replace(SEEDED, logprobs=3), replace(GREEDY, prompt_logprobs=2))
LENGTHS = (5, 700, 90, 1300, 300)
Answer = tuple[list[int], list[TokenLogprob], list[TokenLogprob | None]]


def requests() -> list[EngineRequest]:
    """One for each of PARAMS; the second is longer than a piece of keys."""
    draw = random.Random(1)
    return [
        EngineRequest(id, 0, [draw.randrange(2, VOCAB) for _ in range(length)], params)
        for id, (params, length) in enumerate(zip(PARAMS, LENGTHS, strict=True))
    ]


def crowd(*tokens: int) -> list[EngineRequest]:
    """59 others, so that all are 64; answers have one of these numbers of tokens."""
    draw = random.Random(2)
    return [
        EngineRequest(
            100 + id, 0, [draw.randrange(2, VOCAB) for _ in range(draw.choice([3, 40, 200, 900]))],
            replace(draw.choice([GREEDY, SEEDED]), max_tokens=draw.choice(tokens)),
        )
        for id in range(59)
    ]  # fmt: skip


def answers(loaded: Loaded, asked: Iterable[EngineRequest]) -> tuple[dict[int, Answer], Engine]:
    engine = Engine(loaded.resolved, loaded.ready.vocab_size, loaded.executor)
    found: dict[int, Answer] = {}
    for request in asked:
        engine.add(request)
        found[request.id] = [], [], []
    while not engine.idle:
        for output in engine.step():
            take(output, found[output.id])
    return found, engine


def take(output: RequestOutput, answer: Answer) -> None:
    assert output.error is None, output.error
    answer[0].extend(output.tokens)
    answer[1].extend(output.logprobs or [])
    answer[2].extend(output.prompt_logprobs or [])


def loaded(model: Path, **changes: object) -> Loaded:
    config = EngineConfig(
        model=str(model), device="cuda", load_format="dummy", deterministic=True,
        **{"kv_tokens": 1 << 17, "max_num_seqs": 64, "max_model_len": 4096, **changes},
    )  # fmt: skip
    return load(config, lambda phase, done, total: None)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("model")
    (directory / "config.json").write_text(json.dumps(SHAPE))
    return directory


@pytest.fixture(scope="module")
def large(model: Path) -> Loaded:
    return loaded(model)


@pytest.fixture(scope="module")
def alone(large: Loaded) -> dict[int, Answer]:
    """Each request without company, nothing cached, steps without a graph at first."""
    found: dict[int, Answer] = {}
    for request in requests():
        found |= answers(large, [request])[0]
    return found


def same(found: dict[int, Answer], alone: dict[int, Answer]) -> None:
    for id, answer in alone.items():
        assert len(answer[0]) == 40
        assert found[id] == answer, PARAMS[id]


@pytest.mark.gpu
def test_a_crowd_changes_no_bit(large: Loaded, alone: dict[int, Answer]):
    others = crowd(3, 20, 60)
    found, engine = answers(large, [*others[:30], *requests(), *others[30:]])
    same(found, alone)
    assert engine.stats().preemptions == 0


@pytest.mark.gpu
def test_graphs_of_every_size_change_no_bit(large: Loaded, alone: dict[int, Answer]):
    while large.executor.prepare():
        pass
    same(answers(large, requests())[0], alone)
    same(answers(large, [*requests(), *crowd(3, 60)])[0], alone)


@pytest.mark.gpu
def test_a_prompt_from_the_cache_changes_no_bit(large: Loaded, alone: dict[int, Answer]):
    twice = [replace(request, id=1000 + request.id) for request in requests()]
    found, engine = answers(large, [*twice])
    for request in requests():
        engine.add(request)
        found[request.id] = [], [], []
    while not engine.idle:
        for output in engine.step():
            take(output, found[output.id])
    same(found, alone)
    assert engine.stats().cached_tokens > 1500


@pytest.mark.gpu
@pytest.mark.parametrize("tokens", [64, 200])
def test_small_chunks_and_preemptions_change_no_bit(
    model: Path, large: Loaded, alone: dict[int, Answer], tokens: int
):
    """Answers that were preempted are computed again as prompts."""
    narrow = loaded(model, max_batched_tokens=tokens, max_model_len=3000, kv_tokens=3000)
    asked = [*crowd(100, 150)[:40], *requests()]
    found, engine = answers(narrow, asked)
    same(found, alone)
    assert engine.stats().preemptions > 0
    assert found == answers(large, asked)[0], "with room for all"


@pytest.mark.gpu
def test_a_prompt_from_the_cache_of_a_model_with_windows_changes_no_bit(tmp_path: Path):
    (tmp_path / "config.json").write_text(json.dumps(SHAPE | WINDOWS))
    with_windows = loaded(tmp_path)
    assert with_windows.resolved.group_windows == (0, 300, 300)
    alone: dict[int, Answer] = {}
    for request in requests():
        alone |= answers(with_windows, [request])[0]
    engine = Engine(with_windows.resolved, VOCAB, with_windows.executor)
    found: dict[int, Answer] = {}
    for first in (1000, 0):  # the second time from the cache
        for request in requests():
            engine.add(replace(request, id=first + request.id))
            found[first + request.id] = [], [], []
        while not engine.idle:
            for output in engine.step():
                take(output, found[output.id])
    same(found, alone)
    assert engine.stats().cached_tokens > 1500


@pytest.mark.gpu
def test_another_kernel_of_fixed_order_serves_too(model: Path):
    slow = loaded(model, attention="flash1")
    assert slow.ready.attention.startswith("flash1")
    single, _ = answers(slow, requests()[:1])
    assert answers(slow, requests())[0][0] == single[0]


def test_a_cpu_is_refused(tmp_path: Path):
    write_checkpoint("qwen3", tmp_path)
    requested = EngineConfig(model=str(tmp_path), device="cpu", deterministic=True)
    with pytest.raises(ConfigError, match="--deterministic needs a CUDA GPU"):
        load(requested, lambda phase, done, total: None)


def test_what_is_not_known_to_be_invariant_is_refused():
    requested = EngineConfig(model="", deterministic=True)
    hopper = (9, 0)
    assert requested_attention(requested, hopper) == "batch-invariant"
    assert requested_attention(replace(requested, attention="flash1"), hopper) == "flash1"
    with pytest.raises(ConfigError, match="--attention flash2 is not batch-invariant"):
        requested_attention(replace(requested, attention="flash2"), hopper)
    with pytest.raises(ConfigError, match="--state-dtype bfloat16: states are rounded"):
        requested_attention(replace(requested, state_dtype="bfloat16"), hopper)
    with pytest.raises(ConfigError, match=r"capability 8\.0 to 9\.0, this one has 10\.0"):
        requested_attention(requested, (10, 0))
    assert (
        requested_attention(replace(requested, deterministic=False, attention="mha"), hopper)
        == "mha"
    )
