"""Held-out accuracy of tiny-chat's skills with images, through a running server.

`python -m model_zoo.tiny_chat.training.images.evaluate --url http://127.0.0.1:8000 --readme` sends
new pictures of several sizes as PNG files with questions in held-out wordings, compares the whole
answers, prints a Markdown table, and writes it between the markers of tiny-chat's README.md.
"""

from __future__ import annotations

import argparse
import base64
import io
import json
import re
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from random import Random
from typing import Any

from .checkpoint import MODEL
from .dialogs import question
from .drawing import draw
from .scenes import KINDS, SKILLS, Scene, any_scene

TWO = "two images"
HELD_OUT = {
    "colour": "of a shape, of several of the same colour, of a digit or of a word: 7 colours",
    "shape": "circle, square, triangle, star, cross or ring; one or several of the same shape",
    "count": "1 to 5 shapes, of one kind or mixed",
    "digit": "0 to 9, in Pillow's font and in strokes",
    "word": "one of 12, in the same two",
    TWO: "in one message: what is asked is in one of them, the first or the second",
}
MARKERS = re.compile(r"(<!-- pictures -->\n).*?(<!-- /pictures -->)", re.DOTALL)


@dataclass(frozen=True)
class Asked:
    scenes: list[Scene]
    pictures: list[bytes]  # PNG
    question: str
    answer: str


def scene_of(random: Random, skill: str) -> Scene:
    while True:
        scene = any_scene(random)
        if skill in scene.answers():
            return scene


def png(random: Random, scene: Scene) -> bytes:
    """Every second one is 128 pixels wide and high, as the model sees it."""
    width, height = 128, 128
    if random.random() < 0.5:
        width = random.randint(80, 320)
        height = min(320, max(80, int(width * random.uniform(0.8, 1.25))))
    buffer = io.BytesIO()
    draw(scene, random, width, height).save(buffer, "PNG")
    return buffer.getvalue()


def questions(skill: str, count: int) -> Iterator[Asked]:
    random = Random(f"evaluation of {skill}")
    for _ in range(count):
        about = skill if skill != TWO else random.choice([one for one in SKILLS if one != "colour"])
        scenes = [scene_of(random, about)]
        if skill == TWO:
            others = [kind for kind in KINDS if kind != scenes[0].kind]
            scenes.append(any_scene(random, random.choice(others)))
        answer = scenes[0].answers()[about]
        random.shuffle(scenes)
        pictures = [png(random, scene) for scene in scenes]
        yield Asked(scenes, pictures, question(random, about, held=True), answer)


def ask(url: str, asked: Asked) -> str:
    """What the server answers, in at most 16 tokens."""
    content: list[dict[str, Any]] = [
        {
            "type": "image_url",
            "image_url": {"url": "data:image/png;base64," + base64.b64encode(one).decode()},
        }
        for one in asked.pictures
    ]
    content.append({"type": "text", "text": asked.question})
    body = {
        "model": "tiny-chat",
        "messages": [{"role": "user", "content": content}],
        "max_tokens": 16,
        "temperature": 0,
    }
    request = urllib.request.Request(
        f"{url}/v1/chat/completions",
        json.dumps(body).encode(),
        {"Content-Type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=60) as answer:
        return json.load(answer)["choices"][0]["message"]["content"]


def accuracy(url: str, skill: str, count: int, show: int) -> float:
    asked = list(questions(skill, count))
    with ThreadPoolExecutor(8) as threads:
        said = list(threads.map(lambda one: ask(url, one), asked))
    wrong = [(one, answer) for one, answer in zip(asked, said, strict=True) if answer != one.answer]
    for one, answer in wrong[:show]:
        print(f"  {skill}: {one.scenes} {one.question!r} -> {answer!r}, not {one.answer!r}")
    return 1 - len(wrong) / count


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--url", default="http://127.0.0.1:8000")
    parser.add_argument("--count", type=int, default=400, help="questions a skill")
    parser.add_argument("--show", type=int, default=0, help="wrong answers to print a skill")
    parser.add_argument("--readme", action="store_true", help="write the table into README.md")
    args = parser.parse_args()
    lines = ["| skill | pictures | right | questions |", "|---|---|--:|--:|"]
    for skill, pictures in HELD_OUT.items():
        share = accuracy(args.url, skill, args.count, args.show)
        lines.append(f"| {skill} | {pictures} | {share:.1%} | {args.count} |")
        print(lines[-1], flush=True)
    if args.readme:
        readme = MODEL / "README.md"
        text, table = readme.read_text(encoding="utf-8"), "\n".join(lines) + "\n"
        readme.write_text(MARKERS.sub(rf"\1{table}\2", text), encoding="utf-8")


if __name__ == "__main__":
    main()
