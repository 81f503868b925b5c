"""One chat request of any route: its prompt and its submission.

Chat completions, Responses, Anthropic's messages and Ollama's chat differ in their formats only.
Their routes translate a body to a ChatRequest, and the chunks of its Generation to events.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import msgspec
import orjson

from runtime.messages import Ready
from server.apis.openai.chat_schema import ChatRequest, ImageUrl
from server.constrained.request_grammar import chat_grammar
from server.errors import FieldPath
from server.generation.admission import AdmissionSlots
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
    content_chars,
    template_messages,
    template_options,
    template_tools,
    unseen_chars,
)
from server.state import ServerState

if TYPE_CHECKING:
    from server.images.request_images import RequestImages

MESSAGES = FieldPath("messages")
CHARS_PER_MESSAGE = 256  # characters that take as long to check as a message


async def prepare_chat(
    state: ServerState,
    body: ChatRequest,
    salt: bytes,
    route: str = "chat",
    *,
    may_end_early: bool = False,
    slots: AdmissionSlots | None = None,
) -> Generation:
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
        found = body.images()
        images = await _read_images(state, body, found) if found else None
        prompt, generation_prompt_len = await _prompt(state, ready, body)
        if images is not None:
            prompt = images.place(prompt, state.tokenizer)
        wanted, limit = body.limit(), ready.max_model_len
        if may_end_early and len(prompt) + (wanted or 0) > limit:
            wanted = None
        params = sampling_params(
            body,
            state.tokenizer,
            ready,
            max_tokens=fit_to_context(
                len(prompt),
                wanted,
                limit,
                MESSAGES,
                image_tokens=0 if images is None else images.num_tokens,
            ),
            logprobs=body.num_logprobs(),
            prompt_logprobs=body.prompt_logprobs,
        )
        check_scores(body, [prompt], params, copies=body.n or 1, names=("top_logprobs", "n"))
        tools, parallel = body.offered_tools(), not body.one_call()
        parsers = [
            parser
            for _ in range(body.n or 1)
            if (parser := state.formats.parser(tools, prompt, state.tokenizer, parallel=parallel))
        ]
        parser = parsers[0] if parsers else None
        grammar = await chat_grammar(state, body, ready, parser, params.max_tokens)
        params = msgspec.structs.replace(params, grammar=grammar)
        held = None if images is None else await images.decode()
        return Generation(
            state,
            route,
            body,
            [prompt],
            params,
            salt,
            slots,
            parsers=parsers,
            images=held,
            generation_prompt_len=generation_prompt_len,
        )


async def chat_prompt(state: ServerState, body: ChatRequest) -> tuple[Ready, list[int]]:
    """Check a parsed body and render its prompt, to count its tokens.

    Raises RequestError and Unavailable as prepare_chat does.
    """
    ready = _checked(state, body)
    found = body.images()
    images = await _read_images(state, body, found) if found else None
    prompt, _ = await _prompt(state, ready, body)
    return ready, prompt if images is None else images.place(prompt, state.tokenizer)


async def _read_images(
    state: ServerState, body: ChatRequest, found: Sequence[tuple[FieldPath, ImageUrl]]
) -> RequestImages:
    # Where the model reads text only, none of it is ever loaded.
    from server.images.request_images import RequestImages

    return await RequestImages.read(state, body, found)


def _checked(state: ServerState, body: ChatRequest) -> Ready:
    """Check the body; return the engine's Ready message.  Raises as prepare_chat does."""
    body.check()
    state.check_model(body.model)
    return require_ready(state)


async def _prompt(state: ServerState, ready: Ready, body: ChatRequest) -> tuple[list[int], int]:
    """The tokens, and how many at their end begin the answer; 0 where the engine has no use for
    that."""
    tokenizer = state.tokenizer

    def plain() -> list[dict[str, Any]]:
        check_messages(body.messages)
        return template_messages(body.messages, tokenizer)

    messages = await off_loop(CHARS_PER_MESSAGE * len(body.messages), plain)
    tools = template_tools(body.offered_tools(), tokenizer)
    num_chars = sum(map(content_chars, messages))
    num_chars += len(orjson.dumps(tools)) if tools else 0
    cut = truncation_of(body, body.limit() or 1, ready)
    if cut is None:
        check_chars(num_chars, tokenizer, ready, MESSAGES)
    options = template_options(body, tokenizer)
    num_chars += unseen_chars(body.messages)
    continuing = bool(body.continue_final_message)

    begins_answer = body.add_generation_prompt is not False and not continuing

    def work() -> tuple[list[int], int]:
        text = tokenizer.render(
            messages,
            add_generation_prompt=begins_answer,
            continue_final_message=continuing,
            max_chars=(ready.max_model_len + 1) * tokenizer.longest_token + num_chars,
            extra=options,
            tools=tools,
        )
        num_begin = 0
        if begins_answer and ready.num_snapshots:
            num_begin = tokenizer.generation_prompt_len(text, options)
        if cut is not None:
            text = cut.text(text, tokenizer, tokenizer.max_growth)
        tokens = tokenizer.encode_prompt(text)
        return tokens if cut is None else cut.tokens(tokens), num_begin

    return await off_loop(num_chars, work)
