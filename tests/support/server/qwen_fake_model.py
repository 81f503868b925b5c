"""A fake model with the tool calls and reasoning of Qwen's, and what its tests share."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from tests.support.server.fake_engine import FakeServer, fake_server

TEMPLATE = (
    "{% if tools %}<|system|><tools>{% for tool in tools %}{{ tool | tojson }}{% endfor %}</tools>"
    " Answer with <tool_call>...</tool_call>.<|end|>{% endif %}"
    "{% for message in messages %}<|{{ message.role }}|>{{ message.content or '' }}"
    "{% for call in message.tool_calls or [] %}<tool_call>{{ call.function | tojson }}</tool_call>"
    "{% endfor %}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>THINKING{% endif %}{# <think></think> #}"
)
# Places in the template: a switch that disables reasoning, and one that begins it.
CAN_BE_QUIET = (
    "{% if enable_thinking is defined and not enable_thinking %}<think>\n\n</think>\n\n{% endif %}"
)
CAN_BEGIN = "{% if open_thought %}<think>\n{% endif %}"
PARAMETERS: dict[str, Any] = {
    "type": "object",
    "properties": {"city": {"type": "string"}},
    "required": ["city"],
}
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Rome"}}\n</tool_call>'
OTHER = '<tool_call>\n{"name": "time", "arguments": {}}\n</tool_call>'
HUGE = 123456789012345678901234567890  # more than 64 bits hold
HUGE_CALL = CALL.replace('"Rome"', str(HUGE))
QUESTION: list[Any] = [{"role": "user", "content": "Weather in Rome?"}]


@contextmanager
def qwen_server(factory: pytest.TempPathFactory, thinking: str = "") -> Iterator[FakeServer]:
    """With room for tools in the context.

    thinking    what the template prints where the answer begins
    """
    template = TEMPLATE.replace("THINKING", thinking)
    with fake_server(factory.mktemp("tokenizer"), template=template, context=4096) as server:
        yield server


def prompt_of(fake: FakeServer) -> str:
    """Of the last request."""
    return fake.tokenizer.decode(fake.engine.requests[-1].tokens, skip_special=False)
