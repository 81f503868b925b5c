"""Parameters of chat requests that the chat template or the prompt's length decide about."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import httpx2 as httpx
import pytest
from fake_engine import CONTEXT, TEMPLATE, FakeServer, fake_server

EFFORT = "{% if reasoning_effort %}[effort {{ reasoning_effort }}]{% endif %}" + TEMPLATE
SWITCH = "{% if enable_thinking is defined %}[{{ enable_thinking }}]{% endif %}" + TEMPLATE
WORDY = "{{ '[' ~ verbosity ~ ']' if verbosity else '' }}" + TEMPLATE


TEMPLATES = {"plain": TEMPLATE, "effort": EFFORT, "switch": SWITCH, "wordy": WORDY}


@pytest.fixture(scope="module")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, FakeServer]]:
    """One for each template."""
    with contextlib.ExitStack() as stack:
        yield {
            kind: stack.enter_context(fake_server(tmp_path_factory.mktemp(kind), template=text))
            for kind, text in TEMPLATES.items()
        }


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FakeServer]:
    with fake_server(tmp_path_factory.mktemp("tokenizer")) as server:
        yield server


@pytest.fixture
def fake(shared: FakeServer) -> Iterator[FakeServer]:
    yield shared
    shared.reset()


def post(fake: FakeServer, **fields: Any) -> httpx.Response:
    messages = [{"role": "user", "content": fields.pop("content", "Hi")}]
    body = {"model": "fake", "messages": messages, "max_tokens": 2, **fields}
    return httpx.post(f"{fake.url}/v1/chat/completions", json=body)


def begins(fake: FakeServer) -> str:
    """What stands before the first message in the last prompt."""
    prompt = fake.tokenizer.decode(fake.engine.requests[-1].tokens, skip_special=False)
    return prompt.partition("<|user|>")[0]


# field and value -> what each template prints before the messages; None: refused
ASKED: list[tuple[dict[str, str], dict[str, str | None]]] = [
    ({}, {"plain": "", "effort": "", "switch": "", "wordy": ""}),
    ({"reasoning_effort": "high"}, {"plain": None, "effort": "[effort high]", "switch": None}),
    ({"reasoning_effort": "low"}, {"plain": None, "effort": "[effort low]", "wordy": None}),
    ({"reasoning_effort": "medium"}, {"plain": "", "effort": "[effort medium]", "switch": ""}),
    ({"reasoning_effort": "none"}, {"plain": "", "effort": "[effort none]", "switch": "[False]"}),
    ({"verbosity": "low"}, {"plain": None, "effort": None, "wordy": "[low]"}),
    ({"verbosity": "medium"}, {"plain": "", "wordy": "[medium]"}),
]


@pytest.mark.parametrize(
    ("kind", "asked", "wanted"),
    [(kind, asked, text) for asked, told in ASKED for kind, text in told.items()],
)
def test_the_template_is_told_or_the_field_is_refused(
    servers: dict[str, FakeServer], kind: str, asked: dict[str, str], wanted: str | None
):
    answer = post(servers[kind], **asked)
    if wanted is None:
        error = answer.json()["error"]
        assert answer.status_code == 400
        assert (error["code"], error["param"]) == ("unsupported_parameter", next(iter(asked)))
    else:
        assert answer.status_code == 200, answer.text
        assert begins(servers[kind]) == wanted


@pytest.mark.parametrize(
    ("kind", "said"), [("effort", {"reasoning_effort": "low"}), ("switch", {"enable_thinking": 1})]
)
def test_what_is_said_twice_is_refused(
    servers: dict[str, FakeServer], kind: str, said: dict[str, Any]
):
    answer = post(servers[kind], reasoning_effort="none", chat_template_kwargs=said)
    assert answer.status_code == 400
    assert "leave one of them out" in answer.json()["error"]["message"]


def test_a_prediction_changes_nothing(fake: FakeServer):
    plain = post(fake, max_tokens=50).json()
    for content in ("Hello, world!", [{"type": "text", "text": "Hello"}]):
        hinted = post(fake, max_tokens=50, prediction={"type": "content", "content": content})
        assert hinted.json()["choices"] == plain["choices"]
        assert hinted.json()["usage"] == plain["usage"]
    details = plain["usage"]["completion_tokens_details"]
    assert (details["accepted_prediction_tokens"], details["rejected_prediction_tokens"]) == (0, 0)


def test_truncation_keeps_the_end_of_the_conversation(fake: FakeServer):
    post(fake)
    whole = fake.engine.requests[-1].tokens
    answer = post(fake, truncate_prompt_tokens=4)
    assert fake.engine.requests[-1].tokens == whole[-4:]
    assert answer.json()["usage"]["prompt_tokens"] == 4


@pytest.mark.parametrize(("fields", "room"), [({"max_tokens": 16}, CONTEXT - 16), ({}, None)])
def test_a_conversation_that_is_too_long_is_cut_to_what_fits(
    fake: FakeServer, fields: dict[str, Any], room: int | None
):
    answer = post(fake, content="fox " * 5000, truncate_prompt_tokens=-1, **fields)
    assert answer.status_code == 200, answer.text
    assert len(fake.engine.requests[-1].tokens) == (room or CONTEXT - 2)


def test_a_cut_that_leaves_too_much_is_still_too_long(fake: FakeServer):
    answer = post(fake, content="fox " * 5000, truncate_prompt_tokens=10_000)
    assert answer.json()["error"]["code"] == "context_length_exceeded"


def test_copies_of_a_greedy_answer_are_equal(fake: FakeServer):
    choices = post(fake, n=3, temperature=0, max_tokens=50).json()["choices"]
    assert len({choice["message"]["content"] for choice in choices}) == 1
    assert [choice["index"] for choice in choices] == [0, 1, 2]
