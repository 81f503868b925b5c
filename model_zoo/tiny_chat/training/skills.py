"""One function a skill: a question, worded at random, and the only right answer.

The split: `held` asks for what training never sees. For sums, ranges, words and names that is
decided by `is_held` (about one in five); for facts, small talk and capitals it is the wording; for
"I don't know that." it is wording and subject.
"""

import zlib
from collections.abc import Callable
from dataclasses import dataclass
from random import Random

from .phrases import Phrasings, dress, expand, loosen
from .words import (
    CAPITALS,
    COMMON,
    ENTITIES,
    FACTS,
    FUNCTION_WORDS,
    OTHER_COUNTRIES,
    PHRASINGS,
    SMALL_TALK,
    UNKNOWN_QUESTIONS,
    WORDS,
    any_name,
    any_word,
    nonsense,
    pseudo_word,
    strange_word,
)

UNKNOWN = "I don't know that."
NO_NAME = "You have not told me your name."


@dataclass(frozen=True)
class Context:
    """What a question may refer to: the skill asked last, and the user's name if it was told."""

    last: str = ""
    name: str = ""


@dataclass(frozen=True)
class Turn:
    skill: str
    question: str
    answer: str
    name: str = ""


def is_held(key: str) -> bool:
    """Whether a sum, range, word or name belongs to the held-out fifth."""
    return zlib.crc32(key.encode()) % 5 == 0


def retry(make: Callable[[], str], held: bool) -> str:
    """The first of `make`'s values on the wanted side of the split."""
    while is_held(value := make()) != held:
        pass
    return value


def phrased(random: Random, phrasings: Phrasings, held: bool) -> str:
    """One phrasing; in training its little words sometimes come and go."""
    template = phrasings.pick(random, held)
    if not held and random.random() < 0.25:
        template = loosen(random, template, WORDS["droppable"], WORDS["filler"], FUNCTION_WORDS)
    return template


def half_phrased(random: Random, phrasings: Phrasings, held: bool) -> str:
    """As phrased; of held-out questions, one half has its phrasing from training."""
    if held and random.random() < 0.5:
        return phrasings.pick(random, False)
    return phrased(random, phrasings, held)


def worded(random: Random, phrasings: Phrasings, held: bool) -> str:
    return dress(random, phrased(random, phrasings, held))


def ask_facts(random: Random, held: bool, context: Context) -> Turn:
    answer = random.choice(list(FACTS))
    return Turn("facts", worded(random, FACTS[answer], held), answer)


def ask_small_talk(random: Random, held: bool, context: Context) -> Turn:
    answer = random.choice(list(SMALL_TALK))
    return Turn("small talk", worded(random, SMALL_TALK[answer], held), answer)


def ask_sum(random: Random, held: bool, context: Context) -> Turn:
    def pair() -> str:
        low = 10 if random.random() < 0.85 else 0
        return "+".join(str(n) for n in sorted((random.randint(low, 99), random.randint(low, 99))))

    numbers = [int(n) for n in retry(pair, held).split("+")]
    random.shuffle(numbers)
    a, b = numbers
    section = "next sum" if context.last == "sum" and random.random() < 0.3 else "sum"
    template = PHRASINGS[section].pick(random, held and random.random() < 0.5)
    question = dress(random, template, {"a": str(a), "b": str(b)})
    return Turn("sum", question, f"{a} + {b} = {a + b}.")


def ask_capital(random: Random, held: bool, context: Context) -> Turn:
    country = random.choice(list(CAPITALS))
    following = context.last == "capital" and random.random() < 0.5
    template = PHRASINGS["next capital" if following else "capital"].pick(random, held)
    shown = country.removeprefix("the ") if random.random() < 0.3 else country
    question = dress(random, template, {"country": shown})
    return Turn("capital", question, f"The capital of {country} is {CAPITALS[country]}.")


def ask_count(random: Random, held: bool, context: Context) -> Turn:
    section = random.choices(("count", "range", "down"), weights=(3, 4, 1))[0]

    def ends() -> str:
        longest = random.choice((10, 10, 15, 20, 20, 30, 50, 100))
        if section == "range":
            first = random.randint(0, 100 - min(longest, 40))
            return f"{first}-{first + random.randint(1, min(longest, 40))}"
        return f"1-{random.randint(2, longest)}"

    first, last = (int(n) for n in retry(ends, held).split("-"))
    template = PHRASINGS[section].pick(random, held and random.random() < 0.5)
    question = dress(random, template, {"a": str(first), "b": str(last)})
    numbers = range(last, 0, -1) if section == "down" else range(first, last + 1)
    return Turn("count", question, ", ".join(map(str, numbers)) + ".")


