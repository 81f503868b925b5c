"""What stands around an answer that has a form: thoughts before it, and harmony's messages."""

from __future__ import annotations

from typing import Any

from server.constrained.grammar_text import TEXT, GrammarMarks, literal
from server.constrained.response_format import Grammar
from server.errors import UnsupportedParameter
from server.tool_calls.format_types import ReasoningFormat

# Harmony's messages: thoughts and what is told before a call, then a call or the answer.
CHANNEL, MESSAGE, END = "<|channel|>", "<|message|>", "<|end|>"
NEXT = f"{END}<|start|>assistant"
MAX_BROKEN = 3  # beginnings of a mark before the mark itself
GAP = "/\\s{0,4}/"  # between a thought and the answer


def in_final_message(grammar: Grammar, marks: GrammarMarks) -> Grammar:
    """The same as harmony writes it."""
    head = f"{marks.of(CHANNEL)} /final/ {marks.of(MESSAGE)}"
    return _around(grammar, "final", f"start: {head} @final")


def after_reasoning(
    grammar: Grammar, reasoning: ReasoningFormat, marks: GrammarMarks, *, begun: bool
) -> Grammar:
    """The same after reasoning, which the prompt has begun or the answer may begin."""
    if reasoning.name == "harmony":
        thought = marks.after_any("thought", NEXT)
        head = f"{marks.of(CHANNEL)} /analysis/ {marks.of(MESSAGE)}"
        first = "thought " if begun else ""
        lark = f"start: {first}({head} thought)* @answer\n{thought}"
        return _around(grammar, "answer", lark)
    before = f"thought {GAP}"
    if not begun:
        before = f"({marks.of(reasoning.opens[0])} {before})?"
    thought = marks.after_any("thought", reasoning.closes[0])
    return _around(grammar, "answer", f"start: {before} @answer\n{thought}")


def can_limit(reasoning: ReasoningFormat | None, marks: GrammarMarks) -> bool:
    """Whether after_limited_reasoning can limit it."""
    if reasoning is not None and reasoning.name == "harmony":
        return marks.is_token(CHANNEL) and marks.is_token(END)
    return reasoning is not None and len(reasoning.closes) == 1


def after_limited_reasoning(
    grammar: Grammar | None,
    reasoning: ReasoningFormat,
    marks: GrammarMarks,
    budget: int,
    *,
    begun: bool,
) -> Grammar:
    """The same after at most `budget` tokens of reasoning: then comes the mark that ends it.

    grammar  None: any answer
    Raises UnsupportedParameter for reasoning that more than one mark ends.
    """
    if not can_limit(reasoning, marks):
        raise UnsupportedParameter(
            f"`thinking_token_budget` cannot be kept for reasoning in the format {reasoning.name}: "
            "use `max_tokens`, or a lower `reasoning_effort`",
            param="thinking_token_budget",
        )
    if reasoning.name == "harmony":
        return _after_short_message(grammar, marks, budget, begun=begun)
    opens, closes = reasoning.opens[0], reasoning.closes[0]
    more: list[dict[str, str]] = []
    if marks.is_token(closes):
        rules, end = f"thought[max_tokens={budget}]: {TEXT}", marks.of(closes)
    else:
        # A grammar within a grammar may be left a token late, as a word might go on there.
        rules = f"thought[max_tokens={max(0, budget - 1)}]: @inner"
        end = f"/{_partly(closes)}{{0,{MAX_BROKEN}}}{literal(closes)}/"
        more.append({"name": "inner", "lark_grammar": _without(closes)})
    before = f"thought {end} {GAP}"
    if not begun:
        before = f"({GAP} {marks.of(opens)} {before})?"
    answer = grammar or _any_answer(opens, marks)
    whole = _around(answer, "answer", f"start: {before} @answer\n{rules}")
    return Grammar([*whole.grammars, *more], whole.schemas, whole.param, whole.ebnf)


def _after_short_message(
    grammar: Grammar | None, marks: GrammarMarks, budget: int, *, begun: bool
) -> Grammar:
    """The same of harmony: one message of thoughts at most, so that its limit is that of all."""
    thought = f"thought {marks.of(NEXT)}"
    if not begun:
        thought = f"({marks.of(CHANNEL)} /analysis/ {marks.of(MESSAGE)} {thought})?"
    answer = grammar or _any_messages(marks)
    rules, others = as_rule(answer, "answer")
    lark = f"start: {thought} answer\nthought[max_tokens={budget}]: {TEXT}\n{rules}"
    return Grammar([{"lark_grammar": lark}, *others], answer.schemas, answer.param, answer.ebnf)


def as_rule(grammar: Grammar, name: str) -> tuple[str, list[dict[str, Any]]]:
    """A grammar of harmony's messages as a rule of this name with those that it needs, and the
    grammars that they need.

    Where a rule has max_tokens, the library sees no further than a token when it chooses between
    grammars that have names, and all messages begin with the same.
    """
    first, *others = grammar.grammars
    return name + first["lark_grammar"].removeprefix("start"), others


def _any_messages(marks: GrammarMarks) -> Grammar:
    """Any row of harmony's messages but thoughts; a recipient may stand before the channel."""
    lark = "\n".join(
        [
            "start: /( to=[^<]*)?/ message+",
            f"message: {marks.of(CHANNEL)} /\\s*(commentary|final)[^<]*/ more",
            f"more: ({marks.any_token_but(CHANNEL)} {TEXT})*",
        ]
    )
    return Grammar([{"lark_grammar": lark}], param="thinking_token_budget")


def _partly(mark: str) -> str:
    """A beginning of the mark."""
    parts = "|".join(literal(mark[:length]) for length in range(1, len(mark)))
    return f"({parts})"


def _without(mark: str) -> str:
    """A grammar of text in which the mark is not.

    Its first character does not occur in it again, so a beginning of it ends at one that is neither
    the next nor the first.
    """
    first = mark[0]
    plain = f"/{_others(first)}+/"
    broken = "|".join(
        f"{literal(mark[:length])}{_others(mark[length], first)}" for length in range(1, len(mark))
    )
    return f"start: ({plain} | /{_partly(mark)}*({broken})/)*"


def _others(*chars: str) -> str:
    return "[^" + "".join([f"\\x{{{ord(char):x}}}" for char in chars]) + "]"


def _any_answer(opens: str, marks: GrammarMarks) -> Grammar:
    """Any text and special tokens, but no thought."""
    parts = f"start: FIRST more\nFIRST: {TEXT}"
    if not marks.is_token(opens):
        parts += f" & ~/\\s*{literal(opens)}(?s:.*)/"
    others = marks.any_token_but(opens)
    more = f"({others} /(?s:.*)/)*" if others else '""'
    return Grammar([{"lark_grammar": f"{parts}\nmore: {more}"}], param="thinking_token_budget")


def _around(grammar: Grammar, name: str, lark: str) -> Grammar:
    """A grammar of rules in which the given one has a name."""
    first, *others = grammar.grammars
    inner = {**first, "name": name}
    return Grammar(
        [{"lark_grammar": lark}, inner, *others], grammar.schemas, grammar.param, grammar.ebnf
    )
