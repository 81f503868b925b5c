"""Images that cannot be used, in requests: each is a 400 that names the field and what is wrong."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import httpx2 as httpx
import pytest

from tests.support.images.pictures import BadImage, bad_images, encoded, noise
from tests.support.images.vision_server import (
    CHAT,
    GENERATE,
    MESSAGES,
    OLLAMA,
    RESPONSES,
    body_of,
    chat,
    data_url,
    message_of,
    text_part,
    vision_server,
)
from tests.support.server.fake_engine import FakeServer

WHOLE = encoded(noise(64, 48))
URL = data_url(WHOLE)
PART = "messages[0].content[0].image_url"
FIELDS = {  # of the image of `body_of`
    CHAT: f"{PART}.url",
    RESPONSES: "input[0].content[0].image_url",
    MESSAGES: "messages[0].content[0].source",
    OLLAMA: "messages[0].images[0]",
    GENERATE: "images[0]",
}


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FakeServer]:
    with vision_server(tmp_path_factory.mktemp("vision")) as server:
        yield server


@pytest.fixture(autouse=True)
def nothing_reaches_the_engine(fake: FakeServer) -> Iterator[None]:
    yield
    assert fake.engine.requests == []


@pytest.mark.parametrize("bad", bad_images(), ids=str)
def test_a_bad_image_is_a_400_with_what_is_wrong(http: httpx.Client, bad: BadImage) -> None:
    declared = bad.declared or "image/*"
    answer = http.post(CHAT, json=body_of(CHAT, bad.data, declared))
    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    assert (error["param"], error["code"]) == (FIELDS[CHAT], "invalid_image")
    assert error["message"].startswith(f"`{FIELDS[CHAT]}` ")
    assert any(words in error["message"] for words in bad.words.split("|")), error


@pytest.mark.parametrize("route", FIELDS)
@pytest.mark.parametrize("data", [b"", b"%PDF-1.7", WHOLE[:-60]], ids=["empty", "pdf", "cut-off"])
def test_every_api_names_its_own_field(http: httpx.Client, route: str, data: bytes) -> None:
    answer = http.post(route, json=body_of(route, data))
    assert answer.status_code == 400, answer.text
    assert message_of(answer).startswith(f"`{FIELDS[route]}` "), answer.text


def test_damaged_images_are_a_400_or_answered(fake: FakeServer, http: httpx.Client) -> None:
    codes: list[int] = []
    for seed in range(150):
        chance = random.Random(seed)
        format = chance.choice(["PNG", "JPEG", "WEBP", "GIF", "BMP"])
        data = bytearray(encoded(noise(48, 40), format))
        for _ in range(chance.randrange(1, 8)):
            data[chance.randrange(len(data))] = chance.randrange(256)
        route = chance.choice(list(FIELDS))
        answer = http.post(route, json=body_of(route, bytes(data), f"image/{format.lower()}"))
        codes.append(answer.status_code)
        if answer.status_code != 200:
            assert answer.status_code == 400 and f"`{FIELDS[route]}` " in message_of(answer)
    assert set(codes) == {200, 400}
    fake.engine.requests.clear()


def image(url: object = URL, **more: object) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": url, **more}}


def of_role(role: str, **more: Any) -> dict[str, Any]:
    return {"messages": [{"role": role, "content": [image()], **more}]}


@pytest.mark.parametrize(
    ("change", "param", "words"),
    [
        (chat({"type": "image_url"}), PART, "required"),
        (chat({"type": "image_url", "image_url": URL}), PART, "must be an object"),
        (chat({"type": "image_url", "image_url": {}}), f"{PART}.url", "required"),
        (chat(image(5)), f"{PART}.url", "must be a string"),
        (chat(image("")), f"{PART}.url", "is no URL"),
        (chat(image(detail="huge")), f"{PART}.detail", "it must be 'auto', 'low', 'high' or"),
        (chat(image(width=5)), f"{PART}.width", "not a parameter"),
        (chat(image(file_id="file-1")), f"{PART}.url", "exclude each other"),
        (chat(image(None, file_id="file-1")), f"{PART}.file_id", "is file-1, which is no file"),
        (chat(image("file:///etc/passwd")), f"{PART}.url", "the scheme file"),
        (chat(image("https://example.com/a.png")), f"{PART}.url", "--image-urls"),
        (chat(image("http://169.254.169.254/")), f"{PART}.url", "--image-urls"),
        (chat(image("data:text/plain;base64,aGk=")), f"{PART}.url", "a data URL of text/plain"),
        (chat(image("data:image/png,hi")), f"{PART}.url", "without ;base64"),
        (chat(image("data:image/png;base64,%%%")), f"{PART}.url", "not valid base64"),
        (chat(image(data_url(WHOLE, "image/gif"))), f"{PART}.url", "its bytes are image/png"),
        (chat(image(data_url(encoded(noise(1, 60_000))))), f"{PART}.url", "at most 200 times"),
        (chat(*[image()] * 5), "messages", "has 5 images, at most 4 are taken"),
        (of_role("system"), PART, "an image of role system: images belong to"),
        (of_role("developer"), PART, "an image of role developer"),
        (of_role("assistant"), PART, "an image of role assistant"),
        (chat(image(), truncate_prompt_tokens=9), "truncate_prompt_tokens", "cut images in two"),
        (chat(image(), continue_final_message=True, add_generation_prompt=False),
         "continue_final_message", "of text alone"),
        (chat(image(), text_part("a <|image_pad|> b")), "messages", "spells <|image_pad|>"),
        (chat({"type": "video_url", "video_url": {"url": "x"}}), "messages[0].content[0].type",
         "reads text and images, no video: send parts of type text or image_url"),
        (chat({"type": "input_audio", "input_audio": {}}), "messages[0].content[0].type",
         "reads text and images, no sound"),
        (chat({"type": "file", "file": {}}), "messages[0].content[0].type", "no files"),
        (chat({"type": "input_image", "image_url": URL}), "messages[0].content[0].type",
         "is input_image: the model `fake` reads text and images, no such parts"),
        (chat(text_part(), prediction={"type": "content", "content": [image()]}),
         "prediction.content[0].type", "'text'"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)  # fmt: skip
def test_a_wrong_part_is_refused_by_its_field(
    http: httpx.Client, change: dict[str, Any], param: str, words: str
) -> None:
    answer = http.post(CHAT, json={"model": "fake"} | change)
    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    assert error["param"] == param and words in error["message"], error


def user(*blocks: Any) -> dict[str, Any]:
    return {
        "model": "fake",
        "max_tokens": 8,
        "messages": [{"role": "user", "content": list(blocks)}],
    }


def block(**source: object) -> dict[str, Any]:
    return {"type": "image", "source": source}


PLAIN = URL.partition(",")[2]
CALL = {"type": "tool_use", "id": "t", "name": "look", "input": {}}


@pytest.mark.parametrize(
    ("body", "words"),
    [
        (user({"type": "image"}), "`messages[0].content[0].source` is required"),
        (user(block(type="ftp")), "an object of type base64, url or file"),
        (user(block(type="base64", data=PLAIN)), "source.media_type` is required"),
        (user(block(type="base64", media_type="image/png")), "source.data` is required"),
        (user(block(type="base64", media_type="image/jpeg", data=PLAIN)),
         "source` is declared as image/jpeg, its bytes are image/png"),
        (user(block(type="base64", media_type="application/pdf", data=PLAIN)),
         "source` is a data URL of application/pdf"),
        (user(block(type="url", url="https://example.com/a.png")), "source` is a URL to fetch"),
        (user(block(type="url", url="file:///etc/passwd")), "has the scheme file: use data"),
        (user(block(type="file", file_id="file-9")), "source` is file-9, which is no file"),
        (user({"type": "document", "source": {}}), "reads text and images, no documents"),
        (user({"type": "text", "text": "a"}, block(type="base64", media_type="image/png", data="")),
         "`messages[0].content[1].source` has no bytes"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)  # fmt: skip
def test_anthropics_sources_are_checked(
    http: httpx.Client, body: dict[str, Any], words: str
) -> None:
    answer = http.post(MESSAGES, json=body)
    assert answer.status_code == 400, answer.text
    assert any(each in message_of(answer) for each in words.split("|")), answer.text


def test_an_image_inside_a_tool_result_of_joined_turns_has_its_own_path(http: httpx.Client) -> None:
    empty = block(type="base64", media_type="image/png", data="")
    good = block(type="base64", media_type="image/png", data=PLAIN)
    result = {"type": "tool_result", "tool_use_id": "t", "content": [good, empty]}
    body = user({"type": "text", "text": "a"})
    body["messages"] += [
        {"role": "assistant", "content": [CALL]},
        {"role": "user", "content": [result, {"type": "text", "text": "b"}]},
    ]
    assert "`messages[2].content[0].content[1].source` has no bytes" in message_of(
        http.post(MESSAGES, json=body)
    )
    body = user({"type": "text", "text": "a"}, good)
    body["messages"].append({"role": "user", "content": [{"type": "text", "text": "b"}, empty]})
    assert "`messages[1].content[1].source` has no bytes" in message_of(
        http.post(MESSAGES, json=body)
    )


def test_an_image_of_anthropics_assistant_is_refused(http: httpx.Client) -> None:
    body = user({"type": "text", "text": "a"})
    good = block(type="base64", media_type="image/png", data=PLAIN)
    body["messages"].append({"role": "assistant", "content": [good]})
    assert "belongs to role user, not assistant" in message_of(http.post(MESSAGES, json=body))


def test_responses_name_the_item_of_an_image(http: httpx.Client) -> None:
    bad = {"type": "input_image", "image_url": "data:image/png;base64,"}
    item = {"role": "user", "content": [{"type": "input_text", "text": "a"}, bad]}
    answer = http.post(RESPONSES, json={"model": "fake", "input": ["x", item][1:]})
    assert answer.json()["error"]["param"] == "input[0].content[1].image_url"
    call = {"type": "function_call", "call_id": "c", "name": "look", "arguments": "{}"}
    output = {"type": "function_call_output", "call_id": "c", "output": [bad]}
    answer = http.post(RESPONSES, json={"model": "fake", "input": [call, output]})
    assert answer.json()["error"]["param"] == "input[1].output[0].image_url"
    unknown = {"type": "input_image", "file_id": "file-9"}
    item = {"role": "user", "content": [unknown]}
    answer = http.post(RESPONSES, json={"model": "fake", "input": [item]})
    assert answer.json()["error"]["param"] == "input[0].content[0].file_id"
    item = {"role": "assistant", "content": [{"type": "input_image", "image_url": URL}]}
    answer = http.post(RESPONSES, json={"model": "fake", "input": [item]})
    assert "a message of role assistant has parts of type output_text" in message_of(answer)


@pytest.mark.parametrize("field", ["raw", "suffix"])
def test_ollamas_plain_texts_have_no_images(http: httpx.Client, field: str) -> None:
    body = body_of(GENERATE, WHOLE) | {"raw": True} if field == "raw" else None
    body = body or body_of(GENERATE, WHOLE) | {"suffix": "x"}
    answer = http.post(GENERATE, json=body)
    assert answer.status_code == 400
    assert f"`{field}` and `images` exclude each other" in message_of(answer)


@pytest.mark.parametrize("images", [[5], "aGk=", [None], [{}]])
def test_ollamas_images_are_base64(http: httpx.Client, images: object) -> None:
    answer = http.post(GENERATE, json=body_of(GENERATE, WHOLE) | {"images": images})
    assert answer.status_code == 400 and "`images" in message_of(answer)
