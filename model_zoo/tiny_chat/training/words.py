"""The tables of this folder, read once, and the words that are made from them."""

import re
import string
from random import Random

from .phrases import (
    Phrasings,
    lines_of,
    read_intents,
    read_sections,
    read_unknown,
    read_words,
    split_list,
)

FACTS = read_intents("facts.txt")
SMALL_TALK = read_intents("small_talk.txt")
ENTITIES, UNKNOWN_QUESTIONS = read_unknown("unknown.txt")
PHRASINGS = read_sections("phrasings.txt")


def read_capitals() -> tuple[dict[str, str], Phrasings]:
    capitals: dict[str, str] = {}
    others = Phrasings()
    for line in lines_of("capitals.txt"):
        if line[0] in "?!":
            (others.train if line[0] == "?" else others.held).extend(split_list(line[2:]))
        else:
            country, capital = line.split(" = ")
            capitals[country] = capital
    return capitals, others


CAPITALS, OTHER_COUNTRIES = read_capitals()

WORDS = read_words("words.txt")
NAMES, COMMON, SYLLABLES, SCRIPTS = (
    WORDS[name] for name in ("names", "common", "syllables", "scripts")
)
# Every word of the tables: with it each token of the vocabulary gets copied in training.
POOL = sorted(
    {
        word
        for table in ("facts.txt", "small_talk.txt", "unknown.txt", "capitals.txt", "words.txt")
        for word in re.findall(r"[^\W\d_]+", " ".join(lines_of(table)))
    }
)
FUNCTION_WORDS = frozenset(WORDS["function"])
TOPIC_WORDS = frozenset(
    word
    for phrasings in (*FACTS.values(), *SMALL_TALK.values())
    for word in re.findall(r"\w+", " ".join(phrasings.train).lower())
)


def pseudo_word(random: Random) -> str:
    return "".join(random.choices(SYLLABLES, k=random.choice((1, 2, 2, 3, 3, 4))))


def glued_word(random: Random) -> str:
    """A real word, whole or cut, with a made-up beginning or end."""
    word = random.choice(random.choice((POOL, COMMON, NAMES, list(CAPITALS.values()))))
    word = word[random.choice((0, 0, 0, 1, 2)) :] or word
    extra = random.choice(random.choice((SYLLABLES, SYLLABLES, POOL)))
    return random.choice((word + extra, word + extra, extra + word))


def any_word(random: Random) -> str:
    """A word to repeat: usual, made up, random letters or another script; in any case."""
    kind = random.random()
    if kind < 0.25:
        word = random.choice(COMMON)
    elif kind < 0.4:
        word = random.choice(POOL)
    elif kind < 0.55:
        word = glued_word(random)
    elif kind < 0.72:
        word = pseudo_word(random)
    elif kind < 0.8:
        word = "".join(random.choices(string.ascii_lowercase, k=random.randint(1, 8)))
    elif kind < 0.85:
        word = "".join(random.choices(string.ascii_letters + string.digits, k=random.randint(2, 7)))
    elif kind < 0.93:
        word = "".join(random.choices(random.choice(SCRIPTS), k=random.randint(1, 4)))
    else:
        word = random.choice(random.choice((NAMES, list(CAPITALS.values()))))
    return random.choice((word, word, word, word.capitalize(), word.upper()))


def nonsense(random: Random) -> str:
    """One to four words that mean nothing together."""
    things = [word for thing in random.sample(ENTITIES["thing"].train, 2) for word in thing.split()]
    pools = (COMMON, things, [pseudo_word(random)])
    return " ".join(random.choice(random.choice(pools)) for _ in range(random.choice((1, 2, 3, 4))))


def strange_word(random: Random) -> str:
    """A word that no question about a known subject contains."""
    while True:
        word = random.choice((random.choice(COMMON), pseudo_word(random), thing_word(random)))
        if word.lower() not in TOPIC_WORDS and word.lower() not in FUNCTION_WORDS:
            return word


def thing_word(random: Random) -> str:
    return random.choice(random.choice(ENTITIES[random.choice(("thing", "topic"))].train).split())


def any_name(random: Random) -> str:
    kind = random.random()
    if kind < 0.4:
        name = random.choice(NAMES)
    elif kind < 0.7:
        name = pseudo_word(random).capitalize()
    elif kind < 0.8:
        name = random.choice(POOL).capitalize()
    else:
        name = glued_word(random).capitalize()
    return name if random.random() < 0.9 else name.lower()
