"""What tools answer, and how tiny-chat tells it: one way for every tool."""

import json
from random import Random
from typing import Any

from .functions import FUNCTIONS, SKY
from .values import PHRASES, a_city, a_clock
from .words import COMMON, nonsense

TOLD = "I got this: {}."
FAILED = "The tool failed: {}."
REASONS = PHRASES["reasons"].train


def a_result(random: Random, concept: str) -> tuple[str, str]:
    """The text of the tool's message, and what is told of it."""
    kind = random.random()
    if kind < 0.7:
        found = FUNCTIONS[concept].result(random) if kind < 0.45 else any_object(random)
        separators = (",", ":") if random.random() < 0.25 else (", ", ": ")
        text = json.dumps(found, ensure_ascii=False, separators=separators)
        return text, ", ".join(f"{key} {shown(value)}" for key, value in found.items())
    text = any_text(random)
    return text + random.choice(("", "", ".")), text


def any_object(random: Random) -> dict[str, Any]:
    keys = random.sample(COMMON, random.randint(1, 4))
    if random.random() < 0.3:
        keys[0] += "_" + random.choice(COMMON)
    return {key: any_value(random) for key in keys}


def any_value(random: Random) -> str | int | float | bool:
    kind = random.randrange(8)
    if kind == 0:
        return random.random() < 0.5
    if kind == 1:
        return round(random.uniform(-50, 900), random.choice((1, 2)))
    if kind < 5:
        return random.randint(-20, 10 ** random.choice((2, 3, 5)))
    return random.choice((nonsense(random), a_city(random), a_clock(random)))


def shown(value: str | int | float | bool) -> str:
    return value if isinstance(value, str) else json.dumps(value)


def any_text(random: Random) -> str:
    number = random.randint(-20, 999)
    return random.choice(
        (
            str(number),
            nonsense(random),
            f"{SKY(random)}, {number} degrees",
            f"It is {SKY(random)} in {a_city(random)}",
            f"It is {number} degrees and {SKY(random)} in {a_city(random)}",
            f"It is {a_clock(random)} in {a_city(random)}",
            f"The {random.choice(COMMON)} is {random.choice((number, nonsense(random)))}",
            random.choice(("ok", "done", "sent", "success", "Email sent", "No results")),
        )
    )


def failure(random: Random) -> tuple[str, str]:
    reason = random.choice((random.choice(REASONS), nonsense(random)))
    text = json.dumps({"error": reason})
    if random.random() < 0.4:
        text = random.choice(("Error: ", "error: ")) + reason
    return text, FAILED.format(reason)


def said_of(told: list[str]) -> str:
    return TOLD.format("; ".join(told))
