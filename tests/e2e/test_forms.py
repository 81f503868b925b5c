"""Structured outputs of the built-in model through the real `openai` client."""

from __future__ import annotations

import asyncio
import json
import re
from typing import Any

import jsonschema
import openai
import pytest

from tests.support.server.server_process import Server

CITY = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "maxLength": 12},
        "size": {"enum": ["small", "large"]},
        "visited": {"type": "boolean"},
        "year": {"type": "integer", "minimum": 1900, "maximum": 2100},
    },
    "required": ["city", "size", "visited", "year"],
    "additionalProperties": False,
}
FORMAT: Any = {"type": "json_schema", "json_schema": {"name": "city", "schema": CITY}}
QUESTION: Any = [{"role": "user", "content": "What is the capital of France?"}]


@pytest.mark.parametrize("temperature", [0.0, 1.5])
def test_several_answers_fulfil_a_schema(server: Server, temperature: float) -> None:
    answer = server.client().chat.completions.create(
        model="tiny-chat",
        messages=QUESTION,
        response_format=FORMAT,
        temperature=temperature,
        seed=1,
        n=3,
        max_tokens=300,
    )
    for choice in answer.choices:
        assert choice.finish_reason == "stop"
        jsonschema.validate(json.loads(choice.message.content or ""), CITY)


def test_a_stream_fulfils_a_regular_expression_while_plain_answers_run(server: Server) -> None:
    async def streamed() -> str:
        text = ""
        async with server.async_client() as client:
            stream = await client.completions.create(
                model="tiny-chat",
                prompt="The number:",
                stream=True,
                max_tokens=60,
                extra_body={"structured_outputs": {"regex": "[0-9]{3}-[a-c]{4}"}},
            )
            async for chunk in stream:
                text += chunk.choices[0].text
        return text

    async def plain() -> str:
        async with server.async_client() as client:
            answer = await client.chat.completions.create(
                model="tiny-chat", messages=QUESTION, temperature=0, max_tokens=30
            )
            return answer.choices[0].message.content or ""

    async def both() -> list[str]:
        return await asyncio.gather(streamed(), plain(), plain())

    form, *answers = asyncio.run(both())
    assert re.fullmatch("[0-9]{3}-[a-c]{4}", form)
    assert all("Paris" in answer for answer in answers)


def test_a_choice_is_made(server: Server) -> None:
    answer = server.client().chat.completions.create(
        model="tiny-chat",
        messages=QUESTION,
        max_tokens=20,
        logprobs=True,
        top_logprobs=5,
        extra_body={"structured_outputs": {"choice": ["London", "Rome"]}},
    )
    assert answer.choices[0].message.content in ("London", "Rome")
    assert answer.choices[0].logprobs is not None


def test_a_schema_that_cannot_be_enforced_is_refused(server: Server) -> None:
    wrong: Any = {"type": "object", "properties": {"a": {"not": {}}}}
    strict = {"name": "a", "schema": wrong, "strict": True}
    form: Any = {"type": "json_schema", "json_schema": strict}
    with pytest.raises(openai.BadRequestError) as refused:
        server.client().chat.completions.create(
            model="tiny-chat", messages=QUESTION, response_format=form
        )
    assert refused.value.param == "response_format.json_schema.schema.properties.a.not"
