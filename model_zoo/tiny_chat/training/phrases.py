"""Reads the text tables of this folder and turns a phrasing into one way to write it.

A phrasing is a template: (a|b|) picks one alternative, {slot} is filled in, a leading "!" marks it
as held out. `dress` varies letter case, punctuation and polite words around it.
"""

import re
from dataclasses import dataclass, field
from pathlib import Path
from random import Random

HERE = Path(__file__).parent
CHOICE = re.compile(r"\(([^()]*)\)")
SLOT = re.compile(r"(\{\w+\})")

PREFIXES = """hey, |so, |ok, |okay, |please |please, |well, |tiny-chat, |hi, |hello, |question: |
quick question: |tell me: |i have a question: |um, |now, |hi there, |hey tiny-chat, |oh, |
one more question: |next question: |good, |thanks, |great, """.replace("\n", "").split("|")
SUFFIXES = [", please", " please", ", thanks", ", thank you", ", tiny-chat", " now", " for me"]
ENDINGS = ["?"] * 8 + [""] * 7 + ["."] * 4 + ["!"] * 2 + ["??", " ?", "...", " "]


@dataclass
class Phrasings:
    """The two halves of one list of phrasings."""

    train: list[str] = field(default_factory=list)
    held: list[str] = field(default_factory=list)

    def add(self, line: str) -> None:
        if line.startswith("!"):
            self.held.append(line[1:])
        else:
            self.train.append(line)

    def pick(self, random: Random, held: bool) -> str:
        return expand(random, random.choice(self.held if held and self.held else self.train))


def lines_of(name: str) -> list[str]:
    """The lines of a table, without comments and blank lines."""
    text = (HERE / name).read_text(encoding="utf-8")
    return [line for line in text.splitlines() if line.strip() and not line.startswith("#")]


def read_intents(name: str) -> dict[str, Phrasings]:
    """A table of "= answer" lines, each followed by the questions it answers."""
    intents: dict[str, Phrasings] = {}
    answer = ""
    for line in lines_of(name):
        if line.startswith("= "):
            answer = line[2:]
            intents[answer] = Phrasings()
        else:
            intents[answer].add(line)
    return intents


def read_sections(name: str) -> dict[str, Phrasings]:
    """A table of "@ name" lines, each followed by phrasings."""
    sections: dict[str, Phrasings] = {}
    section = ""
    for line in lines_of(name):
        if line.startswith("@ "):
            section = line[2:]
            sections[section] = Phrasings()
        else:
            sections[section].add(line)
    return sections


def read_unknown(name: str) -> tuple[dict[str, Phrasings], Phrasings]:
    """Entities by kind, and the questions about them."""
    entities: dict[str, Phrasings] = {}
    questions = Phrasings()
    for line in lines_of(name):
        kind, colon, values = line.lstrip("!@ ").partition(":")
        if not line.lstrip("!").startswith("@ ") or not colon:
            questions.add(line)
            continue
        group = entities.setdefault(kind, Phrasings())
        (group.held if line.startswith("!") else group.train).extend(split_list(values))
    return entities, questions


def read_words(name: str) -> dict[str, list[str]]:
    """A table of "@ name" lines, each followed by words."""
    lists: dict[str, list[str]] = {}
    words: list[str] = []
    for line in lines_of(name):
        if line.startswith("@ "):
            words = lists[line[2:]] = []
        else:
            words += line.split()
    return lists


def split_list(values: str) -> list[str]:
    return [value.strip() for value in values.split(",")]


def expand(random: Random, template: str) -> str:
    """Pick one alternative of every (a|b), innermost first."""
    while match := CHOICE.search(template):
        choice = random.choice(match[1].split("|"))
        template = template[: match.start()] + choice + template[match.end() :]
    return " ".join(template.split()).replace(" ,", ",")


def dress(
    random: Random, template: str, values: dict[str, str] | None = None, *, keep: bool = False
) -> str:
    """Fill in `template` and vary how it is written; `keep` leaves the values' letters alone."""
    pieces = SLOT.split(template)
    if random.random() < 0.2:
        pieces.insert(0, random.choice(PREFIXES))
    if random.random() < 0.06 and not pieces[-1].rstrip().endswith("="):
        pieces.append(random.choice(SUFFIXES))
    if random.random() < 0.03:
        pieces = [piece if SLOT.fullmatch(piece) else typo(random, piece) for piece in pieces]
    style = random.choices(range(5), weights=(46, 32, 10, 9, 3))[0]
    written: list[str] = []
    for index, piece in enumerate(pieces):
        is_slot = SLOT.fullmatch(piece) is not None
        text = (values or {})[piece[1:-1]] if is_slot else piece
        written.append(text if is_slot and keep else in_style(text, style, first=index == 0))
    text = "".join(written)
    if style == 0 and not keep:
        text = text[:1].upper() + text[1:]
    return text + random.choice(ENDINGS)


def in_style(text: str, style: int, *, first: bool) -> str:
    """0 sentence case, 1 lower, 2 as it is, 3 upper, 4 Title."""
    if style == 0:
        text = re.sub(r"\bi\b(?!\.)", "I", text)
        text = text.replace("wavefill", "Wavefill") if "`" not in text else text
        return text[:1].upper() + text[1:] if first else text
    return (text, text.lower(), text, text.upper(), text.title())[style]


def loosen(
    random: Random, template: str, droppable: list[str], filler: list[str], function: frozenset[str]
) -> str:
    """Drop or add little words, if at least two others carry the meaning.

    Slots keep their neighbours: without them the end of a value could not be told.
    """
    words = template.split()
    if sum(word.lower() not in function for word in words) < 2:
        return template
    kept = [
        word
        for index, word in enumerate(words)
        if word not in droppable or beside_slot(words, index) or random.random() < 0.6
    ]
    if random.random() < 0.5:
        place = random.randint(0, len(kept))
        if not any(map(SLOT.search, kept[max(0, place - 1) : place + 1])):
            kept.insert(place, random.choice(filler))
    return " ".join(kept)


def beside_slot(words: list[str], index: int) -> bool:
    return any(map(SLOT.search, words[max(0, index - 1) : index + 2]))


def typo(random: Random, text: str) -> str:
    """Drop, double or swap one letter, as fast fingers do."""
    if len(text) < 12:
        return text
    at = random.randrange(1, len(text) - 2)
    changed = random.choice(
        (text[at + 1 :], text[at] + text[at:], text[at + 1] + text[at] + text[at + 2 :])
    )
    return text[:at] + changed
