"""Reasoning that the caller sends back reaches the chat template on every route."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import anthropic
import httpx2 as httpx
import ollama
import pytest

from server.apis.responses.schema import ResponsesRequest
from server.apis.responses.translate import conversation_of
from tests.support.server.fake_engine import FakeServer, fake_server

TEMPLATE = (
    "{% for message in messages %}<|{{ message.role }}|>"
    "{% if message.reasoning_content %}<think>{{ message.reasoning_content }}</think>{% endif %}"
    "{{ message.content or '' }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
QUESTION = {"role": "user", "content": "Weather?"}
AGAIN = {"role": "user", "content": "Sure?"}
SHOWN = "<|assistant|><think>Rome is in Italy.</think>Sunny.<|end|><|user|>Sure?<|end|>"


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FakeServer]:
    folder = tmp_path_factory.mktemp("tokenizer")
    with fake_server(folder, template=TEMPLATE, context=4096) as server:
        yield server


@pytest.fixture
def fake(shared: FakeServer) -> FakeServer:
    shared.say("<think>\nRome is in Italy.\n</think>\n\nSunny.")
    return shared


def prompt_of(fake: FakeServer) -> str:
    return fake.tokenizer.decode(fake.engine.requests[-1].tokens, skip_special=False)


def test_in_chat_completions(fake: FakeServer):
    client = fake.client()
    answer = client.chat.completions.create(model="fake", messages=[QUESTION])
    said = answer.choices[0].message.model_dump(exclude_none=True)
    assert said["reasoning"] == said["reasoning_content"] == "Rome is in Italy."
    client.chat.completions.create(model="fake", messages=[QUESTION, said, AGAIN])
    assert SHOWN in prompt_of(fake)
    del said["reasoning_content"]
    client.chat.completions.create(model="fake", messages=[QUESTION, said, AGAIN])
    assert SHOWN in prompt_of(fake)


def test_in_anthropics_messages(fake: FakeServer):
    with anthropic.Anthropic(base_url=fake.url, api_key="none", max_retries=0) as client:
        options: dict[str, Any] = {"model": "fake", "max_tokens": 100}
        content = client.messages.create(**options, messages=[QUESTION]).content
        said = {"role": "assistant", "content": content}
        client.messages.create(**options, messages=[QUESTION, said, AGAIN])
    assert SHOWN in prompt_of(fake)


def test_in_ollamas_chat(fake: FakeServer):
    with ollama.Client(fake.url) as client:
        said = client.chat("fake", [QUESTION]).message
        client.chat("fake", [QUESTION, said, AGAIN])
    assert SHOWN in prompt_of(fake)


def test_in_responses(fake: FakeServer):
    client = fake.client()
    first = client.responses.create(model="fake", input="Weather?")
    client.responses.create(model="fake", previous_response_id=first.id, input="Sure?")
    assert SHOWN in prompt_of(fake)
    items: list[Any] = [QUESTION, *first.output, AGAIN]
    client.responses.create(model="fake", input=items)
    assert SHOWN in prompt_of(fake)
    assert prompt_of(fake).count("<|assistant|>") == 2, "reasoning and its answer are one message"


def test_reasoning_without_an_answer_is_a_turn_of_its_own_in_responses(fake: FakeServer):
    reasoning_items = [
        {"type": "reasoning", "summary": [{"type": "summary_text", "text": "Hm."}]},
        {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "So"}]},
        {"type": "reasoning", "summary": [], "encrypted_content": "?"},
    ]
    items: list[Any] = [QUESTION, *reasoning_items, AGAIN]
    fake.client().responses.create(model="fake", input=items)
    assert "<|assistant|><think>Hm.\nSo</think><|end|><|user|>Sure?" in prompt_of(fake)


@pytest.mark.parametrize("name", ["reasoning", "reasoning_content"])
def test_only_an_assistant_thinks(fake: FakeServer, name: str):
    body = {"model": "fake", "messages": [QUESTION | {name: "hm"}]}
    answer = httpx.post(f"{fake.url}/v1/chat/completions", json=body)
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == f"messages[0].{name}"
    if name == "reasoning":
        ollamas = {"model": "fake", "messages": [QUESTION | {"thinking": "hm"}]}
        answer = httpx.post(f"{fake.url}/api/chat", json=ollamas)
        assert answer.status_code == 400
        assert answer.json()["error"].startswith("`messages[0].thinking` belongs to role assistant")


@pytest.mark.timeout(8)
def test_reasoning_in_many_items_is_joined_once():
    text = "x" * 1900
    reasoning = {"id": "rs_1", "type": "reasoning", "content": [{"text": text}]}
    items = [reasoning] * 16_000  # of one body
    body = ResponsesRequest(model="fake", input="Hello")
    [message] = conversation_of(body, [], items).messages
    assert message["reasoning_content"] == "\n".join([text] * len(items))
