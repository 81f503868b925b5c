"""Conversations beyond plain text: with tools, with JSON to write, with thinking turned on."""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from random import Random
from typing import Any

from .data import HELD_SYSTEM_PROMPTS, SYSTEM_PROMPTS, ChatMessage, messages_of, talk
from .forms import form
from .functions import FUNCTIONS, JsonValue
from .phrases import dress, read_sections
from .reasoning import KNOWN, beyond, puzzle
from .skills import SKILLS, UNKNOWN, Context, Turn, half_phrased
from .tool_results import a_result, failure, said_of
from .toolbox import Offer, a_value, arguments_of, offer

REQUESTS = read_sections("requests.txt")
SLOT = re.compile(r"\{(\w+)\}")
NO_TOOL = "I have no tool for that."
CALLING = "I call {}."
NO_NEED, NO_FIT, FOUND = "No tool is needed.", "No tool fits.", "The result is there."
CITIES = ("weather", "time")  # also asked about two cities, and again about another one
# Questions out of scope that may sound like a request of a tool.
TOOL_LIKE = re.compile(
    r"\d|weather|time|mail|letter|remind|play|sing|translat|stock|price|convert|light|lamp|book|say"
    r"|flight|fly|search|find|google|look|order|call|send|turn|rain|cold|warm|web|online|internet"
    r"|many|much|add|put|list|cost|hour|clock|open|show|buy| in (french|german|spanish|latin)",
    re.IGNORECASE,
)
PLAIN = ("small talk", "facts", "capital", "repeat", "name", "sum", "unknown", "unknown")


@dataclass(frozen=True)
class Dialog:
    """Messages as the chat template takes them; the last is the assistant's, to be predicted.

    tools       as in a request
    thinking    it is turned on, and `thought` comes before the last answer
    keys_given  the answer's JSON keys come from a grammar, only the values from the model
    """

    messages: list[ChatMessage]
    tools: list[JsonValue] = field(default_factory=list[JsonValue])
    thinking: bool = False
    reasoning: str = ""
    keys_given: bool = False


def call_message(calls: Sequence[tuple[str, JsonValue]]) -> ChatMessage:
    functions = [{"name": name, "arguments": arguments} for name, arguments in calls]
    made = [{"type": "function", "function": function} for function in functions]
    return {"role": "assistant", "content": "", "tool_calls": made}


def said(text: str) -> ChatMessage:
    return {"role": "assistant", "content": text}


def asked(text: str) -> ChatMessage:
    return {"role": "user", "content": text}


@dataclass(frozen=True)
class ToolRequest:
    """What a user wants of a tool."""

    question: str
    concept: str
    values: list[dict[str, Any]]  # of each call, by slot
    slots: tuple[str, ...]


def request(random: Random, concept: str, held: bool, *, after: bool = False) -> ToolRequest:
    """A worded request; with `after` one for another city."""
    section = "next city" if after else concept
    template = half_phrased(random, REQUESTS[section], held)
    slots = tuple(SLOT.findall(template))
    values = {slot: a_value(random, concept, slot, held) for slot in slots}
    for first, second in (("from", "to"), ("city", "city2")):
        while second in values and values[first] == values[second]:
            values[second] = a_value(random, concept, second, held)
    shown = {slot: str(value) for slot, value in values.items()}
    all_values = [values]
    if concept in CITIES and "city" in values and not after and random.random() < 0.2:
        other = a_value(random, concept, "city", held)
        if other != values["city"]:
            all_values.append({**values, "city": other})
            shown["city"] += random.choice((" and ", " and in ", " and ")) + other
    return ToolRequest(dress(random, template, shown, keep=True), concept, all_values, slots)


def offers_of(
    random: Random, concepts: Sequence[str], held: bool, slots: dict[str, tuple[str, ...]]
) -> list[Offer]:
    """These functions under different names, shuffled; those with `slots` on the split's side."""
    while True:
        offers = [
            offer(random, each, held and each in slots, slots.get(each, ())) for each in concepts
        ]
        if len({each.name for each in offers}) == len(offers):
            random.shuffle(offers)
            return offers


def num_others(random: Random) -> int:
    if random.random() < 0.04:
        return random.randint(5, 10)
    return random.choice((0, 0, 1, 1, 1, 2, 2, 3))


