"""LiteLLM with the provider `openai/`."""

from __future__ import annotations

from typing import Any

import pytest

from tests.support.server.client_tools import (
    FRANCE,
    FUNCTION,
    MODEL,
    TEXT,
    TOOL_ANSWER,
    WEATHER,
    Person,
    is_anna,
    weather,
)
from tests.support.server.server_process import Server
from tests.support.server.tiny_chat_tools import HARD, HARD_ANSWER, HARD_THOUGHT

litellm = pytest.importorskip("litellm")
QUESTION: list[Any] = [{"role": "user", "content": FRANCE}]
TOOLS: list[Any] = [{"type": "function", "function": FUNCTION}]


@pytest.fixture
def ask(server: Server) -> dict[str, Any]:
    return {
        "model": f"openai/{MODEL}",
        "api_base": f"{server.url}/v1",
        "api_key": "none",
        "temperature": 0,
        "max_tokens": 400,
        "num_retries": 0,
    }


def test_completion_whole_and_as_a_stream(ask: dict[str, Any]):
    answer = litellm.completion(messages=QUESTION, **ask)
    text = answer.choices[0].message.content
    assert "Paris" in text and answer.usage.completion_tokens
    chunks = list(litellm.completion(messages=QUESTION, stream=True, **ask))
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == text


async def test_acompletion_whole_and_as_a_stream(ask: dict[str, Any]):
    answer = await litellm.acompletion(messages=QUESTION, **ask)
    stream = await litellm.acompletion(messages=QUESTION, stream=True, **ask)
    parts = [chunk.choices[0].delta.content or "" async for chunk in stream]
    assert "".join(parts) == answer.choices[0].message.content


def test_a_call_is_answered_and_the_conversation_goes_on(ask: dict[str, Any]):
    messages: list[Any] = [{"role": "user", "content": WEATHER}]
    first = litellm.completion(messages=messages, tools=TOOLS, **ask)
    message = first.choices[0].message
    assert first.choices[0].finish_reason == "tool_calls"
    messages.append(message)
    for call in message.tool_calls:
        result = weather(call.function.arguments)
        messages.append({"role": "tool", "tool_call_id": call.id, "content": result})
    second = litellm.completion(messages=messages, tools=TOOLS, **ask)
    assert (second.choices[0].finish_reason, second.choices[0].message.content) == (
        "stop",
        TOOL_ANSWER,
    )
    chunks = list(litellm.completion(messages=messages[:1], tools=TOOLS, stream=True, **ask))
    built = litellm.stream_chunk_builder(chunks, messages=messages[:1])
    [call] = built.choices[0].message.tool_calls
    assert weather(call.function.arguments)


def test_no_tool_is_called_where_none_is_needed(ask: dict[str, Any]):
    [choice] = litellm.completion(messages=QUESTION, tools=TOOLS, **ask).choices
    assert "Paris" in choice.message.content and not choice.message.tool_calls


def test_reasoning_is_separate_from_the_answer(ask: dict[str, Any]):
    hard: list[Any] = [{"role": "user", "content": HARD}]
    switch = {"chat_template_kwargs": {"enable_thinking": True}}
    message = litellm.completion(messages=hard, extra_body=switch, **ask).choices[0].message
    assert (message.reasoning_content, message.content) == (HARD_THOUGHT, HARD_ANSWER)


def test_answers_have_the_form_that_is_asked_for(ask: dict[str, Any]):
    text: list[Any] = [{"role": "user", "content": TEXT}]
    answer = litellm.completion(messages=text, response_format=Person, **ask)
    assert is_anna(Person.model_validate_json(answer.choices[0].message.content))


def test_embeddings_and_mistakes(ask: dict[str, Any]):
    place = {name: ask[name] for name in ("model", "api_base", "api_key")}
    assert litellm.embedding(input=[FRANCE], **place).data[0]["embedding"]
    with pytest.raises(litellm.BadRequestError, match="temperature"):
        litellm.completion(messages=QUESTION, **ask | {"temperature": 3})
