"""What stands around an answer that a grammar constrains: reasoning, and harmony's messages."""

from __future__ import annotations

from typing import Any

from msgspec.structs import replace

from server.constrained.grammar_text import TEXT, Grammar, GrammarLiterals, literal
from server.errors import UnsupportedParameter
from server.tool_calls.format_types import ReasoningFormat

# Harmony's messages: reasoning and text before a call, then a call or the answer.
CHANNEL, MESSAGE, END = "<|channel|>", "<|message|>", "<|end|>"
NEXT = f"{END}<|start|>assistant"
MAX_BROKEN = 3  # beginnings of the delimiter before the delimiter itself
GAP = "/\\s{0,4}/"  # between the reasoning and the answer


def in_final_message(grammar: Grammar, literals: GrammarLiterals) -> Grammar:
    """The grammar for an answer in harmony's final message."""
    return _around(grammar, "final", f"start: {_head('final', literals)} @final")


def _head(channel: str, literals: GrammarLiterals) -> str:
    return f"{literals.of(CHANNEL)} /{channel}/ {literals.of(MESSAGE)}"


def after_reasoning(
    grammar: Grammar, reasoning: ReasoningFormat, literals: GrammarLiterals, *, begun: bool
) -> Grammar:
    """The grammar for an answer after reasoning, which the prompt has begun or the answer may."""
    if reasoning.name == "harmony":
        reasoning_text = literals.after("reasoning_text", NEXT)
        head = _head("analysis", literals)
        first = "reasoning_text " if begun else ""
        lark = f"start: {first}({head} reasoning_text)* @answer\n{reasoning_text}"
        return _around(grammar, "answer", lark)
    before = f"reasoning_text {GAP}"
    if not begun:
        before = f"({literals.of(reasoning.opens[0])} {before})?"
    reasoning_text = literals.after("reasoning_text", reasoning.closes[0])
    return _around(grammar, "answer", f"start: {before} @answer\n{reasoning_text}")


def can_limit(reasoning: ReasoningFormat | None, literals: GrammarLiterals) -> bool:
    """Whether after_limited_reasoning can limit it."""
    if reasoning is not None and reasoning.name == "harmony":
        return literals.is_token(CHANNEL) and literals.is_token(END)
    return reasoning is not None and len(reasoning.closes) == 1


def after_limited_reasoning(
    grammar: Grammar | None,
    reasoning: ReasoningFormat,
    literals: GrammarLiterals,
    budget: int,
    *,
    begun: bool,
) -> Grammar:
    """The grammar for an answer after at most `budget` tokens of reasoning and its end delimiter.

    grammar  None: any answer
    Raises UnsupportedParameter for reasoning that has more than one end delimiter.
    """
    if not can_limit(reasoning, literals):
        raise UnsupportedParameter(
            "{thinking_token_budget} cannot be kept for reasoning in the format {}: use "
            "{max_tokens}, or a lower {reasoning_effort}",
            reasoning.name,
        )
    if reasoning.name == "harmony":
        return _after_short_message(grammar, literals, budget, begun=begun)
    opens, closes = reasoning.opens[0], reasoning.closes[0]
    more: list[dict[str, str]] = []
    if literals.is_token(closes):
        rules, end = f"reasoning_text[max_tokens={budget}]: {TEXT}", literals.of(closes)
    elif token := literals.added_token(closes):
        rules = f"reasoning_text[max_tokens={budget}]: REASONING\n"
        rules += f"REASONING: {TEXT} & ~/(?s:.*){literal(closes)}(?s:.*)/"
        end = token
    else:
        # A grammar within a grammar may end a token late, as a word might go on there.
        rules = f"reasoning_text[max_tokens={max(0, budget - 1)}]: @inner"
        end = f"/{_partly(closes)}{{0,{MAX_BROKEN}}}{literal(closes)}/"
        more.append({"name": "inner", "lark_grammar": _without(closes)})
    before = f"reasoning_text {end} {GAP}"
    if not begun:
        before = f"({GAP} {literals.of(opens)} {before})?"
    answer = grammar or _any_answer(opens, literals)
    whole = _around(answer, "answer", f"start: {before} @answer\n{rules}")
    return replace(whole, grammars=[*whole.grammars, *more])


def _after_short_message(
    grammar: Grammar | None, literals: GrammarLiterals, budget: int, *, begun: bool
) -> Grammar:
    """For harmony: one message of reasoning at most, so that its limit is that of all."""
    reasoning_text = f"reasoning_text {literals.of(NEXT)}"
    if not begun:
        reasoning_text = f"({_head('analysis', literals)} {reasoning_text})?"
    answer = grammar or _any_messages(literals)
    rules, others = as_rule(answer, "answer")
    lark = f"start: {reasoning_text} answer\nreasoning_text[max_tokens={budget}]: {TEXT}\n{rules}"
    return replace(answer, grammars=[{"lark_grammar": lark}, *others])


def as_rule(grammar: Grammar, name: str) -> tuple[str, list[dict[str, Any]]]:
    """A grammar of harmony's messages as a rule of this name with those that it needs, and the
    grammars that they need.

    Where a rule has max_tokens, the library sees no further than a token when it chooses between
    grammars that have names, and all messages begin with the same.
    """
    first, *others = grammar.grammars
    return name + first["lark_grammar"].removeprefix("start"), others


def _any_messages(literals: GrammarLiterals) -> Grammar:
    """Any of harmony's messages but reasoning; a recipient may stand before the channel."""
    lark = "\n".join(
        [
            "start: /( to=[^<]*)?/ message+",
            f"message: {literals.of(CHANNEL)} /\\s*(commentary|final)[^<]*/ more",
            f"more: ({literals.any_token_but(CHANNEL)} {TEXT})*",
        ]
    )
    return Grammar([{"lark_grammar": lark}], param=("thinking_token_budget",))


def _partly(end: str) -> str:
    """A beginning of the end delimiter."""
    return "(" + "|".join(literal(end[:length]) for length in range(1, len(end))) + ")"


def _without(end: str) -> str:
    """A grammar of text without the end delimiter.

    Its first character does not occur in it again, so a beginning of it ends at one that is neither
    the next nor the first.
    """
    first = end[0]
    plain = f"/{_others(first)}+/"
    broken = "|".join(
        f"{literal(end[:length])}{_others(end[length], first)}" for length in range(1, len(end))
    )
    return f"start: ({plain} | /{_partly(end)}*({broken})/)*"


def _others(*chars: str) -> str:
    return "[^" + "".join([f"\\x{{{ord(char):x}}}" for char in chars]) + "]"


def _any_answer(opens: str, literals: GrammarLiterals) -> Grammar:
    """Any text and special tokens, but no reasoning."""
    lark = f"start: FIRST more\nFIRST: {TEXT}"
    if not literals.is_token(opens):
        lark += f" & ~/\\s*{literal(opens)}(?s:.*)/"
    others = literals.any_token_but(opens)
    more = f"({others} /(?s:.*)/)*" if others else '""'
    return Grammar([{"lark_grammar": f"{lark}\nmore: {more}"}], param=("thinking_token_budget",))


def _around(grammar: Grammar, name: str, lark: str) -> Grammar:
    """A grammar of the rules of `lark`, in which `grammar` has this name."""
    first, *others = grammar.grammars
    return replace(grammar, grammars=[{"lark_grammar": lark}, {**first, "name": name}, *others])
