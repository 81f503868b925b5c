"""One request for texts to be continued, whatever route it came by: prompts, and the engine.

/v1/completions and Ollama's `raw` and `suffix` ask for it; server/generation/chat_request.py is its
like for conversations.
"""

from __future__ import annotations

import msgspec

from runtime.messages import Ready, SamplingParams
from server.apis.openai.completions_answer import CompletionPrompt
from server.apis.openai.completions_schema import CompletionRequest
from server.constrained.request_grammar import answer_grammar
from server.generation.admission import Places
from server.generation.generation import Generation, require_ready
from server.generation.logprobs import check_scores
from server.generation.off_loop import off_loop
from server.generation.sampling_params import (
    Cut,
    check_chars,
    check_token_ids,
    cut_of,
    fit_to_context,
    sampling_params,
)
from server.prompt.fim import prompt_with_gap
from server.prompt.tokenizer import ChatTokenizer
from server.state import ServerState


async def submit_texts(
    state: ServerState,
    body: CompletionRequest,
    salt: bytes,
    route: str,
    places: Places | None = None,
) -> tuple[Generation, list[CompletionPrompt]]:
    """Check a parsed body and submit its prompts, whatever route it came by.

    places  one for each completion; None: they are reserved here
    Raises RequestError for what the caller did wrong, RateLimited if there is no room, Unavailable
    while there is no engine.
    """
    body.check()
    state.check_model(body.model)
    ready = require_ready(state)
    copies = body.copies
    with places or state.admission.reserve(copies * len(body.prompts())) as places:
        prompts = await _prompts(state, ready, body)
        tokens = [prompt.tokens for prompt in prompts]
        for place, prompt in enumerate(tokens):
            path = body.path(place)
            fit_to_context(len(prompt), body.limit(), ready.max_model_len, body.model, path)
        grammar = await answer_grammar(state, body, ready)
        params = _params(state, ready, body, grammar)
        names = ("logprobs", "best_of" if body.best_of else "n")
        check_scores(body, tokens, params, copies=copies, names=names)
        return Generation(state, route, body, tokens, params, salt, places, copies=copies), prompts


async def _prompts(
    state: ServerState, ready: Ready, body: CompletionRequest
) -> list[CompletionPrompt]:
    tokenizer = state.tokenizer
    cut = cut_of(body, body.limit(), ready)
    given = body.prompts()
    num_chars = 0
    for place, prompt in enumerate(given):
        size = len(prompt)
        if isinstance(prompt, str):
            size += len(body.suffix or "")
            if cut is None:
                check_chars(size, tokenizer, ready, body.path(place))
        num_chars += size

    def work() -> list[CompletionPrompt]:
        for place, prompt in enumerate(given):
            if not isinstance(prompt, str):
                check_token_ids(prompt, ready.vocab_size, body.path(place))
        return [_prompt(tokenizer, body, prompt, cut) for prompt in given]

    return await off_loop(num_chars, work)


def _prompt(
    tokenizer: ChatTokenizer, body: CompletionRequest, given: str | list[int], cut: Cut | None
) -> CompletionPrompt:
    """cut: what is left of it; None for all."""
    if isinstance(given, str):
        text = given if cut is None else cut.text(given, tokenizer)
        if body.suffix:
            text = prompt_with_gap(text, body.suffix, tokenizer, body.model)
        special = body.add_special_tokens is not False
        tokens = tokenizer.encode(text, add_special_tokens=special)
    else:
        text, tokens = "", given
    shorter = cut is not None and len(tokens) > cut.kept
    if cut is not None:
        tokens = cut.tokens(tokens)
    if body.echo and (shorter or not isinstance(given, str)):
        text = tokenizer.decode(tokens, skip_special=False)
    return CompletionPrompt(text, tokens)


def _params(
    state: ServerState, ready: Ready, body: CompletionRequest, grammar: str
) -> SamplingParams:
    prompt_scores = body.prompt_logprobs
    if prompt_scores is None and body.echo and body.logprobs is not None:
        prompt_scores = body.logprobs
    params = sampling_params(
        body,
        state.tokenizer,
        ready,
        # The engine makes at least one token; for max_tokens 0 it is thrown away.
        max_tokens=max(1, body.limit()),
        logprobs=body.logprobs,
        prompt_logprobs=prompt_scores,
    )
    if body.logprobs is None and body.copies > (body.n or 1):
        params = msgspec.structs.replace(params, logprobs=0)  # they tell which is best
    return msgspec.structs.replace(params, grammar=grammar)
