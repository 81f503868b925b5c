"""A text that goes to the model as it is: `raw`, and `suffix`, which has a gap in it."""

from __future__ import annotations

from typing import Any

from server.apis.ollama.schema import OllamaGenerateBody
from server.apis.openai.completions_schema import CompletionRequest
from server.generation.generation import require_ready
from server.generation.off_loop import off_loop
from server.generation.sampling_params import check_chars, fit_to_context
from server.http.validation import parse
from server.prompt.fim import prompt_with_gap
from server.state import ServerState


async def text_of(state: ServerState, body: OllamaGenerateBody) -> CompletionRequest:
    """Raises RequestError if the model cannot fill a gap, or if the text is too long."""
    ready = require_ready(state)
    tokenizer = state.tokenizer
    text = body.prompt or ""
    if body.suffix:
        text = prompt_with_gap(text, body.suffix, tokenizer, body.model)
    check_chars(len(text), tokenizer, ready, "prompt")
    tokens = await off_loop(len(text), lambda: tokenizer.encode(text))
    fields: dict[str, Any] = body.sampling()
    # Unlike OpenAI's completions, an answer may fill the context, and ends where that does.
    room = fit_to_context(len(tokens), None, ready.max_model_len, body.model, "prompt")
    fields["max_tokens"] = min(fields.get("max_tokens") or room, room)
    fields["logprobs"] = body.top_logprobs or 0 if body.logprobs else None
    return parse(CompletionRequest, fields | {"prompt": tokens})