def plain_turn(random: Random, held: bool, concepts: Sequence[str], name: str) -> Turn:
    """A question that needs no tool, and that none of these seems to be for."""
    while True:
        skill = random.choice(PLAIN)
        if skill == "sum" and "calculate" in concepts:
            continue
        turn = SKILLS[skill](random, held, Context(name=name))
        tempting = turn.skill in ("unknown", "facts") and TOOL_LIKE.search(turn.question)
        if not tempting and (turn.skill != "name" or turn.name == name or not name):
            return turn


def prefix(random: Random, concepts: Sequence[str]) -> tuple[list[ChatMessage], str]:
    """System prompt and earlier turns; the user's name if it was told."""
    system = random.choice(SYSTEM_PROMPTS) if random.random() < 0.4 else None
    turns: list[Turn] = []
    if random.random() < 0.2:
        turns = [plain_turn(random, False, concepts, "")]
    name = next((turn.name for turn in turns if turn.name), "")
    return messages_of(turns, system), name


def calls_of(
    requests: Sequence[ToolRequest], offers: Sequence[Offer]
) -> list[tuple[str, JsonValue]]:
    by_concept = {each.concept: each for each in offers}
    return [
        (by_concept[each.concept].name, arguments_of(by_concept[each.concept], values))
        for each in requests
        for values in each.values
    ]


def requests_of(random: Random, held: bool) -> list[ToolRequest]:
    """One request, or now and then two in one sentence."""
    concepts = random.sample(list(FUNCTIONS), 2)
    first = request(random, concepts[0], held)
    if random.random() > 0.1:
        return [first]
    second = request(random, concepts[1], held)
    joint = random.choice((" and ", ", and ", ". Also ", ", then "))
    question = first.question.rstrip(" .?!") + joint + second.question
    return [ToolRequest(question, first.concept, first.values, first.slots), second]


def tool_dialog(random: Random, held: bool, end: str) -> Dialog:
    """end: "call", "result" or "more", the answer after a result, and another turn after that."""
    requests = requests_of(random, held)
    slots = {each.concept: each.slots for each in requests}
    others = [each for each in FUNCTIONS if each not in slots]
    concepts = [*slots, *random.sample(others, num_others(random))]
    offers = offers_of(random, concepts, held, slots)
    calls = calls_of(requests, offers)
    messages, name = prefix(random, concepts)
    messages += [asked(requests[0].question), call_message(calls)]
    tools = [{"type": "function", "function": each.schema} for each in offers]
    thinking = random.random() < 0.15
    reasoning = CALLING.format(" and ".join(dict.fromkeys(name for name, _ in calls)))
    if end != "call":
        messages += results(random, requests)
        reasoning = FOUND
    if end == "more":
        concept = requests[0].concept
        if concept in CITIES and len(requests) == 1 and random.random() < 0.5:
            again = request(random, concept, held, after=True)
            again_calls = calls_of([again], offers)
            messages += [asked(again.question), call_message(again_calls)]
            reasoning = CALLING.format(again_calls[0][0])
        else:
            turn = plain_turn(random, held, concepts, name)
            messages += [asked(turn.question), said(turn.answer)]
            reasoning = NO_NEED
    return Dialog(messages, tools, thinking, reasoning if thinking else "")


def results(random: Random, requests: Sequence[ToolRequest]) -> list[ChatMessage]:
    """What the tools answer, and what is said about it."""
    concepts = [each.concept for each in requests for _ in each.values]
    if len(concepts) == 1 and random.random() < 0.08:
        text, answer = failure(random)
        return [{"role": "tool", "content": text}, said(answer)]
    pairs = [a_result(random, concept) for concept in concepts]
    answer = said_of([told for _, told in pairs])
    return [*({"role": "tool", "content": text} for text, _ in pairs), said(answer)]


