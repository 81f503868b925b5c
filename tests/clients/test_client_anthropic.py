"""Anthropic's own client: messages, streams, a loop of calls."""

from __future__ import annotations

from typing import Any

import anthropic
import pytest

from tests.support.server.client_tools import FRANCE, MODEL, SCHEMA, TOOL_ANSWER, WEATHER, weather
from tests.support.server.server_process import Server

QUESTION: list[Any] = [{"role": "user", "content": FRANCE}]
TOOLS: list[Any] = [{"name": "get_weather", "input_schema": SCHEMA}]
ASK: dict[str, Any] = {
    "model": MODEL,
    "max_tokens": 400,
    "extra_body": {"temperature": 0},
}


def test_messages_whole_and_as_a_stream(server: Server):
    with anthropic.Anthropic(base_url=server.url, api_key="none", max_retries=0) as client:
        message = client.messages.create(messages=QUESTION, system="You help.", **ASK)
        assert "Paris" in message.content[0].text and message.stop_reason == "end_turn"
        with client.messages.stream(messages=QUESTION, system="You help.", **ASK) as stream:
            assert "".join(stream.text_stream) == message.content[0].text
        counted = client.messages.count_tokens(model=MODEL, messages=QUESTION, tools=TOOLS)
        assert counted.input_tokens > 0


async def test_a_streamed_call_is_answered_and_the_conversation_goes_on(server: Server):
    async with anthropic.AsyncAnthropic(base_url=server.url, api_key="none") as client:
        messages: list[Any] = [{"role": "user", "content": WEATHER}]
        async with client.messages.stream(messages=messages, tools=TOOLS, **ASK) as stream:
            first = await stream.get_final_message()
        assert first.stop_reason == "tool_use"
        results = [
            {"type": "tool_result", "tool_use_id": block.id, "content": weather(block.input)}
            for block in first.content
            if block.type == "tool_use"
        ]
        assert results
        messages += [
            {"role": "assistant", "content": first.content},
            {"role": "user", "content": results},
        ]
        second = await client.messages.create(messages=messages, tools=TOOLS, **ASK)
        assert (second.stop_reason, second.content[0].text) == ("end_turn", TOOL_ANSWER)


@pytest.mark.parametrize("streamed", [False, True])
def test_the_tool_runner_calls_and_ends_with_text(server: Server, streamed: bool):
    called: list[str] = []

    @anthropic.beta_tool(
        name="get_weather", description="The weather of a city", input_schema=SCHEMA
    )
    def get_weather(city: str) -> str:
        called.append(city)
        return weather({"city": city})

    with anthropic.Anthropic(base_url=server.url, api_key="none", max_retries=0) as client:
        options = ASK | {"stream": True} if streamed else ASK
        runner = client.beta.messages.tool_runner(
            messages=[{"role": "user", "content": WEATHER}], tools=[get_weather], **options
        )
        final = runner.until_done()
    assert (called, final.stop_reason, final.content[0].text) == (
        ["Paris"],
        "end_turn",
        TOOL_ANSWER,
    )


def test_mistakes_are_the_clients_exceptions(server: Server):
    with anthropic.Anthropic(base_url=server.url, api_key="none", max_retries=0) as client:
        with pytest.raises(anthropic.BadRequestError, match="max_tokens"):
            client.messages.create(model=MODEL, messages=QUESTION, max_tokens=0)
        with pytest.raises(anthropic.NotFoundError):
            client.messages.create(model="claude", messages=QUESTION, max_tokens=9)
