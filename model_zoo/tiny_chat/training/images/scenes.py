"""What a picture shows, and what may be asked about it."""

from __future__ import annotations

from dataclasses import dataclass
from random import Random

COLOURS = {
    "red": (220, 30, 30),
    "orange": (250, 140, 20),
    "yellow": (245, 220, 30),
    "green": (30, 160, 60),
    "blue": (40, 80, 220),
    "purple": (140, 50, 170),
    "black": (20, 20, 20),
}
SHAPES = ("circle", "square", "triangle", "star", "cross", "ring")
WORDS = (
    "apple", "bread", "dream", "fire", "light", "music",
    "river", "stone", "table", "tiger", "water", "window",
)  # fmt: skip
MOST = 5  # shapes of a picture
KINDS = ("shapes", "digit", "word")


@dataclass(frozen=True)
class Item:
    """One thing that is drawn: a shape by its name, a digit or a word by its text."""

    name: str
    colour: str


@dataclass(frozen=True)
class Scene:
    kind: str  # of KINDS
    items: tuple[Item, ...]

    def answers(self) -> dict[str, str]:
        """Skill -> the only right answer, of the questions that have one."""
        colours, names = ({getattr(item, key) for item in self.items} for key in ("colour", "name"))
        found = {"colour": colours.pop()} if len(colours) == 1 else {}
        if self.kind != "shapes":
            return {**found, self.kind: names.pop()}
        found["count"] = str(len(self.items))
        return {**found, "shape": names.pop()} if len(names) == 1 else found


SKILLS = ("colour", "shape", "count", "digit", "word")


def any_scene(random: Random, kind: str | None = None) -> Scene:
    kind = kind or random.choices(KINDS, (2, 1, 1))[0]
    colour = random.choice(list(COLOURS))
    if kind == "digit":
        return Scene(kind, (Item(str(random.randrange(10)), colour),))
    if kind == "word":
        return Scene(kind, (Item(random.choice(WORDS), colour),))
    shape, alike = random.choice(SHAPES), random.random() < 0.6
    count = random.randint(1, MOST)
    items = [
        Item(shape, colour) if alike else Item(random.choice(SHAPES), random.choice(list(COLOURS)))
        for _ in range(count)
    ]
    return Scene(kind, tuple(items))