def no_tool_dialog(random: Random, held: bool) -> Dialog:
    """Tools are offered, but the question needs none of them, or one that is not there."""
    all_concepts = list(FUNCTIONS)
    random.shuffle(all_concepts)
    concepts = all_concepts[: 1 + num_others(random)]
    messages, name = prefix(random, concepts)
    if random.random() < 0.4:
        concept = random.choice([c for c in all_concepts if c not in (*concepts, "calculate")])
        wanted = request(random, concept, held)
        messages += [asked(wanted.question), said(NO_TOOL)]
        reasoning = NO_FIT
    else:
        turn = plain_turn(random, held, concepts, name)
        messages += [asked(turn.question), said(turn.answer)]
        reasoning = NO_NEED
    slots: dict[str, tuple[str, ...]] = {each: () for each in concepts}
    offers = offers_of(random, concepts, held and random.random() < 0.5, slots)
    tools = [{"type": "function", "function": each.schema} for each in offers]
    thinking = random.random() < 0.15
    return Dialog(messages, tools, thinking, reasoning if thinking else "")


def toolless_dialog(random: Random) -> Dialog:
    """A request of a tool where none is offered."""
    concept = random.choice([each for each in FUNCTIONS if each != "calculate"])
    messages, _ = prefix(random, (concept,))
    messages += [asked(request(random, concept, False).question), said(UNKNOWN)]
    return Dialog(messages)


def json_dialog(random: Random, held: bool, *, keys_given: bool = False) -> Dialog:
    system, question, answer = form(random, held, keys_named=not keys_given)
    messages = [{"role": "system", "content": system}] if system is not None else []
    messages += [asked(question), said(answer)]
    if keys_given:
        return Dialog(messages, keys_given=True)
    thinking = random.random() < 0.05
    return Dialog(messages, [], thinking, KNOWN if thinking else "")


def reasoning_dialog(random: Random, held: bool, *, puzzles: bool = False) -> Dialog:
    """Something to work out, or (unless `puzzles`) now and then what needs no steps."""
    prompts = HELD_SYSTEM_PROMPTS if held else SYSTEM_PROMPTS
    system = random.choice(prompts) if random.random() < 0.4 else None
    kind = 0.0 if puzzles else random.random()
    if kind < 0.7:
        asks = puzzle(random, held)
        before = plain_before(random) if random.random() < 0.1 else []
        messages = messages_of(before, system)
        return Dialog(
            [*messages, asked(asks.question), said(asks.answer)], [], True, asks.reasoning
        )
    if kind < 0.76:
        asks = beyond(random, held)
        messages = messages_of([], system)
        return Dialog(
            [*messages, asked(asks.question), said(asks.answer)], [], True, asks.reasoning
        )
    skills = random.choices(
        [skill for skill in SKILLS if skill != "unknown"], k=random.randint(1, 2)
    )
    turns = talk(random, skills, held)
    reasoning = turns[-1].answer.rstrip(".") if skills[-1] == "sum" else KNOWN
    return Dialog(messages_of(turns, system), [], True, reasoning)


def plain_before(random: Random) -> list[Turn]:
    return talk(random, [random.choice(("small talk", "facts", "capital", "name"))])


# Held-out questions of each kind; training draws from the same makers, on the other side.
KINDS: dict[str, Callable[[Random, bool], Dialog]] = {
    "tool call": lambda random, held: tool_dialog(random, held, "call"),
    "tool result": lambda random, held: tool_dialog(random, held, "result"),
    "tool turns": lambda random, held: tool_dialog(random, held, "more"),
    "no tool": no_tool_dialog,
    "JSON": json_dialog,
    "thinking": lambda random, held: reasoning_dialog(random, held, puzzles=True),
}
SHARES = {  # of a training example's being one of these; the rest is plain conversations
    "tool call": 0.12,
    "tool result": 0.02,
    "tool turns": 0.05,
    "no tool": 0.07,
    "JSON": 0.09,
    "thinking": 0.12,
    "toolless": 0.01,
    "JSON values": 0.02,
}


def dialog(random: Random, kind: str) -> Dialog:
    """A training example of a kind in SHARES."""
    if kind == "toolless":
        return toolless_dialog(random)
    if kind == "thinking":
        return reasoning_dialog(random, False)
    if kind == "JSON values":
        return json_dialog(random, False, keys_given=True)
    return KINDS[kind](random, False)


def held_dialogs(kind: str, count: int, seed: int = 1) -> list[Dialog]:
    random = Random(f"{kind} {seed}")
    return [KINDS[kind](random, True) for _ in range(count)]
