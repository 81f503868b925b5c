"""LangChain's ChatOpenAI and OpenAIEmbeddings."""

from __future__ import annotations

from typing import Any

import pytest

from tests.support.server.client_tools import (
    FRANCE,
    MODEL,
    TEXT,
    TOOL_ANSWER,
    WEATHER,
    Person,
    is_anna,
    weather,
)
from tests.support.server.server_process import Server

langchain = pytest.importorskip("langchain_openai")
messages = pytest.importorskip("langchain_core.messages")
tools = pytest.importorskip("langchain_core.tools")


@tools.tool("get_weather")
def weather_of(city: str) -> str:
    """The weather of a city."""
    return weather({"city": city})


@pytest.fixture(params=[False, True], ids=["chat", "responses"])
def model(server: Server, request: pytest.FixtureRequest) -> Any:
    return langchain.ChatOpenAI(
        model=MODEL,
        base_url=f"{server.url}/v1",
        api_key="none",
        temperature=0,
        max_tokens=400,
        max_retries=0,
        use_responses_api=request.param,
    )


# Its models share the connections of one asynchronous client.
@pytest.mark.asyncio(loop_scope="module")
async def test_invoke_and_stream(model: Any):
    answer = model.invoke(FRANCE)
    assert "Paris" in answer.text and answer.usage_metadata["output_tokens"]
    assert "".join(chunk.text for chunk in model.stream(FRANCE)) == answer.text
    assert (await model.ainvoke(FRANCE)).text == answer.text
    assert "".join([chunk.text async for chunk in model.astream(FRANCE)]) == answer.text


def test_a_bound_tool_is_called_and_its_result_read(model: Any):
    conversation: list[Any] = [messages.HumanMessage(WEATHER)]
    first = model.bind_tools([weather_of]).invoke(conversation)
    assert len(first.tool_calls) == 1
    conversation.append(first)
    conversation += [weather_of.invoke(call) for call in first.tool_calls]
    second = model.bind_tools([weather_of]).invoke(conversation)
    assert (second.text, second.tool_calls) == (TOOL_ANSWER, [])
    strict: Any = {"tool_choice": "required", "strict": True}
    chunks = list(model.bind_tools([weather_of], **strict).stream(WEATHER))
    whole = sum(chunks[1:], chunks[0])
    assert whole.tool_calls and all(weather_of.invoke(call) for call in whole.tool_calls)


@pytest.mark.parametrize("method", ["json_schema", "function_calling"])
def test_structured_output_is_an_instance_of_the_requested_model(model: Any, method: str):
    answer = model.with_structured_output(Person, method=method).invoke(TEXT)
    # The model does not see the schema, and has not learned to fill one by calling it.
    assert is_anna(answer) or (method == "function_calling" and isinstance(answer, Person))


def test_embeddings_of_documents_and_of_a_question(server: Server):
    settings = {"model": MODEL, "base_url": f"{server.url}/v1", "api_key": "none"}
    embeddings = langchain.OpenAIEmbeddings(check_embedding_ctx_length=False, **settings)
    [first, second] = embeddings.embed_documents([FRANCE, "Hello"])
    assert len(first) == len(second) and first != second
    assert embeddings.embed_query(FRANCE) == pytest.approx(first, abs=1e-5)
