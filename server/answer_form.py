"""The grammar that a request's fields ask for, checked."""

from __future__ import annotations

import orjson

from runtime.messages import Ready
from server.routes.body import off_loop
from server.schema.sampling import SamplingBody
from server.state import ServerState
from server.structured import Grammar, requested


async def answer_grammar(state: ServerState, body: SamplingBody, ready: Ready) -> str:
    """For SamplingParams.grammar: of response_format or structured_outputs, "" if neither asks.

    Raises RequestError for what cannot be enforced, naming the place in the schema.
    """
    grammar = await requested_grammar(state, body)
    return "" if grammar is None else await check_grammar(state, grammar, ready)


async def requested_grammar(state: ServerState, body: SamplingBody) -> Grammar | None:
    """As answer_grammar, but only looked at and not tried, so that more may be put around it."""
    wanted, structured = body.response_format, body.structured_outputs
    schema = None if wanted is None or wanted.json_schema is None else wanted.json_schema.schema_
    if structured is not None:
        schema = structured.model_dump()
    size = 0 if schema is None else len(orjson.dumps(schema))
    return await off_loop(size, lambda: requested(wanted, structured, state.grammar_marks))


async def check_grammar(state: ServerState, grammar: Grammar, ready: Ready) -> str:
    """The text for SamplingParams.grammar.  Raises RequestError if it cannot be used."""
    return await state.grammars.check(grammar, ready.vocab_size, state.tokenizer)
