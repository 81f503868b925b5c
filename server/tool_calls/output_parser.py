"""A choice's text as content, reasoning and tool calls, in the model's own formats."""

from __future__ import annotations

from dataclasses import dataclass

import orjson

from server.apis.openai.tools_schema import Tool
from server.errors import RequestError
from server.prompt.chat_template import ChatTemplate
from server.prompt.template_messages import SWITCH
from server.prompt.tokenizer import ChatTokenizer, KeptTokens
from server.tool_calls.custom import CustomCalls
from server.tool_calls.format_types import Formats, ReasoningFormat
from server.tool_calls.formats import detect
from server.tool_calls.parser.answer import AnswerParser
from server.tool_calls.parser.deltas import Delta, ToolCallDelta
from server.tool_calls.parser.parts import Part

MAX_PROBED = 1 << 20  # characters of a prompt without a question
TAIL_TOKENS = 16  # of a prompt, enough to see whether it ends by opening the reasoning


@dataclass(frozen=True)
class OutputFormats:
    """How the served model writes what is more than content."""

    formats: Formats
    kept_tokens: KeptTokens
    opened_by_template: bool = False  # requested reasoning begins in the prompt, and no other does

    @classmethod
    def of(cls, tokenizer: ChatTokenizer, tools: str, reasoning: str) -> OutputFormats:
        """tools, reasoning: names of formats, auto or none.  Raises UnknownFormat."""
        template = tokenizer.template
        formats = detect(
            None if template is None else template.source,
            tokenizer.special_words().values(),
            tools=tools,
            reasoning=reasoning,
        )
        opened = formats.reasoning is not None and _template_opens(template, formats.reasoning)
        return cls(formats, tokenizer.kept_tokens(formats.needs_token), opened)

    def parser(
        self, tools: list[Tool], prompt: list[int], tokenizer: ChatTokenizer, *, parallel: bool
    ) -> OutputParser | None:
        """Of one answer to this prompt; None if all of it is content."""
        reasoning = self.formats.reasoning
        if reasoning is None and not tools:
            return None
        tail = tokenizer.decode(prompt[-TAIL_TOKENS:], skip_special=False)
        begun = may_reason = False
        if reasoning is not None:
            begun = reasoning.open_after(tail)
            may_reason = begun or not (self.opened_by_template or reasoning.closed_after(tail))
        return OutputParser(self.formats, tools, begun, may_reason, parallel=parallel)


def _template_opens(template: ChatTemplate | None, reasoning: ReasoningFormat) -> bool:
    """Whether the template begins the reasoning itself, where every switch for it is on."""
    if template is None:
        return False
    try:
        prompt = template.render(
            [{"role": "user", "content": "?"}],
            add_generation_prompt=True,
            continue_final_message=False,
            max_chars=MAX_PROBED,
            extra={SWITCH: True, "thinking": True, "reasoning_effort": "high"},
        )
    except RequestError:  # it needs other messages: unknown
        return False
    return reasoning.open_after(prompt)


class OutputParser:
    """Follows one choice."""

    def __init__(
        self,
        formats: Formats,
        tools: list[Tool],
        starts_in_reasoning: bool,
        may_reason: bool,
        *,
        parallel: bool,
    ) -> None:
        """may_reason: the answer begins in reasoning, or may begin with it"""
        self.starts_in_reasoning = starts_in_reasoning
        self.may_reason = may_reason
        # The answer is written as harmony's messages, each with a head.
        self.begins_messages = formats.harmony and (may_reason or formats.reasoning is None)
        self.may_reason_later = formats.reasoning is not None  # behind what is decided
        self._parser = AnswerParser(
            formats.tools if tools else None,
            formats.reasoning,
            tools={tool.function.name: tool.function.parameters or {} for tool in tools},
            starts_in_reasoning=starts_in_reasoning,
            parallel=parallel,
        )
        self._custom = CustomCalls({tool.function.name for tool in tools if tool.type == "custom"})
        self._once = not formats.harmony  # reasoning stands at the start only
        self._arguments: list[str] = []  # of the last call, in chunks

    def calls_tools(self, stop_hit: str | int | None) -> bool:
        """Whether a stop is for calls: a stop string may have cut the last one short."""
        if self._parser.num_calls == 0:
            return False
        return not isinstance(stop_hit, str) or _is_json("".join(self._arguments))

    @property
    def decided(self) -> int:
        """The place up to which `parts_at` is certain."""
        return self._parser.parts.decided

    def parts_at(self, places: list[int]) -> list[Part]:
        """The parts of the answer at places of its text, in ascending order."""
        parts: list[Part] = [self._parser.parts.at(place) for place in places]
        if self._once and ("content" in parts or "call" in parts):
            self.may_reason_later = False
        return parts

    def feed(self, text: str, *, last: bool, limited: bool = False) -> list[Delta]:
        """What a text adds.  limited: see AnswerParser.end"""
        deltas = self._parser.feed(text)
        if last:
            deltas += self._parser.end(limited=limited)
        for delta in deltas:
            if isinstance(delta, ToolCallDelta):
                if delta.id is not None:
                    self._arguments.clear()
                self._arguments.append(delta.arguments)
        return self._custom.converted(deltas, last=last)


def _is_json(text: str) -> bool:
    try:
        orjson.loads(text)
    except orjson.JSONDecodeError:
        return False
    return True
