"""One chat request, whatever route it came by: prompt, engine, and the answer in deltas.

Chat completions, Responses, Anthropic's messages and Ollama's chat all ask for the same thing in
other words.  Their routes translate a body to a ChatRequest and deltas to events; what lies between
is here.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

import msgspec
import orjson

from runtime.messages import FinishReason, Ready, SamplingParams
from server.apis.openai.chat_schema import ChatRequest
from server.constrained.request_grammar import chat_grammar
from server.generation.admission import Places
from server.generation.choice import Choice, ScoredToken, TextChunk
from server.generation.generation import Generation, require_ready
from server.generation.logprobs import check_scores
from server.generation.off_loop import off_loop
from server.generation.sampling_params import (
    check_chars,
    cut_of,
    fit_to_context,
    sampling_params,
)
from server.prompt.template_messages import (
    check_messages,
    template_messages,
    template_tools,
    unseen_chars,
)
from server.prompt.template_options import template_options
from server.state import ServerState
from server.tool_calls.output_parser import OutputParserSpec, content_deltas
from server.tool_calls.parser.deltas import ContentDelta, Delta, ReasoningDelta

WORK_OF_MESSAGE = 256  # characters that take as long to look through as a message
ChatFinish = FinishReason | Literal["tool_calls"]


class ParsedChunk(NamedTuple):
    """What an Output adds to one choice."""

    deltas: list[Delta]
    scored: list[ScoredToken]
    finish: ChatFinish | None
    tokens: Sequence[int] = ()


@dataclass
class ToolCallMade:
    id: str
    name: str
    texts: list[str]  # a text that grew with every token would be copied as often
    custom: bool = False

    @property
    def arguments(self) -> str:
        """JSON text; a custom tool's input."""
        return "".join(self.texts)


@dataclass
class GeneratedAnswer:
    """A choice that has ended."""

    choice: Choice
    contents: list[str] = field(default_factory=list[str])
    reasoning_chunks: list[str] = field(default_factory=list[str])
    tool_calls: list[ToolCallMade] = field(default_factory=list["ToolCallMade"])
    scored: list[ScoredToken] = field(default_factory=list[ScoredToken])
    finish: ChatFinish = "stop"
    tokens: list[int] = field(default_factory=list[int])

    @property
    def content(self) -> str:
        return "".join(self.contents)

    @property
    def reasoning(self) -> str:
        return "".join(self.reasoning_chunks)

    def add(self, part: ParsedChunk) -> None:
        for delta in part.deltas:
            if isinstance(delta, ContentDelta):
                self.contents.append(delta.text)
            elif isinstance(delta, ReasoningDelta):
                self.reasoning_chunks.append(delta.text)
            elif delta.id is not None:
                name = delta.name or ""
                call = ToolCallMade(delta.id, name, [delta.arguments], delta.custom)
                self.tool_calls.append(call)
            else:
                self.tool_calls[delta.index].texts.append(delta.arguments)
        self.scored += part.scored
        self.tokens += part.tokens
        self.finish = part.finish or self.finish


class ChatTurn:
    """The answers to one chat request.  The caller calls `close` however it ends."""

    def __init__(
        self, body: ChatRequest, generation: Generation, parser_spec: OutputParserSpec | None
    ) -> None:
        """splitting: None if answers are content from end to end."""
        self.body = body
        self.generation = generation
        self._parsers = [parser_spec.parser() for _ in self.choices] if parser_spec else []

    @property
    def choices(self) -> list[Choice]:
        return self.generation.choices

    async def collect(self) -> list[GeneratedAnswer]:
        """Every choice, when all have ended.  Raises EngineFailed if the engine fails."""
        answers = [GeneratedAnswer(choice) for choice in self.choices]

        def keep(choice: Choice, part: ParsedChunk) -> bytes:
            answers[choice.index].add(part)
            return b""

        async def write(data: bytes) -> None:
            raise AssertionError("nothing was rendered")

        await self.stream(keep, write)
        return answers

    async def stream(
        self,
        render: Callable[[Choice, ParsedChunk], bytes],
        write: Callable[[bytes], Awaitable[None]],
        write_now: Callable[[bytes], bool] | None = None,
    ) -> None:
        """Write render(choice, part) of every part, in order within a choice.

        The first part of a choice may have no deltas; its last one has `finish`.
        write_now: of Generation.stream
        Raises EngineFailed if the engine fails.
        """

        def whole(choice: Choice, piece: TextChunk) -> bytes:
            return render(
                choice, ParsedChunk(content_deltas(piece), piece.scored, piece.finish, piece.tokens)
            )

        def split(choice: Choice, piece: TextChunk) -> bytes:
            parser = self._parsers[choice.index]
            deltas = parser.feed(choice, piece)
            finish: ChatFinish | None = piece.finish
            if finish == "stop" and parser.calls_tools(choice):
                finish = "tool_calls"
            return render(choice, ParsedChunk(deltas, piece.scored, finish, piece.tokens))

        await self.generation.stream(split if self._parsers else whole, write, write_now)

    def usage(self) -> dict[str, object]:
        """OpenAI's usage object."""
        return self.generation.usage()

    def close(self) -> None:
        """Abort what has not ended."""
        self.generation.close()


