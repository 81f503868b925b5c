"""What the arguments of tools and the fields of forms are filled with."""

import string
from collections.abc import Callable
from random import Random
from typing import Any

from .phrases import read_sections
from .words import CAPITALS, COMMON, ENTITIES, FUNCTION_WORDS, any_name, pseudo_word

Make = Callable[[Random], Any]
PHRASES = read_sections("values.txt")
# "play in by Leo" could be read in two ways.
LITTLE = {*FUNCTION_WORDS, *PHRASES["little words"].train}
CONTENT = [word for word in COMMON if word not in LITTLE]


def a_city(random: Random) -> str:
    kind = random.random()
    if kind < 0.5:
        return random.choice(list(CAPITALS.values()))
    if kind < 0.7:
        return random.choice([place for place in ENTITIES["place"].train if place[0].isupper()])
    return pseudo_word(random).capitalize()


def an_address(random: Random) -> str:
    name = any_name(random).lower()
    host = random.choice(("example", "mail", "post", pseudo_word(random)))
    return f"{name}@{host}.{random.choice(('com', 'org', 'net', 'de', 'io'))}"


def some_words(least: int, most: int) -> Make:
    def make(random: Random) -> str:
        pools = (CONTENT, CONTENT, CONTENT, [pseudo_word(random)])
        count = random.randint(least, most)
        return " ".join(random.choice(random.choice(pools)) for _ in range(count))

    return make


SENTENCES, TASKS, VERBS = (PHRASES[name].train for name in ("sentences", "tasks", "verbs"))


def a_message(random: Random) -> str:
    if random.random() < 0.5:
        return random.choice(SENTENCES)
    return f"the {some_words(1, 2)(random)} is {some_words(1, 1)(random)}"


def a_task(random: Random) -> str:
    if random.random() < 0.5:
        return random.choice(TASKS)
    return f"{random.choice(VERBS)} the {some_words(1, 2)(random)}"


def an_expression(random: Random) -> str:
    a, b, c = (random.randint(2, random.choice((20, 99, 999))) for _ in range(3))
    first, second = random.choice("+-*/"), random.choice("+-*")
    if random.random() < 0.25:
        return f"({a} {first} {b}) {second} {c}"
    return f"{a} {first} {b} {second} {c}" if random.random() < 0.35 else f"{a} {first} {b}"


def a_clock(random: Random) -> str:
    if random.random() < 0.3:
        return f"{random.randint(1, 12)} {random.choice(('am', 'pm'))}"
    return f"{random.randint(0, 23)}:{random.choice((0, 15, 30, 45, random.randint(0, 59))):02}"


def an_id(random: Random) -> str:
    letters = "".join(random.choices(string.ascii_uppercase, k=random.choice((0, 1, 2))))
    return letters + str(random.randint(100, 99999))


def one_of(values: str) -> Make:
    words = values.split(",")
    return lambda random: random.choice(words)


def number(low: int, high: int) -> Make:
    return lambda random: random.randint(low, high)


def symbol(random: Random) -> str:
    return "".join(random.choices(string.ascii_uppercase, k=random.randint(2, 5)))
