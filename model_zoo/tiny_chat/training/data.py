"""Conversations for tiny-chat: what training draws, and the fixed questions of the evaluation.

`python -m model_zoo.tiny_chat.training.data` prints a few.
"""

from random import Random
from typing import Any

from .skills import CAPITALS, FACTS, SKILLS, Context, Turn

ChatMessage = dict[str, Any]
WEIGHTS = {
    "small talk": 1.4,
    "facts": 2.6,
    "sum": 2.2,
    "capital": 1.2,
    "count": 0.5,
    "repeat": 2.2,
    "name": 0.9,
    "unknown": 3.6,
}
SYSTEM_PROMPTS = """You are a helpful assistant.
You are a helpful, respectful and honest assistant.
You are tiny-chat, a small language model.
You are a friendly chat bot.
You are a helpful AI.
Answer briefly.
Be concise.
Be polite and short.
Answer the questions of the user.
You are an expert in everything.
You are a pirate.
You are a teacher for small children.
You answer questions about Wavefill.
You are the assistant of a web shop. Be kind to the customers.
Today is Monday. You are a helpful assistant.
Always tell the truth.
Never make things up. Say so if you do not know the answer.
Think before you answer.
Reply in one sentence.
Use simple words.
You are a chat model that runs on a laptop.
This is a test.
system
Please help the user with whatever they ask for, step by step.
You are a large language model that answers in English only.
Do not use markdown. Do not use emoji. Keep every answer under fifty words.""".splitlines()
HELD_SYSTEM_PROMPTS = """You are a careful assistant who answers shortly.
Be friendly, and help with any question.
You work for a small company and answer its mail.
Give short and honest answers.""".splitlines()


def num_turns(random: Random) -> int:
    """Mostly one to five; now and then a long talk, so that late positions are trained too."""
    kind = random.random()
    if kind < 0.01:
        return random.randint(12, 45)
    return random.choice((1, 1, 1, 2, 2, 3, 4, 5))


def talk(random: Random, skills: list[str], held_last: bool = False) -> list[Turn]:
    """One turn a skill; with `held_last` the last one is drawn from the held-out side."""
    turns: list[Turn] = []
    context = Context()
    for index, skill in enumerate(skills):
        held = held_last and index == len(skills) - 1
        turn = SKILLS[skill](random, held, context)
        turns.append(turn)
        asked_capital = turn.skill == "unknown" and "capital" in turn.question.lower()
        context = Context("capital" if asked_capital else turn.skill, turn.name or context.name)
    return turns


def messages_of(turns: list[Turn], system: str | None) -> list[ChatMessage]:
    messages = [{"role": "system", "content": system}] if system is not None else []
    for turn in turns:
        messages.append({"role": "user", "content": turn.question})
        messages.append({"role": "assistant", "content": turn.answer})
    return messages


def conversation(random: Random) -> list[ChatMessage]:
    """A training conversation; every answer in it is learned."""
    skills = random.choices(list(WEIGHTS), weights=list(WEIGHTS.values()), k=num_turns(random))
    if len(skills) > 1 and "name" not in skills and random.random() < 0.1:
        skills[0] = skills[-1] = "name"
    for index in range(1, len(skills)):
        if skills[index - 1] == "capital" and random.random() < 0.2:
            skills[index] = "capital"
    system = random.choice(SYSTEM_PROMPTS) if random.random() < 0.45 else None
    return messages_of(talk(random, skills), system)


def plain_text(random: Random) -> tuple[str, str]:
    """A beginning and its continuation without any chat format, for the completions API."""
    kind = random.randrange(4)
    if kind == 0:
        country = random.choice(list(CAPITALS))
        return f"The capital of {country} is", f" {CAPITALS[country]}."
    if kind == 1:
        turn = SKILLS["sum"](random, False, Context())
        left, right = turn.answer.split(" =")
        return left + " =", right
    if kind == 2:
        first, length = random.randint(0, 80), random.randint(5, 20)
        numbers = ", ".join(str(n) for n in range(first, first + length)) + "."
        cut = numbers.index(",", numbers.index(",") + 1) + 1
        return numbers[:cut], numbers[cut:]
    words = random.choice(list(FACTS)).split(" ")
    cut = random.randint(min(3, len(words) - 1), len(words) - 1)
    return " ".join(words[:cut]), " " + " ".join(words[cut:])


def questions(skill: str, count: int, seed: int = 1) -> list[list[ChatMessage]]:
    """`count` held-out conversations whose last answer is to be predicted.

    skill: a name in SKILLS (single questions, every second one under a system prompt), or "mixed
    turns" (two to five turns of mixed skills, all earlier answers given).
    """
    random = Random(f"{skill} {seed}")
    asked: list[list[ChatMessage]] = []
    for index in range(count):
        skills = [skill]
        if skill == "mixed turns":
            skills = random.choices(list(SKILLS), k=random.randint(2, 5))
            if "name" in skills[:-1] and random.random() < 0.3:
                skills[-1] = "name"
        system = None
        if index % 2:
            system = random.choice(HELD_SYSTEM_PROMPTS + SYSTEM_PROMPTS)
        asked.append(messages_of(talk(random, skills, held_last=True), system))
    return asked


if __name__ == "__main__":
    for number in range(12):
        for message in conversation(Random(number)):
            print(f"{message['role']:>9}: {message['content']}")
        print()
