"""The built-in model says what it sees: real answers about drawn pictures, by every API."""

from __future__ import annotations

from typing import Any

import anthropic
import ollama
import pytest

from tests.support.images.drawn_pictures import drawn, plain, shapes, url
from tests.support.images.vision_server import chat_part, text_part
from tests.support.server.server_process import Server

MODEL = "tiny-chat"
RED_CIRCLE, SEVEN = shapes("circle", "red"), drawn("digit", "7", "blue")
COLOUR, DIGIT = "What colour is the shape?", "Which digit do you see?"
SKILLS = [
    (shapes("star", "green"), "What colour is the shape?", "green"),
    (shapes("triangle", "purple"), "Which shape is this?", "triangle"),
    (shapes("square", "orange", 3), "How many shapes are there?", "3"),
    (drawn("digit", "4", "black"), "Which digit do you see?", "4"),
    (drawn("word", "river", "blue"), "What does it say?", "river"),
]


def user(text: str, *pictures: bytes) -> Any:
    parts = [chat_part(url(picture)) for picture in pictures]
    return {"role": "user", "content": [*parts, text_part(text)]}


def said(server: Server, *messages: Any, **fields: Any) -> str:
    made = server.client().chat.completions.create(
        model=MODEL, messages=list(messages), temperature=0, max_tokens=16, **fields
    )
    assert made.choices[0].finish_reason == "stop"
    return made.choices[0].message.content or ""


@pytest.mark.parametrize(("picture", "question", "answer"), SKILLS, ids=[s[2] for s in SKILLS])
def test_it_answers_a_question_of_each_skill(
    server: Server, picture: bytes, question: str, answer: str
):
    assert said(server, user(question, picture)) == answer


@pytest.mark.parametrize("side", [64, 300, 1024])
def test_the_size_of_a_picture_does_not_change_what_is_seen(server: Server, side: int):
    assert said(server, user(COLOUR, shapes("circle", "red", side=side))) == "red"


def test_of_two_pictures_in_one_message_it_reads_the_one_that_is_asked_about(server: Server):
    for pictures in ((RED_CIRCLE, SEVEN), (SEVEN, RED_CIRCLE)):
        assert said(server, user(DIGIT, *pictures)) == "7"
        assert said(server, user("Which shape is this?", *pictures)) == "circle"


def test_an_image_may_come_in_the_second_turn_and_stays_for_the_third(server: Server):
    turns = [
        {"role": "user", "content": "What is the capital of France?"},
        {"role": "assistant", "content": "The capital of France is Paris."},
        user(COLOUR, RED_CIRCLE),
    ]
    assert said(server, *turns) == "red"
    turns += [{"role": "assistant", "content": "red"}, user("Which shape is this?")]
    assert said(server, *turns) == "circle"


def test_a_stream_has_the_same_answer_and_counts_the_same_tokens(server: Server):
    asked: Any = {"model": MODEL, "messages": [user(DIGIT, SEVEN)], "temperature": 0}
    completions = server.client().chat.completions
    whole = completions.create(**asked)
    pieces = list(completions.create(**asked, stream=True, stream_options={"include_usage": True}))
    text = "".join(piece.choices[0].delta.content or "" for piece in pieces if piece.choices)
    assert text == whole.choices[0].message.content == "7"
    assert pieces[-1].usage and whole.usage
    assert pieces[-1].usage.prompt_tokens == whole.usage.prompt_tokens > 16


def test_responses_read_images_and_remember_them(server: Server):
    client = server.client()
    content: Any = [
        {"type": "input_image", "image_url": url(RED_CIRCLE), "detail": "auto"},
        {"type": "input_text", "text": COLOUR},
    ]
    first = client.responses.create(
        model=MODEL, input=[{"role": "user", "content": content}], temperature=0
    )
    assert first.output_text == "red"
    second = client.responses.create(
        model=MODEL, input="Which shape is this?", previous_response_id=first.id, temperature=0
    )
    assert second.output_text == "circle"


def test_anthropics_client_sends_an_image(server: Server):
    source = {"type": "base64", "media_type": "image/png", "data": plain(SEVEN)}
    content: Any = [{"type": "image", "source": source}, {"type": "text", "text": DIGIT}]
    with anthropic.Anthropic(base_url=server.url, api_key="none", max_retries=0) as client:
        message = client.messages.create(
            model=MODEL, max_tokens=16, messages=[{"role": "user", "content": content}],
            extra_body={"temperature": 0},
        )  # fmt: skip
    [block] = message.content
    assert block.type == "text" and block.text == "7"


def test_ollamas_client_sends_an_image(server: Server):
    with ollama.Client(server.url) as client:
        answer = client.chat(
            MODEL,
            [{"role": "user", "content": COLOUR, "images": [plain(RED_CIRCLE)]}],
            options={"temperature": 0},
        )
    assert answer.message.content == "red"


def test_a_request_says_what_it_may_send(server: Server):
    [model] = server.client().models.list().data
    images = (model.model_extra or {})["images"]
    assert images["max_images"] == 16 and images["max_tokens"] == 20
