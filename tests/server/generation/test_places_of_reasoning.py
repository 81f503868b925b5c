"""Tokens of reasoning: how many there are, and where their log-probabilities and ids go out."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx2 as httpx
import pytest

from runtime.ipc.client import Mailbox
from runtime.messages import EngineRequest, RequestOutput, SamplingParams
from server.generation.answer_text import AnswerText
from server.generation.choice import Choice
from server.generation.detokenizer import ByteDetokenizer
from server.tool_calls.formats import detect
from server.tool_calls.output_parser import OutputParser
from tests.support.server.fake_engine import FakeEngine, FakeServer
from tests.support.server.qwen_fake_model import CALL, PARAMETERS, QUESTION, qwen_server

ASK: dict[str, Any] = {
    "model": "fake",
    "messages": QUESTION,
    "tools": [{"type": "function", "function": {"name": "weather", "parameters": PARAMETERS}}],
}
THOUGHT = "<think>\nRome, so.\n</think>\n\n"
ANSWER = f"{THOUGHT}It is sunny.\n{CALL}"
STEPS = pytest.mark.parametrize("step", [1, 3, 7, 1000])


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FakeServer]:
    with qwen_server(tmp_path_factory) as server:
        yield server


class UnnotedMetrics:
    def __getattr__(self, name: str) -> Any:
        return lambda *args, **fields: None


def followed(words: list[str], reasoning: str, *, begun: bool = False, scored: bool = False):
    """A choice whose tokens have these texts."""
    parser = OutputParser(detect(None, reasoning=reasoning), [], begun, True, parallel=True)
    detokenizer = ByteDetokenizer([word.encode() for word in words])
    text = AnswerText(detokenizer, [], include_stop=False, min_tokens=0, scored=scored, placed=True)
    mailbox = Mailbox(EngineRequest(7, 0, [1], SamplingParams(99), arrived=1.0))
    metrics: Any = UnnotedMetrics()
    return Choice(0, mailbox, text, parser, FakeEngine(reply=lambda request: []), metrics)


@pytest.mark.parametrize("step", [1, 2, 3, 99])
@pytest.mark.parametrize(
    ("words", "reasoning", "begun", "count"),
    [
        (["<think>", "\n", "hm", "\n", "</think>", "\n\n", "Yes."], "think", False, 3),
        (["\n", "hm", "</think>", "\n\n", "Yes."], "think", True, 2),
        (["<think>\n", "hm", " so.</th", "ink>\n\nYe", "s."], "think", False, 2),
        (["<think>", "a", "</", "b", "</", "think", ">", "Yes."], "think", False, 3),
        (["<think>", "a", "</", "think"], "think", False, 3),
        (["Yes", "<think>", "a"], "think", False, 0),
        (["<think>", "</think>", "Yes."], "think", False, 0),
        (
            [
                *("<|channel|>", "analysis", "<|message|>", "a", "b", "<|end|>"),
                *("<|start|>assistant<|channel|>", "commentary", "<|message|>", "c", "<|end|>"),
                *("<|start|>assistant<|channel|>", "analysis", "<|message|>", "d", "<|end|>"),
                *("<|start|>assistant<|channel|>", "final", "<|message|>", "Yes."),
            ],
            "harmony",
            False,
            3,
        ),
    ],
)
def test_a_token_is_of_the_reasoning_if_its_text_begins_there(
    words: list[str], reasoning: str, begun: bool, count: int, step: int
):
    choice = followed(words, reasoning, begun=begun)
    for start in range(0, len(words), step):
        tokens = list(range(len(words)))[start : start + step]
        last = start + step >= len(words)
        choice.feed(RequestOutput(7, tokens, finish="length" if last else None))
    assert choice.reasoning_tokens == count


def test_an_answer_behind_its_reasoning_is_not_looked_at_token_by_token(
    monkeypatch: pytest.MonkeyPatch,
):
    choice = followed(["<think>", "hm", "</think>", "Yes.", " And", " so"], "think")
    for token in range(4):
        choice.feed(RequestOutput(7, [token]))
    monkeypatch.setattr(AnswerText, "_feed_one_by_one", None)
    assert choice.feed(RequestOutput(7, [4, 5])).text == " And so"
    assert choice.reasoning_tokens == 1


def chunks(fake: FakeServer, **change: Any) -> list[dict[str, Any]]:
    """The choices of a stream's chunks that have one."""
    answer = httpx.post(f"{fake.url}/v1/chat/completions", json=ASK | {"stream": True} | change)
    assert answer.status_code == 200, answer.text
    events = [
        json.loads(each[6:]) for each in answer.text.split("\n\n") if each.startswith("data: {")
    ]
    return [choice for event in events for choice in event["choices"]]


def scored_tokens(choice: dict[str, Any]) -> list[str]:
    return [entry["token"] for entry in (choice["logprobs"] or {}).get("content", [])]


@STEPS
def test_each_chunk_has_the_tokens_of_its_own_kind(fake: FakeServer, step: int):
    fake.say(ANSWER)
    fake.engine.step = step
    told = chunks(fake, logprobs=True, return_token_ids=True)
    thought = "".join(
        token for each in told if "reasoning" in each["delta"] for token in scored_tokens(each)
    )
    others = "".join(
        token for each in told if "reasoning" not in each["delta"] for token in scored_tokens(each)
    )
    assert thought + others == ANSWER + fake.tokenizer.token_bytes(0).decode()
    assert thought == THOUGHT
    ids = [id for each in told for id in each.get("token_ids", ())]
    assert ids == [*fake.tokenizer.encode(ANSWER), 0]


@STEPS
@pytest.mark.parametrize("stream", [False, True])
def test_reasoning_that_is_left_out_has_no_log_probabilities_and_no_ids(
    fake: FakeServer, step: int, stream: bool
):
    fake.say(ANSWER)
    fake.engine.step = step
    fields = {"logprobs": True, "return_token_ids": True, "include_reasoning": False}
    if stream:
        told = chunks(fake, **fields)
        assert not any("reasoning" in each["delta"] for each in told)
    else:
        told = httpx.post(f"{fake.url}/v1/chat/completions", json=ASK | fields).json()["choices"]
    tokens = "".join(token for each in told for token in scored_tokens(each))
    rest = ANSWER.removeprefix(THOUGHT)
    assert tokens == rest + fake.tokenizer.token_bytes(0).decode()
    ids = [id for each in told for id in each.get("token_ids", ())]
    assert fake.tokenizer.decode(ids[:-1], skip_special=False) == rest


@STEPS
def test_log_probabilities_of_a_response_are_those_of_its_text(fake: FakeServer, step: int):
    fake.say(ANSWER)
    fake.engine.step = step
    body: dict[str, Any] = {"model": "fake", "input": "Weather in Rome?", "store": False}
    tool = {"type": "function"} | ASK["tools"][0]["function"]
    body |= {"tools": [tool], "include": ["message.output_text.logprobs"], "top_logprobs": 1}
    whole = fake.client().responses.create(**body)
    message = whole.output[1]
    assert message.type == "message" and message.content[0].type == "output_text"
    part = message.content[0]
    assert "".join(entry.token for entry in part.logprobs or ()) == part.text == "It is sunny."
    with fake.client().responses.stream(**body) as stream:
        events = list(stream)
    deltas = [event for event in events if event.type == "response.output_text.delta"]
    for event in deltas:
        assert "".join(entry.token for entry in event.logprobs) == event.delta
    assert "".join(event.delta for event in deltas) == part.text
