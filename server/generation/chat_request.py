"""One chat request of any route: prompt, submission, and the answer as deltas.

Chat completions, Responses, Anthropic's messages and Ollama's chat differ in their formats only.
Their routes translate a body to a ChatRequest and deltas to events; this module does the rest.
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
from server.generation.admission import AdmissionSlots
from server.generation.choice import Choice, ScoredToken, TextChunk
from server.generation.generation import Generation, require_ready
from server.generation.logprobs import check_scores
from server.generation.off_loop import off_loop
from server.generation.sampling_params import (
    check_chars,
    fit_to_context,
    sampling_params,
    truncation_of,
)
from server.prompt.template_messages import (
    check_messages,
    template_messages,
    template_options,
    template_tools,
    unseen_chars,
)
from server.state import ServerState
from server.tool_calls.output_parser import OutputParser, OutputParserSpec, content_deltas
from server.tool_calls.parser.deltas import ContentDelta, Delta, ReasoningDelta

CHARS_PER_MESSAGE = 256  # characters that take as long to check as a message
ChatFinish = FinishReason | Literal["tool_calls"]


class ParsedChunk(NamedTuple):
    """What a RequestOutput adds to one choice, parsed."""

    deltas: list[Delta]
    scored: list[ScoredToken]
    finish: ChatFinish | None
    tokens: Sequence[int] = ()


@dataclass
class GeneratedToolCall:
    id: str
    name: str
    texts: list[str]  # joined once: appending to one text would copy it for every token
    custom: bool = False

    @property
    def arguments(self) -> str:
        """JSON text, or the input of a custom tool."""
        return "".join(self.texts)


@dataclass
class GeneratedAnswer:
    """A choice that has ended."""

    choice: Choice
    contents: list[str] = field(default_factory=list[str])
    reasoning_chunks: list[str] = field(default_factory=list[str])
    tool_calls: list[GeneratedToolCall] = field(default_factory=list["GeneratedToolCall"])
    scored: list[ScoredToken] = field(default_factory=list[ScoredToken])
    finish: ChatFinish = "stop"
    tokens: list[int] = field(default_factory=list[int])

    @property
    def content(self) -> str:
        return "".join(self.contents)

    @property
    def reasoning(self) -> str:
        return "".join(self.reasoning_chunks)

    def add(self, chunk: ParsedChunk) -> None:
        for delta in chunk.deltas:
            if isinstance(delta, ContentDelta):
                self.contents.append(delta.text)
            elif isinstance(delta, ReasoningDelta):
                self.reasoning_chunks.append(delta.text)
            elif delta.id is not None:
                name = delta.name or ""
                call = GeneratedToolCall(delta.id, name, [delta.arguments], delta.custom)
                self.tool_calls.append(call)
            else:
                self.tool_calls[delta.index].texts.append(delta.arguments)
        self.scored += chunk.scored
        self.tokens += chunk.tokens
        self.finish = chunk.finish or self.finish


class ChatGeneration:
    """The answers to one chat request.  The caller must call `close`, also after an error."""

    def __init__(
        self, body: ChatRequest, generation: Generation, parser_spec: OutputParserSpec | None
    ) -> None:
        """parser_spec: None if the whole text of an answer is content."""
        self.body = body
        self.generation = generation
        self._parsers = [OutputParser(parser_spec) for _ in self.choices] if parser_spec else []

    @property
    def choices(self) -> list[Choice]:
        return self.generation.choices

    async def collect(self) -> list[GeneratedAnswer]:
        """Every choice, when all have ended.  Raises EngineFailed if the engine fails."""
        answers = [GeneratedAnswer(choice) for choice in self.choices]

        def keep(choice: Choice, chunk: ParsedChunk) -> bytes:
            answers[choice.index].add(chunk)
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
        """Write render(choice, chunk) of every chunk, in order within a choice.

        The first chunk of a choice may have no deltas; its last one has `finish`.
        write_now: see Generation.stream
        Raises EngineFailed if the engine fails.
        """

        def unparsed(choice: Choice, chunk: TextChunk) -> bytes:
            return render(
                choice, ParsedChunk(content_deltas(chunk), chunk.scored, chunk.finish, chunk.tokens)
            )

        def parsed(choice: Choice, chunk: TextChunk) -> bytes:
            parser = self._parsers[choice.index]
            deltas = parser.feed(choice, chunk)
            finish: ChatFinish | None = chunk.finish
            if finish == "stop" and parser.calls_tools(choice):
                finish = "tool_calls"
            return render(choice, ParsedChunk(deltas, chunk.scored, finish, chunk.tokens))

        await self.generation.stream(parsed if self._parsers else unparsed, write, write_now)

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
    slots: AdmissionSlots | None = None,
) -> ChatGeneration:
    """Check a parsed body, render its prompt and submit it.

    salt           see server.http.request_context.prefix_salt
    route          name of the route in the request log
    may_end_early  if the context has no room for max_tokens, the answer ends at its limit;
                   otherwise such a request is refused
    slots          one for each completion; None: they are reserved here
    Raises RequestError for an invalid request, RateLimited if the server is full, Unavailable
    while the engine is not ready.
    """
    ready = _checked(state, body)
    with slots or state.admission.reserve(body.n or 1) as slots:
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
            state, route, body, [prompt], params, salt, slots, kept_tokens=kept_tokens
        )
    return ChatGeneration(body, generation, parser_spec)


async def chat_prompt(state: ServerState, body: ChatRequest) -> tuple[Ready, list[int]]:
    """Check a parsed body and render its prompt, to count its tokens.

    Raises RequestError and Unavailable as prepare_chat does.
    """
    ready = _checked(state, body)
    return ready, await _prompt(state, ready, body)


def _checked(state: ServerState, body: ChatRequest) -> Ready:
    """Check the body; return the engine's Ready message.  Raises as prepare_chat does."""
    body.check()
    state.check_model(body.model)
    return require_ready(state)


async def _prompt(state: ServerState, ready: Ready, body: ChatRequest) -> list[int]:
    def plain() -> list[dict[str, Any]]:
        check_messages(body.messages)
        return template_messages(body.messages, state.tokenizer)

    messages = await off_loop(CHARS_PER_MESSAGE * len(body.messages), plain)
    return await _rendered(state, ready, body, messages)


async def _rendered(
    state: ServerState, ready: Ready, body: ChatRequest, messages: list[dict[str, Any]]
) -> list[int]:
    tokenizer = state.tokenizer
    tools = template_tools(body.offered_tools(), tokenizer)
    num_chars = sum(len(message["content"] or "") for message in messages)
    num_chars += len(orjson.dumps(tools)) if tools else 0
    cut = truncation_of(body, body.limit() or 1, ready)
    if cut is None:
        check_chars(num_chars, tokenizer, ready, "messages")
    options = template_options(body, tokenizer)
    num_chars += unseen_chars(body.messages)
    continuing = bool(body.continue_final_message)

    def work() -> list[int]:
        text = tokenizer.render(
            messages,
            add_generation_prompt=body.add_generation_prompt is not False and not continuing,
            continue_final_message=continuing,
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
