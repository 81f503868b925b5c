"""OpenAI's Agents SDK: it runs the loop of calls itself, over either API."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import pytest

from tests.support.server.client_tools import (
    ANNA,
    FRANCE,
    MODEL,
    RESULT,
    TEXT,
    TOOL_ANSWER,
    WEATHER,
    Person,
)
from tests.support.server.server_process import Server

agents = pytest.importorskip("agents")


@pytest.fixture(params=["OpenAIChatCompletionsModel", "OpenAIResponsesModel"])
async def model(server: Server, request: pytest.FixtureRequest) -> AsyncIterator[Any]:
    agents.set_tracing_disabled(True)
    async with server.async_client() as client:
        yield getattr(agents, request.param)(model=MODEL, openai_client=client)


def helper(model: Any, called: list[str] | None = None, **options: Any) -> Any:
    """An agent, which writes down the cities that it asks for."""

    @agents.function_tool
    def get_weather(city: str) -> str:
        """The weather of a city."""
        assert called is not None
        called.append(city)
        return RESULT

    settings = agents.ModelSettings(temperature=0, max_tokens=400)
    return agents.Agent(
        name="helper",
        instructions="You help.",
        model=model,
        tools=[] if called is None else [get_weather],
        model_settings=settings,
        **options,
    )


async def test_a_run_answers_whole_and_as_a_stream(model: Any):
    answer = await agents.Runner.run(helper(model), FRANCE)
    assert answer.final_output
    run = agents.Runner.run_streamed(helper(model), FRANCE)
    deltas = [
        event.data.delta
        async for event in run.stream_events()
        if event.type == "raw_response_event" and event.data.type == "response.output_text.delta"
    ]
    assert "".join(deltas) == run.final_output == answer.final_output


@pytest.mark.parametrize("streamed", [False, True])
async def test_a_run_calls_its_tool_and_ends_with_text(model: Any, streamed: bool):
    called: list[str] = []
    agent = helper(model, called)
    if streamed:
        result = agents.Runner.run_streamed(agent, WEATHER, max_turns=3)
        async for _ in result.stream_events():
            pass
    else:
        result = await agents.Runner.run(agent, WEATHER, max_turns=3)
    assert (called, result.final_output) == (["Paris"], TOOL_ANSWER)


async def test_a_run_ends_with_the_type_that_is_asked_for(model: Any):
    answer = await agents.Runner.run(helper(model, output_type=Person), TEXT)
    assert answer.final_output == Person.model_validate(ANNA)
