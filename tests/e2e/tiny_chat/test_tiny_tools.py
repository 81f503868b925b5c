"""The built-in model's tool calls, reasoning and JSON in chat completions, by OpenAI's client."""

from __future__ import annotations

import json
from typing import Any

from tests.support.server.server_process import Server
from tests.support.server.tiny_chat_tools import (
    ANNA,
    HARD,
    HARD_ANSWER,
    HARD_THOUGHT,
    MODEL,
    NO_TOOL_NEEDED,
    NONE_FITS,
    PERSON,
    RESULT,
    TEXT,
    TOOL_ANSWER,
    TOOLS,
    TWO_CITIES,
    WEATHER,
)  # fmt: skip


def asking(question: str, **more: Any) -> dict[str, Any]:
    messages = [{"role": "user", "content": question}]
    return {"model": MODEL, "temperature": 0, "messages": messages, **more}


def create(server: Server, question: str, **more: Any) -> Any:
    return server.client().chat.completions.create(**asking(question, **more))


def test_a_question_goes_through_a_tool_to_an_answer(server: Server) -> None:
    [choice] = create(server, WEATHER, tools=TOOLS).choices
    assert choice.finish_reason == "tool_calls"
    [call] = choice.message.tool_calls
    assert call.function.name == "get_weather"
    assert json.loads(call.function.arguments) == {"city": "Paris"}
    messages = [
        {"role": "user", "content": WEATHER},
        choice.message,
        {"role": "tool", "tool_call_id": call.id, "content": RESULT},
    ]
    final = create(server, "", tools=TOOLS, messages=messages).choices[0]
    assert (final.message.content, final.finish_reason) == (TOOL_ANSWER, "stop")


def test_streamed_calls_have_numbers_where_the_schema_wants_them(server: Server) -> None:
    stream = create(server, "Set a timer for 12 minutes.", tools=TOOLS, stream=True)
    calls = [call for chunk in stream for call in chunk.choices[0].delta.tool_calls or ()]
    assert "".join(call.function.name or "" for call in calls) == "set_timer"
    assert len(calls) > 2, "arguments come in several deltas"
    assert json.loads("".join(call.function.arguments or "" for call in calls)) == {"minutes": 12}


def test_one_question_about_two_cities_is_two_calls(server: Server) -> None:
    calls = create(server, TWO_CITIES, tools=TOOLS).choices[0].message.tool_calls
    found = [json.loads(call.function.arguments)["city"] for call in calls]
    assert found == ["Paris", "Rome"] and len({call.id for call in calls}) == 2
    one = create(server, TWO_CITIES, tools=TOOLS, parallel_tool_calls=False).choices[0].message
    assert [json.loads(call.function.arguments) for call in one.tool_calls] == [{"city": "Paris"}]


def test_no_tool_is_called_where_none_is_needed_or_none_fits(server: Server) -> None:
    for question, answer in (NO_TOOL_NEEDED, NONE_FITS):
        [choice] = create(server, question, tools=TOOLS).choices
        assert (choice.message.content, choice.message.tool_calls) == (answer, None)


def test_with_reasoning_switched_on_it_answers_correctly(server: Server) -> None:
    assert create(server, HARD).choices[0].message.content == "I don't know that."
    switch = {"chat_template_kwargs": {"enable_thinking": True}}
    slow = create(server, HARD, extra_body=switch)
    message = slow.choices[0].message
    assert (message.reasoning_content, message.content) == (HARD_THOUGHT, HARD_ANSWER)
    assert slow.usage.completion_tokens_details.reasoning_tokens > 0
    effort = create(server, HARD, reasoning_effort="low", stream=True)
    deltas = [chunk.choices[0].delta for chunk in effort]
    assert "".join(delta.content or "" for delta in deltas) == HARD_ANSWER
    reasoning = "".join(getattr(delta, "reasoning", None) or "" for delta in deltas)
    assert reasoning == HARD_THOUGHT


def test_json_is_filled_with_what_the_user_wrote(server: Server) -> None:
    form = {"type": "json_schema", "json_schema": {"name": "person", "schema": PERSON}}
    free = create(server, TEXT).choices[0].message.content
    bound = create(server, TEXT, response_format=form).choices[0].message.content
    assert json.loads(free) == json.loads(bound) == ANNA
