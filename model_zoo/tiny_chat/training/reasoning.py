"""Questions that take steps, for thinking turned on: the steps are thought, the answer is said."""

import re
from dataclasses import dataclass
from random import Random

from .phrases import dress, read_sections
from .skills import UNKNOWN, Context, ask_unknown, half_phrased, other_numbers, retry
from .words import any_name

PUZZLES = read_sections("puzzles.txt")
THINGS = ("apples", "stars", "books", "coins", "cards", "stones", "pens", "eggs", "cups", "keys")
KINDS = ("three", "mixed", "minus", "times", "larger", "smaller", "compare")
TOO_HARD = re.compile(
    r"/|divi|%|percent|squar|root|prime|mod|power|\^|average|ratio", re.IGNORECASE
)
# What is thought where nothing has to be worked out.
KNOWN, NOT_KNOWN = "I can answer this right away.", "I do not know this."


@dataclass(frozen=True)
class Puzzle:
    question: str
    reasoning: str
    answer: str


def numbers_of(random: Random, kind: str) -> list[int]:
    """a, b and c; every value on the way is from 0 to 198."""
    if kind == "times":
        return [random.randint(2, 5), random.randint(2, 30), 0]
    if kind == "minus":
        return [*sorted((random.randint(1, 99), random.randint(1, 99)), reverse=True), 0]
    if kind in ("larger", "smaller"):
        top = random.choice((20, 100, 200, 1000))
        return [*random.sample(range(1, top), 2), 0]
    a, b = random.randint(2, 70), random.randint(2, 70)
    if kind == "mixed":
        return [a, b, random.randint(1, a + b)]
    if kind == "three":
        return [a, b, random.randint(2, 58)]
    near = random.choice((random.randint(5, 150), a + b + random.randint(-9, 9)))
    return [a, b, max(near, 1)]


def steps(kind: str, a: int, b: int, c: int) -> tuple[str, str]:
    """The thought and the answer."""
    if kind in ("larger", "smaller"):
        first, last = (max, min) if kind == "larger" else (min, max)
        sign = ">" if kind == "larger" else "<"
        return f"{first(a, b)} {sign} {last(a, b)}", f"{first(a, b)} is {kind}."
    if kind == "minus":
        return f"{a} - {b} = {a - b}", f"The answer is {a - b}."
    if kind == "times":
        lines = [f"{b * n} + {b} = {b * n + b}" for n in range(1, a)]
        return "\n".join(lines), f"The answer is {a * b}."
    first = f"{a} + {b} = {a + b}"
    if kind == "compare":
        sign = ">" if a + b > c else "=" if a + b == c else "<"
        said = "Yes" if a + b > c else "No"
        word = {">": "more than", "=": "as much as", "<": "less than"}[sign]
        return f"{first}\n{a + b} {sign} {c}", f"{said}, {a + b} is {word} {c}."
    sign, total = ("+", a + b + c) if kind == "three" else ("-", a + b - c)
    return f"{first}\n{a + b} {sign} {c} = {total}", f"The answer is {total}."


def puzzle(random: Random, held: bool) -> Puzzle:
    """One question; whether its numbers are held out is decided by `is_held`."""
    kind = random.choice(KINDS)
    key = retry(lambda: f"{kind} {' '.join(map(str, numbers_of(random, kind)))}", held)
    a, b, c = map(int, key.split()[1:])
    values = {"a": str(a), "b": str(b), "c": str(c)}
    values |= {"things": random.choice(THINGS), "name": any_name(random)}
    template = half_phrased(random, PUZZLES[kind], held)
    return Puzzle(dress(random, template, values, keep=True), *steps(kind, a, b, c))


def beyond(random: Random, held: bool) -> Puzzle:
    """A question that stays unknown, whether it is thought about or not."""
    while True:
        question = ask_unknown(random, held, Context()).question
        if random.random() < 0.4:
            question = other_numbers(random, held)
        if TOO_HARD.search(question) or not any(char.isdigit() for char in question):
            return Puzzle(question, NOT_KNOWN, UNKNOWN)
