"""Draws a scene: every size, place, thickness and slant at random, the same for a seed."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cache
from random import Random

from PIL import Image, ImageDraw, ImageFont

from .scenes import COLOURS, Item, Scene
from .strokes import STROKES

Points = list[tuple[float, float]]
SMOOTH = 2  # everything is drawn so many times as large, and made smaller
SIDE = 128  # of a picture that is square


def draw(scene: Scene, random: Random, width: int = SIDE, height: int = SIDE) -> Image.Image:
    """RGB, of that size."""
    canvas = Image.new("RGB", (SMOOTH * width, SMOOTH * height), _background(random))
    if scene.kind == "shapes":
        places = _places(random, len(scene.items), *canvas.size)
        for item, box in zip(scene.items, places, strict=True):
            _paste(canvas, random, item, _shape(random, item.name, box[2]), box)
    else:
        _write(canvas, random, scene.items[0])
    small = canvas.resize((width, height), Image.Resampling.BOX)
    if random.random() < 0.35:  # as a smaller picture looks that was enlarged
        share = random.uniform(0.45, 0.95)
        coarse = small.resize((int(width * share), int(height * share)), Image.Resampling.BICUBIC)
        small = coarse.resize((width, height), Image.Resampling.BICUBIC)
    return small


def _background(random: Random) -> tuple[int, int, int]:
    if random.random() < 0.4:
        return (255, 255, 255)
    light = random.randint(215, 250)
    return tuple(light + random.randint(-12, 5) for _ in range(3))  # type: ignore[return-value]


def _colour(random: Random, name: str) -> tuple[int, int, int]:
    spread = 18
    return tuple(  # type: ignore[return-value]
        min(255, max(0, value + random.randint(-spread, spread))) for value in COLOURS[name]
    )


def _places(random: Random, count: int, width: int, height: int) -> list[tuple[int, int, int]]:
    """(x, y, side) of squares that do not touch."""
    least, most = (0.35, 0.85) if count == 1 else (0.2, 0.42 if count < 4 else 0.34)
    while True:
        found: list[tuple[int, int, int]] = []
        for _ in range(60):
            side = int(random.uniform(least, most) * min(width, height))
            x, y = random.randint(0, width - side), random.randint(0, height - side)
            if all(
                max(abs(2 * x + side - 2 * a - size), abs(2 * y + side - 2 * b - size))
                > side + size + 8
                for a, b, size in found
            ):
                found.append((x, y, side))
            if len(found) == count:
                return found


def _paste(
    canvas: Image.Image, random: Random, item: Item, mask: Image.Image, box: tuple[int, int, int]
) -> None:
    canvas.paste(_colour(random, item.colour), box[:2], mask)


def _shape(random: Random, name: str, side: int) -> Image.Image:
    mask = Image.new("L", (side, side), 0)
    pen, radius = ImageDraw.Draw(mask), (side - 2) / 2
    centre = side / 2
    around = (centre - radius, centre - radius, centre + radius, centre + radius)
    if name == "circle":
        pen.ellipse(around, fill=255)
    elif name == "ring":
        pen.ellipse(around, outline=255, width=max(3, int(radius * random.uniform(0.25, 0.5))))
    else:
        corners = CORNERS[name](random)
        pen.polygon([(centre + radius * x, centre + radius * y) for x, y in corners], fill=255)
    return mask


def _turned(points: Points, angle: float) -> Points:
    cos, sin = math.cos(angle), math.sin(angle)
    return [(x * cos - y * sin, x * sin + y * cos) for x, y in points]


def _around(count: int, *radii: float) -> Points:
    """Corners at equal angles from the top on; their radii take turns."""
    angles = [2 * math.pi * index / count - math.pi / 2 for index in range(count)]
    return [
        (radii[index % len(radii)] * math.cos(angle), radii[index % len(radii)] * math.sin(angle))
        for index, angle in enumerate(angles)
    ]


def _square(random: Random) -> Points:
    size = 0.78
    corners = [(-size, -size), (size, -size), (size, size), (-size, size)]
    return _turned(corners, random.uniform(-0.25, 0.25))


def _cross(random: Random) -> Points:
    arm = random.uniform(0.2, 0.34)
    quarter = [(-arm, -arm), (-arm, -0.93), (arm, -0.93), (arm, -arm)]
    points = [point for turn in range(4) for point in _turned(quarter, turn * math.pi / 2)]
    return _turned(points, random.uniform(-0.2, 0.2))


CORNERS: dict[str, Callable[[Random], Points]] = {
    "square": _square,
    "cross": _cross,
    "triangle": lambda random: _turned(_around(3, 1.0), random.uniform(-0.3, 0.3)),
    "star": lambda random: _turned(
        _around(10, 1.0, random.uniform(0.38, 0.46)), random.uniform(-0.4, 0.4)
    ),
}


def _write(canvas: Image.Image, random: Random, item: Item) -> None:
    """A digit or a word: Pillow's font or one of strokes, slanted and turned a little."""
    width, height = canvas.size
    mask = _typed(item.name) if random.random() < 0.5 else _stroked(random, item.name)
    slant, angle = random.uniform(-0.2, 0.2), random.uniform(-8, 8)
    mask = mask.transform(
        (int(mask.width + abs(slant) * mask.height), mask.height),
        Image.Transform.AFFINE,
        (1, slant, -max(0.0, slant) * mask.height, 0, 1, 0),
        Image.Resampling.BILINEAR,
    ).rotate(angle, Image.Resampling.BILINEAR, expand=True)
    mask = mask.crop(mask.getbbox())
    share = random.uniform(0.45, 0.92) if len(item.name) == 1 else random.uniform(0.75, 0.96)
    scale = share * min(width / mask.width, height / mask.height)
    size = max(1, int(mask.width * scale)), max(1, int(mask.height * scale))
    mask = mask.resize(size, Image.Resampling.BILINEAR)
    x, y = random.randint(0, width - size[0]), random.randint(0, height - size[1])
    _paste(canvas, random, item, mask, (x, y, 0))


@cache
def _typed(text: str) -> Image.Image:
    font = ImageFont.load_default(96)
    left, top, right, bottom = font.getbbox(text)
    mask = Image.new("L", (int(right - left) + 8, int(bottom - top) + 8), 0)
    ImageDraw.Draw(mask).text((4 - left, 4 - top), text, fill=255, font=font)
    return mask


def _stroked(random: Random, text: str) -> Image.Image:
    """Letters of strokes on a grid 4 wide and 8 high, of which the upper 6 are above the line."""
    unit, pen_width = 14, random.randint(7, 16)
    step = random.uniform(5.0, 5.8) * unit
    mask = Image.new("L", (int(step * len(text)) + unit, 11 * unit), 0)
    pen = ImageDraw.Draw(mask)
    for number, letter in enumerate(text):
        for stroke in STROKES[letter]:
            points = [
                (
                    unit + step * number + unit * (x + random.uniform(-0.12, 0.12)),
                    1.5 * unit + unit * (y + random.uniform(-0.12, 0.12)),
                )
                for x, y in stroke
            ]
            pen.line(points, fill=255, width=pen_width, joint="curve")
            for x, y in (points[0], points[-1]):
                half = pen_width / 2
                pen.ellipse((x - half, y - half, x + half, y + half), fill=255)
    return mask
