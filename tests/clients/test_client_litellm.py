"""LiteLLM with the provider `openai/`."""

from __future__ import annotations

from typing import Any

import pytest
from client_tools import FRANCE, FUNCTION, MODEL, Place, weather
from server_process import Server

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
    messages = list(QUESTION)
    first = litellm.completion(messages=messages, tools=TOOLS, tool_choice="required", **ask)
    message = first.choices[0].message
    assert first.choices[0].finish_reason == "tool_calls"
    messages.append(message)
    for call in message.tool_calls:
        result = weather(call.function.arguments)
        messages.append({"role": "tool", "tool_call_id": call.id, "content": result})
    second = litellm.completion(messages=messages, tools=TOOLS, **ask)
    assert second.choices[0].finish_reason == "stop" and second.choices[0].message.content
    chunks = list(
        litellm.completion(
            messages=QUESTION, tools=TOOLS, tool_choice="required", stream=True, **ask
        )
    )
    built = litellm.stream_chunk_builder(chunks, messages=QUESTION)
    assert all(weather(c.function.arguments) for c in built.choices[0].message.tool_calls)


def test_answers_have_the_form_that_is_asked_for(ask: dict[str, Any]):
    answer = litellm.completion(messages=QUESTION, response_format=Place, **ask)
    Place.model_validate_json(answer.choices[0].message.content)


def test_embeddings_and_mistakes(ask: dict[str, Any]):
    place = {name: ask[name] for name in ("model", "api_base", "api_key")}
    assert litellm.embedding(input=[FRANCE], **place).data[0]["embedding"]
    with pytest.raises(litellm.BadRequestError, match="temperature"):
        litellm.completion(messages=QUESTION, **ask | {"temperature": 3})