async def prepare_chat(
    state: ServerState,
    body: ChatRequest,
    salt: bytes,
    route: str = "chat",
    *,
    may_end_early: bool = False,
    places: Places | None = None,
) -> ChatTurn:
    """Check a parsed body, render its prompt and submit it.

    salt           of exchange.prefix_salt
    route          where it came from, as its record says
    may_end_early  the answer ends where the context does, if that comes before its max_tokens;
                   else such a request is refused
    places         one for each completion; None: they are reserved here
    Raises RequestError for what the caller did wrong, RateLimited if there is no room, Unavailable
    while there is no engine.
    """
    ready = _checked(state, body)
    with places or state.admission.reserve(body.n or 1) as places:
        prompt = await _prompt(state, ready, body)
        params = _params(state, ready, body, prompt, may_end_early)
        check_scores(body, [prompt], params, copies=body.n or 1, names=("top_logprobs", "n"))
        parser_spec = state.formats.parser_spec(
            body.offered_tools(), prompt, state.tokenizer, parallel=not body.one_call()
        )
        grammar = await chat_grammar(state, body, ready, parser_spec, params.max_tokens)
        params = msgspec.structs.replace(params, grammar=grammar)
        kept_tokens = None if parser_spec is None else state.formats.kept_tokens
        generation = Generation(
            state, route, body, [prompt], params, salt, places, kept_tokens=kept_tokens
        )
    return ChatTurn(body, generation, parser_spec)


async def chat_prompt(state: ServerState, body: ChatRequest) -> tuple[Ready, list[int]]:
    """Check a parsed body and render its prompt, for those who only count its tokens.

    Raises RequestError and Unavailable as prepare_chat does.
    """
    ready = _checked(state, body)
    return ready, await _prompt(state, ready, body)


def _checked(state: ServerState, body: ChatRequest) -> Ready:
    """The engine, for a body that needs no more than a look.  Raises as prepare_chat does."""
    body.check()
    state.check_model(body.model)
    return require_ready(state)


async def _prompt(state: ServerState, ready: Ready, body: ChatRequest) -> list[int]:
    def plain() -> list[dict[str, Any]]:
        check_messages(body.messages)
        return template_messages(body.messages, state.tokenizer)

    messages = await off_loop(WORK_OF_MESSAGE * len(body.messages), plain)
    return await _rendered(state, ready, body, messages)


async def _rendered(
    state: ServerState, ready: Ready, body: ChatRequest, messages: list[dict[str, Any]]
) -> list[int]:
    tokenizer = state.tokenizer
    tools = template_tools(body.offered_tools(), tokenizer)
    num_chars = sum(len(message["content"] or "") for message in messages)
    num_chars += len(orjson.dumps(tools)) if tools else 0
    cut = cut_of(body, body.limit() or 1, ready)
    if cut is None:
        check_chars(num_chars, tokenizer, ready, "messages")
    options = template_options(body, tokenizer)
    num_chars += unseen_chars(body.messages)
    going_on = bool(body.continue_final_message)

    def work() -> list[int]:
        text = tokenizer.render(
            messages,
            add_generation_prompt=body.add_generation_prompt is not False and not going_on,
            continue_final_message=going_on,
            max_chars=(ready.max_model_len + 1) * tokenizer.longest_token + num_chars,
            extra=options,
            tools=tools,
        )
        if cut is None:
            return tokenizer.encode_prompt(text)
        return cut.tokens(tokenizer.encode_prompt(cut.text(text, tokenizer, tokenizer.max_growth)))

    return await off_loop(num_chars, work)


def _params(
    state: ServerState, ready: Ready, body: ChatRequest, prompt: list[int], may_end_early: bool
) -> SamplingParams:
    wanted = body.limit()
    if may_end_early and len(prompt) + (wanted or 0) > ready.max_model_len:
        wanted = None
    max_tokens = fit_to_context(len(prompt), wanted, ready.max_model_len, body.model, "messages")
    return sampling_params(
        body,
        state.tokenizer,
        ready,
        max_tokens=max_tokens,
        logprobs=body.num_logprobs(),
        prompt_logprobs=body.prompt_logprobs,
    )
