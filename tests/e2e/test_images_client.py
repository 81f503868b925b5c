"""A real server of a small random Qwen3-VL: images by OpenAI's client, answers of transformers."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx2 as httpx
import pytest
from openai import BadRequestError
from PIL import Image
from tokenizers import Tokenizer

from runtime.messages import PromptImage
from tests.support.images.pictures import encoded, noise
from tests.support.images.vision_server import (
    PAD,
    TEMPLATE,
    WORDS,
    chat_part,
    data_url,
    text_part,
)
from tests.support.models.tiny_vision import SIDE, library_answer, write_vision_checkpoint
from tests.support.server.fake_engine import write_tokenizer
from tests.support.server.server_process import Server, start_server, stop_server

STEPS = 12


class SeeingServer:
    """With transformers' model of the same weights."""

    def __init__(self, folder: Path) -> None:
        directory = write_tokenizer(folder / "model", template=TEMPLATE, special=WORDS)
        self.tokenizer = Tokenizer.from_file(str(directory / "tokenizer.json"))
        self.pad = self.tokenizer.token_to_id(PAD)
        self.reference = write_vision_checkpoint(
            "qwen3-vl", directory, image_token_id=self.pad,
            vocab_size=self.tokenizer.get_vocab_size(),
        )  # fmt: skip
        arguments = ("--dtype", "float32", "--served-model-name", "seeing", "--kv-tokens", "2048")
        self.server: Server = start_server(folder / "log", str(directory), *arguments)

    def expected(self, messages: list[dict[str, Any]], pictures: list[Image.Image]) -> list[int]:
        """What transformers answers to the tokens that the server counts."""
        body = {"model": "seeing", "messages": messages}
        tokens = httpx.post(f"{self.server.url}/tokenize", json=body).json()["tokens"]
        images: list[PromptImage] = []
        place = 0
        for picture in pictures:
            place = tokens.index(self.pad, place)
            count, pixels = picture.width * picture.height // SIDE**2, picture.tobytes()
            digest = hashlib.sha256(pixels).digest()
            images.append(PromptImage(place, count, picture.width, picture.height, pixels, digest))
            place += count
        assert tokens.count(self.pad) == sum(image.num_tokens for image in images)
        return library_answer(self.reference, tokens, tuple(images), STEPS)

    def answer(self, messages: list[dict[str, Any]], **options: Any) -> Any:
        return self.server.client().chat.completions.create(
            model="seeing", messages=messages, max_tokens=STEPS, temperature=0,  # type: ignore[arg-type]
            extra_body={"ignore_eos": True, "return_token_ids": True}, **options,
        )  # fmt: skip


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
