"""A real server of a small random Qwen3-VL: images by OpenAI's client, answers of transformers."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from openai import BadRequestError
from PIL import Image

from tests.support.images.pictures import encoded, noise
from tests.support.images.seeing_server import SeeingServer
from tests.support.images.vision_server import chat_part, data_url, text_part
from tests.support.server.server_process import stop_server


@pytest.fixture(scope="module")
def seeing(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SeeingServer]:
    seeing = SeeingServer(tmp_path_factory.mktemp("seeing"))
    yield seeing
    stop_server(seeing.server)


def tokens_of(answer: Any) -> list[int]:
    return answer.choices[0].model_extra["token_ids"]


def part(picture: Image.Image) -> dict[str, Any]:
    return chat_part(data_url(encoded(picture)))


def user(*parts: dict[str, Any]) -> dict[str, Any]:
    return {"role": "user", "content": list(parts)}


def test_answers_about_images_are_those_of_transformers(seeing: SeeingServer) -> None:
    one, other = noise(96, 64), noise(128, 96).transpose(Image.Transpose.ROTATE_180)
    asked = user(part(one), text_part())
    first = seeing.answer([asked])
    assert tokens_of(first) == seeing.expected([asked], [one])
    assert first.usage.prompt_tokens > 6
    said = {"role": "assistant", "content": "Hello"}
    turns = [asked, said, user(text_part(), part(other), part(one))]
    second = seeing.answer(turns)
    assert tokens_of(second) == seeing.expected(turns, [one, other, one])
    assert seeing.server.metric("wavefill_images_encoded_total") == 2
    assert seeing.server.metric("wavefill_image_encoder_seconds_total") > 0


def test_an_image_that_was_sent_before_is_not_encoded_again(seeing: SeeingServer) -> None:
    asked = user(part(noise(64, 160)), text_part())
    before = seeing.server.metric("wavefill_images_encoded_total")
    answers = seeing.answer([asked], n=3).choices
    assert len({choice.message.content for choice in answers}) == 1
    pieces = seeing.answer([asked], stream=True)
    text = "".join(piece.choices[0].delta.content or "" for piece in pieces if piece.choices)
    assert text == answers[0].message.content
    after = seeing.server.metric("wavefill_images_encoded_total")
    assert after == before + 1


def test_pictures_that_differ_have_answers_of_their_own(seeing: SeeingServer) -> None:
    """Their prompts have the same tokens."""
    picture = noise(96, 96)
    turned = picture.transpose(Image.Transpose.FLIP_TOP_BOTTOM)
    for one in (picture, turned):
        asked = user(part(one), text_part())
        answer = tokens_of(seeing.answer([asked]))
        assert answer == seeing.expected([asked], [one])


def test_the_model_says_what_images_it_reads(seeing: SeeingServer) -> None:
    [model] = seeing.server.client().models.list().data
    images = model.model_extra["images"]  # type: ignore[index]
    assert images["max_images"] == 16 and images["max_pixels"] == 262_144
    assert images["max_tokens"] == 256


def test_text_alone_is_answered_as_before(seeing: SeeingServer) -> None:
    asked = {"role": "user", "content": "Hello, world!"}
    answer = tokens_of(seeing.answer([asked]))
    assert answer == seeing.expected([asked], [])


def test_bytes_that_are_no_image_are_refused_by_field(seeing: SeeingServer) -> None:
    broken = chat_part(data_url(b"\x89PNG\r\n\x1a\n" + b"0" * 50))
    with pytest.raises(BadRequestError) as caught:
        seeing.answer([user(broken, text_part())])
    assert caught.value.code == "invalid_image"
    assert caught.value.param == "messages[0].content[0].image_url.url"
