"""What tests of grammars for tools have in common."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tokenizers import AddedToken, Tokenizer

from runtime.grammar.matchers import TokenizerAdapter
from server.apis.openai.chat_schema import ChatRequest
from server.constrained.grammar_text import Grammar, GrammarLiterals
from server.tool_calls.formats import TOOL_FORMATS
from server.tool_calls.grammar import tool_grammar
from tests.support.parsing.format_cases import format_name
from tests.support.server.fake_engine import write_tokenizer

if TYPE_CHECKING:
    from llguidance import LLMatcher

EOS = "<|last|>"
SPECIAL = [
    *("[TOOL_CALLS]", "[ARGS]", "<|tool_call|>", "</think>", "<|tool_call_begin|>"),
    *("<|tool_call_start|>", "<|tool_call_end|>"),
    *("<|start|>", "<|channel|>", "<|constrain|>", "<|message|>", "<|end|>"),
]
ADDED = ["[/THINK]"]  # that are not special
PARAMETERS = {
    "type": "object",
    "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
    "required": ["city"],
    "additionalProperties": False,
}


def literals_of(tokenizer: Tokenizer) -> GrammarLiterals:
    ids = {word: tokenizer.token_to_id(word) for word in SPECIAL}
    added = tokenizer.get_added_tokens_decoder().items()
    return GrammarLiterals(
        {id: word for word, id in ids.items() if id is not None},
        {id: token.content for id, token in added if not token.special},
    )


def tool(name: str, **more: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, **more}}


def request(**more: Any) -> ChatRequest:
    tools = [tool("weather", parameters=PARAMETERS), tool("now")]
    messages = [{"role": "user", "content": "x"}]
    return ChatRequest.model_validate({"model": "m", "messages": messages, "tools": tools, **more})


def matcher_of(tokenizer: Tokenizer, grammar: Grammar, end: str = EOS) -> LLMatcher:
    """As the engine has it: added tokens that are not special are text."""
    from llguidance import LLMatcher, LLTokenizer, TokenizerWrapper

    adapter = TokenizerAdapter(tokenizer, tokenizer.get_vocab_size(), tokenizer.token_to_id(end))
    library = LLTokenizer(TokenizerWrapper(adapter))
    matcher = LLMatcher(library, json.dumps({"grammars": grammar.grammars}))
    assert not matcher.get_error(), matcher.get_error()
    return matcher


def accepts(
    tokenizer: Tokenizer, grammar: Grammar, text: str, *, whole: bool = True, end: str = EOS
) -> bool:
    """Whether the text may be said; `whole`: and then the answer may end, by the token `end`."""
    matcher = matcher_of(tokenizer, grammar, end)
    tokens = tokenizer.encode(text, add_special_tokens=False).ids
    taken = matcher.try_consume_tokens(tokens)
    return taken == len(tokens) and (not whole or matcher.is_accepting())


def grammar_of(tokenizer: Tokenizer, name: str, requested: Grammar | None = None, **more: Any):
    format = TOOL_FORMATS[format_name(name)]
    template = "" if name == "old mistral" else "[ARGS]"
    return tool_grammar(request(**more), requested, format, template, literals_of(tokenizer))


def tokenizer_with_special(folder: Path) -> Tokenizer:
    """A small one that has SPECIAL and ADDED."""
    tokenizer = Tokenizer.from_file(str(write_tokenizer(folder) / "tokenizer.json"))
    tokenizer.add_special_tokens([AddedToken(word, special=True) for word in (*SPECIAL, EOS)])
    tokenizer.add_tokens([AddedToken(word, special=False) for word in ADDED])
    return tokenizer