def ask_repeat(random: Random, held: bool, context: Context) -> Turn:
    num_words = random.choice((1, 1, 1, 1, 1, 1, 2, 3, 4))
    word = " ".join(retry(lambda: any_word(random), held) for _ in range(num_words))
    template = PHRASINGS["repeat"].pick(random, held and random.random() < 0.5)
    quote = random.choice(("", "", "", "", "", '"', "'"))
    question = dress(random, template, {"word": quote + word + quote}, keep=True)
    return Turn("repeat", question, word)


def ask_name(random: Random, held: bool, context: Context) -> Turn:
    if random.random() < (0.5 if context.name else 0.3):
        question = dress(random, PHRASINGS["my name"].pick(random, held))
        answer = f"Your name is {context.name}." if context.name else NO_NAME
        return Turn("name", question, answer, context.name)
    name = retry(lambda: any_name(random), held)
    template = PHRASINGS["name"].pick(random, held and random.random() < 0.5)
    question = dress(random, template, {"name": name}, keep=True)
    return Turn("name", question, f"Nice to meet you, {name}!", name)


def ask_unknown(random: Random, held: bool, context: Context) -> Turn:
    kind = random.random()
    if kind < 0.12:
        question = unknown_capital(random, held)
    elif kind < 0.27:
        question = other_numbers(random, held)
    elif kind < 0.3 and context.last != "capital":
        template = PHRASINGS["next capital"].pick(random, held)
        question = dress(random, template, {"country": random.choice(list(CAPITALS))})
        if "capital" in question.lower():
            return ask_unknown(random, held, context)
    elif kind < 0.55 and not held:
        question = dress(random, hollow(random))
    else:
        question = dress(random, UNKNOWN_QUESTIONS.pick(random, held), subjects(random, held))
    return Turn("unknown", question, UNKNOWN)


def hollow(random: Random) -> str:
    """A question that tiny-chat knows, with every word that carries meaning replaced."""
    while True:
        intents = random.choice((FACTS, FACTS, SMALL_TALK))
        template = expand(random, random.choice(random.choice(list(intents.values())).train))
        if "wavefill" in template and random.random() < 0.25:
            return template.replace("wavefill", random.choice(ENTITIES["product"].train))
        words = template.split()
        known = [word.strip(",").lower() in FUNCTION_WORDS for word in words]
        # "i am ..." would be a name.
        if not all(known) and "i am" not in template and "i'm" not in template:
            break
    return " ".join(
        word if is_known else strange_word(random)
        for word, is_known in zip(words, known, strict=True)
    )


def unknown_capital(random: Random, held: bool) -> str:
    country = random.choice(OTHER_COUNTRIES.held if held else OTHER_COUNTRIES.train)
    if not held and random.random() < 0.4:
        kind = random.choice(("person", "thing", "product", "place"))
        known = {*CAPITALS, "London"}
        country = random.choice([x for x in ENTITIES[kind].train if x not in known])
        if random.random() < 0.5:
            country = pseudo_word(random).capitalize()
    template = PHRASINGS["capital"].pick(random, held and random.random() < 0.5)
    return dress(random, template, {"country": country})


def other_numbers(random: Random, held: bool) -> str:
    section = random.choices(("other sum", "other count"), weights=(3, 1))[0]
    values = {
        "a": str(random.randint(1, 99)),
        "b": str(random.randint(1, 99)),
        "n": str(random.randint(1, 120)),
        "big": str(random.randint(101, 10 ** random.choice((3, 3, 4, 5)))),
        "things": random.choice(("apples", "stars", "people", "books", "windows", "cars", "days")),
        "word": random.choice(COMMON),
    }
    return dress(random, PHRASINGS[section].pick(random, held), values)


def subjects(random: Random, held: bool) -> dict[str, str]:
    """A value for every slot of a question out of scope."""
    values = {
        kind: random.choice(group.held if held else group.train) for kind, group in ENTITIES.items()
    }
    if not held and random.random() < 0.15:
        values |= {"thing": nonsense(random), "person": pseudo_word(random).capitalize()}
    number = str(random.randint(1, 2100))
    return {**values, "number": number, "nonsense": nonsense(random)}


SKILLS: dict[str, Callable[[Random, bool, Context], Turn]] = {
    "small talk": ask_small_talk,
    "facts": ask_facts,
    "sum": ask_sum,
    "capital": ask_capital,
    "count": ask_count,
    "repeat": ask_repeat,
    "name": ask_name,
    "unknown": ask_unknown,
}
