"""One text completion request of any route: its prompts and their submission.

Used by /v1/completions and by Ollama's `raw` and `suffix`; for chats see
server/generation/chat_request.py.
"""

from __future__ import annotations

from dataclasses import dataclass

from runtime.messages import Ready, SamplingParams
from server.apis.openai.completions_schema import CompletionRequest, Prompts
from server.constrained.request_grammar import answer_grammar
from server.generation.admission import AdmissionSlots
from server.generation.generation import Generation, require_ready
from server.generation.logprobs import check_scores
from server.generation.off_loop import off_loop
from server.generation.sampling_params import (
    Truncation,
    check_chars,
    check_token_ids,
    fit_to_context,
    sampling_params,
    truncation_of,
)
from server.prompt.fim import prompt_with_gap
from server.prompt.tokenizer import ChatTokenizer
from server.state import ServerState


@dataclass(frozen=True)
class CompletionPrompt:
    text: str  # what `echo` returns
    tokens: list[int]


async def submit_texts(
    state: ServerState,
    body: CompletionRequest,
    salt: bytes,
    route: str,
    slots: AdmissionSlots | None = None,
) -> tuple[Generation, list[CompletionPrompt]]:
    """Check a parsed body and submit its prompts.

    slots  one for each completion; None: they are reserved here
    Raises RequestError for an invalid request, RateLimited if the server is full, Unavailable
    while the engine is not ready.
    """
    body.check()
    state.check_model(body.model)
    ready = require_ready(state)
    copies, inputs = body.copies, body.prompts()
    with slots or state.admission.reserve(copies * len(inputs)) as slots:
        prompts = await _prompts(state, ready, body, inputs)
        tokens = [prompt.tokens for prompt in prompts]
        for path, prompt in zip(inputs, tokens, strict=True):
            fit_to_context(len(prompt), body.limit(), ready.max_model_len, path)
        grammar = await answer_grammar(state, body, ready)
        params = _params(state, ready, body, grammar)
        names = ("logprobs", "best_of" if body.best_of else "n")
        check_scores(body, tokens, params, copies=copies, names=names)
        generation = Generation(
            state,
            route,
            body,
            tokens,
            params,
            salt,
            slots,
            copies=copies,
            operation="text_completion",
        )
        return generation, prompts


async def _prompts(
    state: ServerState, ready: Ready, body: CompletionRequest, inputs: Prompts
) -> list[CompletionPrompt]:
    """inputs: texts or token ids by the paths of their fields"""
    tokenizer = state.tokenizer
    cut = truncation_of(body, body.limit(), ready)
    num_chars = 0
    for path, prompt in inputs.items():
        size = len(prompt)
        if isinstance(prompt, str):
            size += len(body.suffix or "")
            if cut is None:
                check_chars(size, tokenizer, ready, path)
        num_chars += size

    def work() -> list[CompletionPrompt]:
        for path, prompt in inputs.items():
            if not isinstance(prompt, str):
                check_token_ids(prompt, ready.vocab_size, path)
        return [_prompt(tokenizer, body, prompt, cut) for prompt in inputs.values()]

    return await off_loop(num_chars, work)


def _prompt(
    tokenizer: ChatTokenizer,
    body: CompletionRequest,
    prompt: str | list[int],
    cut: Truncation | None,
) -> CompletionPrompt:
    if isinstance(prompt, str):
        text = prompt if cut is None else cut.text(prompt, tokenizer)
        if body.suffix:
            text = prompt_with_gap(text, body.suffix, tokenizer, body.model)
        special = body.add_special_tokens is not False
        tokens = tokenizer.encode(text, add_special_tokens=special)
    else:
        text, tokens = "", prompt
    shorter = cut is not None and len(tokens) > cut.max_tokens
    if cut is not None:
        tokens = cut.tokens(tokens)
    if body.echo and (shorter or not isinstance(prompt, str)):
        text = tokenizer.decode(tokens, skip_special=False)
    return CompletionPrompt(text, tokens)


def _params(
    state: ServerState, ready: Ready, body: CompletionRequest, grammar: str
) -> SamplingParams:
    prompt_scores = body.prompt_logprobs
    if prompt_scores is None and body.echo and body.logprobs is not None:
        prompt_scores = body.logprobs
    logprobs = body.logprobs
    if logprobs is None and body.copies > (body.n or 1):
        logprobs = 0  # needed to choose the best
    return sampling_params(
        body,
        state.tokenizer,
        ready,
        # The engine generates at least one token; for max_tokens 0 it is dropped.
        max_tokens=max(1, body.limit()),
        logprobs=logprobs,
        prompt_logprobs=prompt_scores,
        grammar=grammar,
    )
