"""All log-probabilities of a request have a limit, because a whole answer holds them at once."""

from __future__ import annotations

from typing import Any

import httpx2 as httpx
import pytest

from runtime.messages import SamplingParams
from server.apis.openai.chat_schema import ChatRequest
from server.generation import logprobs
from server.generation.logprobs import check_scores
from tests.support.server.fake_engine import FakeServer
from tests.support.server.malformed_requests import CHAT, TEXT, VALUE, check, spoilt

SCORED = {"logprobs": True, "top_logprobs": 4, "max_tokens": 10}


@pytest.fixture(autouse=True)
def most(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logprobs, "MAX_SCORES", 100)


@pytest.mark.parametrize(
    ("route", "change", "param", "words"),
    [
        (
            CHAT,
            {"n": 3, **SCORED},
            "top_logprobs",
            "up to 150 log-probabilities are asked for (3 x 10 generated tokens x 5), a whole "
            "answer may hold 100: lower `n` or `max_tokens` or `top_logprobs`, or set `stream` to "
            "true",
        ),
        (CHAT, SCORED | {"max_tokens": 21}, "top_logprobs", "lower `max_tokens` or `top_l"),
        (CHAT, {"logprobs": True}, "top_logprobs", "generated tokens x 1)"),
        (
            CHAT,
            {"prompt_logprobs": 20, "max_tokens": 1, "n": 2},
            "prompt_logprobs",
            "(8 prompt tokens x 21), a whole answer may hold 100: lower `n` or `prompt_logprobs`",
        ),
        (TEXT, {"logprobs": 4, "max_tokens": 21}, "logprobs", "`max_tokens` or `logprobs`, or set"),
        (
            TEXT,
            {"best_of": 20, "logprobs": 0},
            "logprobs",
            "lower `best_of` or `max_tokens` or `logprobs`",
        ),
        (
            TEXT,
            {"prompt": ["abcde"] * 9, "echo": True, "logprobs": 5, "max_tokens": 0},
            "logprobs",
            "lower `max_tokens` or `logprobs`, or send fewer prompts",
        ),
    ],
)
def test_more_than_a_whole_answer_may_hold_is_refused_by_the_fields_that_multiply(
    fake: FakeServer, route: str, change: dict[str, Any], param: str, words: str
) -> None:
    answer = httpx.post(f"{fake.url}{route}", json=spoilt(route, change))
    check(answer, 400, VALUE, param, words)


@pytest.mark.parametrize(
    "change", [{"n": 2, **SCORED}, {"n": 3, "stream": True, **SCORED}, {"n": 100}]
)
def test_up_to_the_limit_streamed_or_without_them_a_request_is_served(
    fake: FakeServer, change: dict[str, Any]
) -> None:
    answer = httpx.post(f"{fake.url}{CHAT}", json=spoilt(CHAT, change))
    assert answer.status_code == 200, answer.text


def test_responses_names_its_own_fields(fake: FakeServer) -> None:
    body = {"model": "fake", "input": "Hello", "max_output_tokens": 21, "top_logprobs": 4}
    body |= {"include": ["message.output_text.logprobs"], "store": False}
    answer = httpx.post(f"{fake.url}/v1/responses", json=body)
    check(answer, 400, VALUE, "top_logprobs", "lower `max_output_tokens` or `top_logprobs`")


def test_one_answer_as_long_as_a_usual_context_may_have_all_of_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.undo()
    body = ChatRequest.model_validate({"model": "m", "messages": [{"role": "user", "content": ""}]})
    params = SamplingParams(131_072, logprobs=20)
    check_scores(body, [[1] * 1000], params, copies=1, names=("top_logprobs", "n"))
