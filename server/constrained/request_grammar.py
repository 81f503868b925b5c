"""The grammar of a request's fields, checked."""

from __future__ import annotations

import time

from runtime.messages import Ready
from server.apis.openai.chat_schema import ChatRequest
from server.apis.openai.response_format_schema import allowed_beside
from server.apis.openai.sampling_schema import SamplingBody
from server.apis.openai.tools_schema import CustomTool
from server.constrained.grammar_text import Grammar, escaped
from server.constrained.reasoning_grammar import (
    after_limited_reasoning,
    after_reasoning,
    in_final_message,
)
from server.constrained.response_format import format_grammar
from server.errors import FieldPath, RequestError, UnsupportedParameter
from server.state import ServerState
from server.tool_calls.formats import NONE
from server.tool_calls.grammar import tool_grammar
from server.tool_calls.output_parser import OutputParser

CUSTOM_SECONDS = 4.0  # to try the grammars of a request's custom tools


async def answer_grammar(state: ServerState, body: SamplingBody, ready: Ready) -> str:
    """For SamplingParams.grammar: of response_format or structured_outputs, "" without either.

    Raises RequestError for what cannot be enforced, naming the place in the schema.
    """
    grammar = await _requested_grammar(state, body)
    return "" if grammar is None else await _check_grammar(state, grammar, ready)


async def chat_grammar(
    state: ServerState,
    body: ChatRequest,
    ready: Ready,
    parser: OutputParser | None,
    max_tokens: int,
) -> str:
    """For SamplingParams.grammar of a chat: of its format and tool calls, after limited reasoning.

    parser      of the answer; None: all of it is content
    max_tokens  of the answer
    """
    requested = await _requested_grammar(state, body)
    budget = _budget(state, body, parser, max_tokens)
    if requested is None and budget is None and not body.offered_tools():
        return ""
    template, literals = state.tokenizer.template, state.grammar_literals
    formats = state.formats.formats
    source = "" if template is None else template.source
    in_messages = parser is not None and parser.begins_messages
    if requested is not None and in_messages and not body.continue_final_message:
        requested = in_final_message(requested, literals)
    await _check_custom(state, body, ready)
    reasoning_between = budget is None or not in_messages
    grammar = await state.grammars.prepare(
        lambda: tool_grammar(
            body, requested, formats.tools, source, literals, reasoning_between=reasoning_between
        ),
    )
    reasoning = formats.reasoning
    if reasoning is not None and parser is not None and parser.may_reason:
        begun = parser.starts_in_reasoning
        if budget is not None:
            grammar = after_limited_reasoning(grammar, reasoning, literals, budget, begun=begun)
        elif grammar is not None:
            grammar = after_reasoning(grammar, reasoning, literals, begun=begun)
    if grammar is None:
        return ""
    if body.allowed_token_ids:
        raise allowed_beside("tool calls that must fit, or the end of the reasoning,")
    return await _check_grammar(state, grammar, ready)


async def _check_custom(state: ServerState, body: ChatRequest, ready: Ready) -> None:
    """Try the grammars of custom tools by themselves, so that an error names the one.

    Those of other requests wait meanwhile, so there is a limit to the time that all may take.
    """
    began = time.monotonic()
    for index, tool in body.offered():
        if isinstance(tool, CustomTool) and tool.grammar is not None:
            path = FieldPath("tools", index, "custom", "format", "grammar", "definition")
            text = tool.lark or f"start: /{escaped(tool.grammar.definition)}/"
            if time.monotonic() - began > CUSTOM_SECONDS:
                raise RequestError(
                    "{} and those after it were not tried: the grammars of custom tools may take "
                    "{:g} s in all; send fewer or simpler ones",
                    (path, CUSTOM_SECONDS),
                )
            await _check_grammar(state, Grammar([{"lark_grammar": text}], param=path), ready)


def _budget(
    state: ServerState, body: ChatRequest, parser: OutputParser | None, max_tokens: int
) -> int | None:
    """The limit of the reasoning; None if it cannot be reached.  Raises UnsupportedParameter."""
    budget = body.thinking_token_budget
    if budget is None or not 0 <= budget < max_tokens:
        return None
    if state.config.reasoning_format == NONE:
        raise UnsupportedParameter(
            "{thinking_token_budget} cannot be kept: this server runs with --reasoning-format "
            "none; use {max_tokens}"
        )
    if parser is None or not parser.may_reason:
        return None
    # The message that is continued is the answer itself.
    continued = parser.begins_messages and body.continue_final_message
    return None if continued else budget


async def _requested_grammar(state: ServerState, body: SamplingBody) -> Grammar | None:
    """The grammar of response_format or structured_outputs, not yet checked by the library."""
    fields = body.response_format, body.structured_outputs
    if fields == (None, None):
        return None
    return await state.grammars.prepare(lambda: format_grammar(*fields, state.grammar_literals))


async def _check_grammar(state: ServerState, grammar: Grammar, ready: Ready) -> str:
    """The text for SamplingParams.grammar.  Raises RequestError if it cannot be used."""
    return await state.grammars.check(grammar, ready.vocab_size, state.tokenizer)
