"""Custom tools, short reasoning and stored answers of the built-in model, by `openai`'s client."""

from __future__ import annotations

import re
from typing import Any

import openai
import pytest

from tests.support.server.server_process import Server

SUM: Any = [{"role": "user", "content": "What is 23 + 45?"}]
THINKING: Any = {"enable_thinking": True}


def test_reasoning_ends_at_its_budget_and_the_answer_follows(server: Server) -> None:
    lengths: list[int] = []
    for budget in (-1, 3, 0):
        answer = server.client().chat.completions.create(
            model="tiny-chat",
            messages=SUM,
            temperature=0,
            extra_body={"chat_template_kwargs": THINKING, "thinking_token_budget": budget},
        )
        [choice] = answer.choices
        assert choice.finish_reason == "stop" and (choice.message.content or "").endswith("68.")
        lengths.append(len((choice.message.model_extra or {}).get("reasoning", "")))
    assert lengths[0] > lengths[1] > lengths[2] == 0


def test_the_input_of_a_custom_tool_follows_its_regular_expression(server: Server) -> None:
    grammar = {"syntax": "regex", "definition": "(SELECT|DELETE) [a-z]{3,9};"}
    custom = {"name": "query", "format": {"type": "grammar", "grammar": grammar}}
    tools: Any = [{"type": "custom", "custom": custom}]
    answer = server.client().chat.completions.create(
        model="tiny-chat",
        messages=SUM,
        tools=tools,
        tool_choice="required",
        parallel_tool_calls=False,
        temperature=1.5,
    )
    [choice] = answer.choices
    [call] = choice.message.tool_calls or []
    assert call.type == "custom" and call.custom.name == "query"
    assert re.fullmatch(grammar["definition"], call.custom.input)


def test_a_stored_answer_is_found_by_its_metadata_until_it_is_deleted(server: Server) -> None:
    chats = server.client().chat.completions
    about = {"test": "stored"}
    made = chats.create(model="tiny-chat", messages=SUM, store=True, metadata=about)
    [found] = chats.list(metadata=about)
    assert found.id == made.id and found.choices == made.choices
    assert [message.content for message in chats.messages.list(made.id)] == [SUM[0]["content"]]
    chats.delete(made.id)
    with pytest.raises(openai.NotFoundError):
        chats.retrieve(made.id)
