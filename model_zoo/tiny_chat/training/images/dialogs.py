"""Conversations about pictures, as the chat template prints them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from random import Random

from model_zoo.tiny_chat.training.data import SYSTEM_PROMPTS, conversation
from model_zoo.tiny_chat.training.phrases import dress, read_sections
from model_zoo.tiny_chat.training.skills import UNKNOWN

from .scenes import COLOURS, KINDS, SHAPES, SKILLS, Item, Scene, any_scene

IMAGE = "<|vision_start|><|image_pad|><|vision_end|>"
QUESTIONS = read_sections("images/questions.txt")


@dataclass(frozen=True)
class PictureDialog:
    """segments: text, and whether it is learned; of the scenes, each stands where IMAGE does."""

    segments: list[tuple[str, bool]]
    scenes: list[Scene]
    skill: str  # of the last question


def question(random: Random, skill: str, held: bool = False) -> str:
    return dress(random, QUESTIONS[skill].pick(random, held))


def user_turn(random: Random, text: str, images: int) -> str:
    """Pictures stand before the question, as often as behind it."""
    pictures = IMAGE * images
    return pictures + text if random.random() < 0.7 else text + pictures


def any_dialog(random: Random, easy: bool = False, held: bool = False) -> PictureDialog:
    """One to three questions about one or two pictures.

    easy: the colour or the shape of one thing; held: one question in a held-out wording
    """
    if easy:
        shape = Item(random.choice(SHAPES), random.choice(list(COLOURS)))
        return asked_about(random, [Scene("shapes", (shape,))], "", 1, held, ("colour", "shape"))
    scenes = [any_scene(random)]
    if random.random() < 0.2:
        scenes.append(any_scene(random, random.choice([k for k in KINDS if k != scenes[0].kind])))
    turns = 1 if held else random.choice((1, 1, 2, 3))
    return asked_about(random, scenes, before_pictures(random), turns, held)


def before_pictures(random: Random) -> str:
    """Nothing, a system prompt, or some turns of text."""
    kind = random.random()
    if kind < 0.6:
        return ""
    if kind < 0.85:
        return f"<|im_start|>system\n{random.choice(SYSTEM_PROMPTS)}<|im_end|>\n"
    messages = conversation(random)[:5]
    if messages[-1]["role"] != "assistant":
        del messages[-1]
    return "".join(
        f"<|im_start|>{message['role']}\n{message['content']}<|im_end|>\n" for message in messages
    )


def asked_about(
    random: Random,
    scenes: list[Scene],
    before: str,
    turns: int,
    held: bool,
    skills: Sequence[str] = SKILLS,
) -> PictureDialog:
    answers = {skill: one for skill, one in answers_of(scenes).items() if skill in skills}
    segments: list[tuple[str, bool]] = []
    skill = ""
    for turn in range(turns):
        skill = random.choice(list(answers))
        text, answer = question(random, skill, held), answers[skill]
        absent = [one for one in skills if one not in possible(scenes)]
        if absent and not held and random.random() < 0.04:
            text, answer = question(random, random.choice(absent)), UNKNOWN
        before += "<|im_start|>user\n"
        before += user_turn(random, text, len(scenes)) if turn == 0 else text
        before += "<|im_end|>\n<|im_start|>assistant\n"
        segments += [(before, False), (answer + "<|im_end|>", True)]
        before = "\n"
    return PictureDialog(segments, scenes, skill)


def answers_of(scenes: list[Scene]) -> dict[str, str]:
    """Of questions that have one answer: the only picture of their kind has it, or all do."""
    colours = {item.colour for scene in scenes for item in scene.items}
    found = {skill: one for scene in scenes for skill, one in scene.answers().items()}
    if len(colours) > 1:
        found.pop("colour", None)
    return found


def possible(scenes: list[Scene]) -> set[str]:
    """Skills of which a question about these pictures makes sense."""
    kinds = {scene.kind for scene in scenes}
    return {"colour", *kinds} | ({"shape", "count"} if "shapes" in kinds else set())
