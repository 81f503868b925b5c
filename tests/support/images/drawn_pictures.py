"""Pictures that tiny-chat was trained to read, the same each time, as PNG files."""

from __future__ import annotations

import base64
from random import Random

from model_zoo.tiny_chat.training.images.drawing import draw
from model_zoo.tiny_chat.training.images.scenes import Item, Scene
from tests.support.images.pictures import encoded
from tests.support.images.vision_server import data_url


def drawn(kind: str, name: str, colour: str, count: int = 1, *, side: int = 128) -> bytes:
    """`count` shapes of this name, or a digit or a word."""
    scene = Scene(kind, (Item(name, colour),) * count)
    return encoded(draw(scene, Random(f"{kind} {name} {colour} {count}"), side, side))


def shapes(name: str, colour: str, count: int = 1, *, side: int = 128) -> bytes:
    return drawn("shapes", name, colour, count, side=side)


def plain(picture: bytes) -> str:
    return base64.b64encode(picture).decode()


def url(picture: bytes) -> str:
    return data_url(picture)
