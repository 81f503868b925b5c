"""OpenAI's own client, in both of its APIs, sync and async."""

from __future__ import annotations

import json
from typing import Any

import openai
import pytest

from tests.support.server.client_tools import (
    ANNA,
    FRANCE,
    FUNCTION,
    MODEL,
    PERSON,
    TEXT,
    TOOL_ANSWER,
    WEATHER,
    Person,
    is_anna,
    weather,
)  # fmt: skip
from tests.support.server.server_process import Server

QUESTION: list[Any] = [{"role": "user", "content": FRANCE}]
WEATHER_QUESTION: list[Any] = [{"role": "user", "content": WEATHER}]
CHAT: dict[str, Any] = {"model": MODEL, "temperature": 0, "max_tokens": 400}
TOOLS: list[Any] = [{"type": "function", "function": FUNCTION}]
FLAT_TOOLS: list[Any] = [{"type": "function", **FUNCTION, "strict": True}]
RESPONSE: dict[str, Any] = {"model": MODEL, "temperature": 0, "max_output_tokens": 400}


def test_chat_whole_and_as_a_stream(server: Server):
    with server.client() as client:
        answer = client.chat.completions.create(messages=QUESTION, **CHAT)
        text = answer.choices[0].message.content
        assert text and "Paris" in text and answer.usage and answer.usage.completion_tokens
        with client.chat.completions.stream(messages=QUESTION, **CHAT) as stream:
            deltas = [event.delta for event in stream if event.type == "content.delta"]
            final = stream.get_final_completion()
        assert "".join(deltas) == text == final.choices[0].message.content
        assert client.models.list().data[0].id == MODEL


async def test_async_chat_whole_and_as_a_stream(server: Server):
    async with server.async_client() as client:
        answer = await client.chat.completions.create(messages=QUESTION, **CHAT)
        stream = await client.chat.completions.create(
            messages=QUESTION, stream=True, stream_options={"include_usage": True}, **CHAT
        )
        chunks = [chunk async for chunk in stream]
        text = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
        assert "Paris" in text and text == answer.choices[0].message.content
        # The second one finds its prompt in the cache, so that only the sums are the same.
        assert chunks[-1].usage and answer.usage
        assert chunks[-1].usage.total_tokens == answer.usage.total_tokens


def test_a_chat_that_calls_a_tool_goes_on_with_its_result(server: Server):
    with server.client() as client:
        messages = list(WEATHER_QUESTION)
        first = client.chat.completions.create(messages=messages, tools=TOOLS, **CHAT)
        message = first.choices[0].message
        assert first.choices[0].finish_reason == "tool_calls" and message.tool_calls
        messages.append(message)
        for call in message.tool_calls:
            result = weather(call.function.arguments)
            messages.append({"role": "tool", "tool_call_id": call.id, "content": result})
        second = client.chat.completions.create(messages=messages, tools=TOOLS, **CHAT)
        assert second.choices[0].finish_reason == "stop"
        assert second.choices[0].message.content == TOOL_ANSWER


async def test_an_async_stream_of_calls_adds_up(server: Server):
    async with (
        server.async_client() as client,
        client.chat.completions.stream(
            messages=WEATHER_QUESTION, tools=TOOLS, tool_choice="required", **CHAT
        ) as stream,
    ):
        parts = [e.arguments_delta async for e in stream if e.type.endswith("arguments.delta")]
        final = await stream.get_final_completion()
    calls = final.choices[0].message.tool_calls or []
    assert "".join(parts) == "".join(call.function.arguments for call in calls)
    assert calls and all(weather(call.function.arguments) for call in calls)


def test_answers_and_arguments_are_parsed_into_models(server: Server):
    with server.client() as client:
        text: list[Any] = [{"role": "user", "content": TEXT}]
        answer = client.chat.completions.parse(messages=text, response_format=Person, **CHAT)
        assert is_anna(answer.choices[0].message.parsed)
        tool = openai.pydantic_function_tool(Person)
        answer = client.chat.completions.parse(
            messages=text, tools=[tool], tool_choice="required", **CHAT
        )
        calls = answer.choices[0].message.tool_calls or []
        assert calls and all(isinstance(c.function.parsed_arguments, Person) for c in calls)
        response = client.responses.parse(input=TEXT, text_format=Person, **RESPONSE)
        assert is_anna(response.output_parsed)
        format = {"type": "json_schema", "json_schema": {"name": "person", "schema": PERSON}}
        answer = client.chat.completions.create(messages=text, response_format=format, **CHAT)  # type: ignore[call-overload]
        assert json.loads(answer.choices[0].message.content or "") == ANNA


def test_responses_whole_streamed_and_continued_after_a_call(server: Server):
    with server.client() as client:
        whole = client.responses.create(input=FRANCE, **RESPONSE)
        assert "Paris" in whole.output_text
        with client.responses.stream(input=FRANCE, **RESPONSE) as stream:
            deltas = [e.delta for e in stream if e.type == "response.output_text.delta"]
            assert "".join(deltas) == whole.output_text == stream.get_final_response().output_text
        first = client.responses.create(input=WEATHER, tools=FLAT_TOOLS, **RESPONSE)
        calls = [item for item in first.output if item.type == "function_call"]
        results: list[Any] = [
            {
                "type": "function_call_output",
                "call_id": call.call_id,
                "output": weather(call.arguments),
            }
            for call in calls
        ]
        assert results
        second = client.responses.create(
            input=results, previous_response_id=first.id, tools=FLAT_TOOLS, **RESPONSE
        )
        assert (second.status, second.output_text) == ("completed", TOOL_ANSWER)


async def test_async_responses_stream_their_calls(server: Server):
    async with server.async_client() as client:
        whole = await client.responses.create(input=FRANCE, **RESPONSE)
        assert "Paris" in whole.output_text
        stream = await client.responses.create(
            input=WEATHER, tools=FLAT_TOOLS, stream=True, **RESPONSE
        )
        events = [event async for event in stream]
        done = [e for e in events if e.type == "response.function_call_arguments.done"]
        assert done and all(weather(event.arguments) for event in done)
        assert events[-1].type == "response.completed"


async def test_embeddings_sync_and_async_are_the_same(server: Server):
    texts = [FRANCE, "Hello"]
    with server.client() as client:
        first = client.embeddings.create(model=MODEL, input=texts).data
    async with server.async_client() as client:
        answer = await client.embeddings.create(model=MODEL, input=texts, encoding_format="float")
    for one, other in zip(first, answer.data, strict=True):
        assert one.embedding == pytest.approx(other.embedding, abs=1e-5)


def test_mistakes_are_the_clients_exceptions(server: Server):
    with server.client() as client:
        with pytest.raises(openai.BadRequestError) as wrong:
            client.chat.completions.create(model=MODEL, messages=QUESTION, temperature=3)
        assert wrong.value.param == "temperature" and "temperature" in wrong.value.message
        with pytest.raises(openai.NotFoundError):
            client.chat.completions.create(model="gpt", messages=QUESTION)
