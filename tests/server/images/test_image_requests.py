"""Images in requests of every API, to a model that reads them."""

from __future__ import annotations

import hashlib
import re
import time
from collections import Counter
from collections.abc import Iterator
from typing import Any

import httpx2 as httpx
import numpy as np
import pytest
from PIL import Image

from runtime.messages import PromptImage
from server.images.decoder import ImageDecoder
from tests.support.images.pictures import encoded, noise
from tests.support.images.vision_server import (
    CHAT,
    GENERATE,
    LIMITS,
    MESSAGES,
    OLLAMA,
    PAD,
    RESPONSES,
    body_of,
    chat,
    chat_part,
    data_url,
    message_of,
    prompt_tokens,
    text_part,
    vision_server,
)
from tests.support.server.fake_engine import FakeServer

ROUTES = (CHAT, RESPONSES, MESSAGES, OLLAMA, GENERATE)
PICTURE = noise(150, 90)
WHOLE = encoded(PICTURE)
SEEN = (160, 96)  # of it, by the model
TOKENS = 5 * 3


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FakeServer]:
    with vision_server(tmp_path_factory.mktemp("vision")) as server:
        yield server


@pytest.fixture
def decoded(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The bytes of each image that is decoded."""
    sizes: list[int] = []
    plain = ImageDecoder.pixels

    async def noting(decoder: ImageDecoder, data: bytes, *size: int) -> Any:
        sizes.append(len(data))
        return await plain(decoder, data, *size)

    monkeypatch.setattr(ImageDecoder, "pixels", noting)
    return sizes


def placeholders(fake: FakeServer, image: PromptImage, tokens: list[int]) -> bool:
    """Whether the image's tokens stand where it says, and no others beside them."""
    pad = fake.tokenizer.tokenizer.token_to_id(PAD)
    end = image.start + image.num_tokens
    inside = tokens[image.start : end]
    return inside == [pad] * image.num_tokens and pad not in (tokens[image.start - 1], tokens[end])


@pytest.mark.parametrize("route", ROUTES)
def test_an_image_reaches_the_engine_and_counts_in_the_usage(
    fake: FakeServer, http: httpx.Client, route: str
) -> None:
    answer = http.post(route, json=body_of(route, WHOLE))
    assert answer.status_code == 200, answer.text
    [request] = fake.engine.requests
    [image] = request.images
    assert (image.width, image.height) == SEEN and image.num_tokens == TOKENS
    assert image.pixels == PICTURE.resize(SEEN, Image.Resampling.BICUBIC).tobytes()
    assert image.digest == hashlib.sha256(b"160x96:" + image.pixels).digest()
    assert placeholders(fake, image, request.tokens)
    assert prompt_tokens(route, answer.json()) == len(request.tokens)
    text = fake.tokenizer.decode(request.tokens, skip_special=False)
    assert f"<|user|><|vision_start|>{PAD * TOKENS}<|vision_end|>What is it?<|end|>" in text


@pytest.mark.parametrize("route", ROUTES)
def test_streamed_answers_take_images_too(fake: FakeServer, route: str) -> None:
    body = body_of(route, WHOLE) | {"stream": True}
    with httpx.stream("POST", fake.url + route, json=body, timeout=30) as answer:
        assert answer.status_code == 200
        assert len(list(answer.iter_lines())) > 2
    assert len(fake.engine.requests[0].images) == 1


def test_routes_that_count_agree_with_the_usage_and_decode_nothing(
    fake: FakeServer, http: httpx.Client, decoded: list[int]
) -> None:
    counts = [
        http.post("/tokenize", json=body_of(CHAT, WHOLE)).json()["count"],
        http.post(f"{RESPONSES}/input_tokens", json=body_of(RESPONSES, WHOLE)).json()[
            "input_tokens"
        ],
    ]
    body = body_of(MESSAGES, WHOLE)
    del body["max_tokens"]
    counts.append(http.post(f"{MESSAGES}/count_tokens", json=body).json()["input_tokens"])
    assert decoded == [] and fake.engine.requests == []
    for route in (CHAT, RESPONSES, MESSAGES):
        http.post(route, json=body_of(route, WHOLE))
    assert counts == [len(request.tokens) for request in fake.engine.requests]
    assert http.post("/tokenize", json=body_of(CHAT, WHOLE)).json()["tokens"] == (
        fake.engine.requests[0].tokens
    )


def test_several_images_keep_their_order_among_the_texts(
    fake: FakeServer, http: httpx.Client
) -> None:
    sizes = [(64, 64), (150, 90), (96, 32)]
    urls = [data_url(encoded(noise(*size))) for size in sizes]
    first, second, third = map(chat_part, urls)
    body = chat(text_part("a"), first, text_part("b"), second)
    body["messages"] += [
        {"role": "assistant", "content": "c"},
        {"role": "user", "content": [third, text_part("d")]},
    ]
    answer = http.post(CHAT, json=body)
    assert answer.status_code == 200, answer.text
    [request] = fake.engine.requests
    assert [(i.width, i.height) for i in request.images] == [LIMITS.size(*size) for size in sizes]
    assert all(placeholders(fake, image, request.tokens) for image in request.images)
    text = fake.tokenizer.decode(request.tokens, skip_special=False).replace(PAD, "")
    image = "<|vision_start|><|vision_end|>"
    assert text.startswith(
        f"<|user|>a{image}b{image}<|end|><|assistant|>c<|end|><|user|>{image}d<|end|>"
    )


def test_several_completions_have_one_image_decoded_once(
    fake: FakeServer, http: httpx.Client, decoded: list[int]
) -> None:
    answer = http.post(CHAT, json=body_of(CHAT, WHOLE) | {"n": 3})
    assert answer.status_code == 200 and len(answer.json()["choices"]) == 3
    assert len(decoded) == 1
    digests = {request.images[0].digest for request in fake.engine.requests}
    assert len(fake.engine.requests) == 3 and len(digests) == 1


def test_detail_low_takes_fewer_tokens(tmp_path_factory: pytest.TempPathFactory) -> None:
    from dataclasses import replace

    limits = replace(LIMITS, max_pixels=1 << 20)
    folder = tmp_path_factory.mktemp("detail")
    with vision_server(folder, limits=limits, context=4096) as fake:
        url = data_url(encoded(noise(1024, 1024)))
        counts: dict[str, int] = {}
        for detail in ("auto", "low", "high", "original"):
            answer = httpx.post(fake.url + CHAT, json=chat(chat_part(url, detail=detail)))
            assert answer.status_code == 200, answer.text
            counts[detail] = fake.engine.requests[-1].images[0].num_tokens
    assert counts == {"auto": 1024, "low": 256, "high": 1024, "original": 1024}


def test_a_prompt_that_does_not_fit_is_refused_with_numbers_before_decoding(
    fake: FakeServer, http: httpx.Client, decoded: list[int]
) -> None:
    url = data_url(encoded(noise(256, 256)))
    body = chat(*[chat_part(url)] * 4, text_part("Hello"))
    answer = http.post(CHAT, json=body | {"max_tokens": 10})
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert error["code"] == "context_length_exceeded"
    count = http.post("/tokenize", json=body).json()["count"]
    assert f"the prompt has {count} tokens (256 of them of images)" in error["message"]
    assert "This model's maximum context length is 256 tokens. However, the" in error["message"]
    assert "send fewer or smaller images" in error["message"]
    assert decoded == [] and fake.engine.requests == []


def test_images_count_once_for_all_answers(
    fake: FakeServer, http: httpx.Client, monkeypatch: pytest.MonkeyPatch, decoded: list[int]
) -> None:
    from server.images import reader

    pixels = 3 * 160 * 96
    monkeypatch.setattr(reader, "MAX_HELD_BYTES", pixels + len(WHOLE))
    answer = http.post(CHAT, json=body_of(CHAT, WHOLE) | {"n": 4})
    assert answer.status_code == 200 and len(decoded) == 1
    first, *others = (request.images for request in fake.engine.requests)
    assert len(others) == 3 and all(each is first for each in others)
    monkeypatch.setattr(reader, "MAX_HELD_BYTES", pixels - 1)
    answer = http.post(CHAT, json=body_of(CHAT, WHOLE))
    assert answer.status_code == 400 and answer.json()["error"]["param"] == "messages"
    assert f"has images of {pixels} bytes of pixels, at most {pixels - 1}" in message_of(answer)
    assert len(decoded) == 1


def test_images_of_open_requests_are_counted_until_they_end(
    fake: FakeServer, http: httpx.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    from server.images import reader

    held = 3 * 160 * 96  # of a request that has been decoded
    monkeypatch.setattr(reader, "MAX_HELD_BYTES", held + len(WHOLE) + 1)
    fake.say("many words " * 40)
    fake.engine.delay = 0.05
    body = body_of(CHAT, WHOLE)
    with httpx.stream("POST", fake.url + CHAT, json=body | {"stream": True}, timeout=30):
        answer = http.post(CHAT, json=body)
        assert answer.status_code == 429
        assert f"have {held + len(WHOLE)} bytes, {held} more" in message_of(answer)
    fake.engine.delay = 0
    deadline = time.monotonic() + 20
    while http.post(CHAT, json=body).status_code != 200:
        assert time.monotonic() < deadline, "the images of a request that ended still count"


def test_a_text_alone_starts_no_process(tmp_path_factory: pytest.TempPathFactory) -> None:
    import psutil

    with vision_server(tmp_path_factory.mktemp("text")) as fake:
        before = len(psutil.Process().children())
        assert httpx.post(fake.url + CHAT, json=chat(text_part())).status_code == 200
        assert len(psutil.Process().children()) == before
        assert httpx.post(fake.url + CHAT, json=body_of(CHAT, WHOLE)).status_code == 200
        assert len(psutil.Process().children()) == before + 1


def test_models_say_what_images_they_take(http: httpx.Client) -> None:
    assert http.get("/v1/models").json()["data"][0]["images"] == {
        "max_images": 4,
        "max_pixels": 65_536,
        "max_tokens": 64,
        "media_types": ["image/png", "image/jpeg", "image/webp", "image/gif", "image/bmp"],
    }
    assert "vision" in http.post("/api/show", json={"model": "fake"}).json()["capabilities"]


def test_images_of_tool_results_are_read(fake: FakeServer, http: httpx.Client) -> None:
    source = body_of(MESSAGES, WHOLE)["messages"][0]["content"][0]
    call = {"type": "tool_use", "id": "toolu_1", "name": "look", "input": {}}
    result = {
        "type": "tool_result",
        "tool_use_id": "toolu_1",
        "content": [{"type": "text", "text": "see"}, source],
    }
    body = {
        "model": "fake",
        "max_tokens": 8,
        "messages": [
            {"role": "user", "content": "Look."},
            {"role": "assistant", "content": [call]},
            {"role": "user", "content": [result, source]},
        ],
    }
    answer = http.post(MESSAGES, json=body)
    assert answer.status_code == 200, answer.text
    calls = [
        {"type": "function_call", "call_id": "c", "name": "look", "arguments": "{}"},
        {
            "type": "function_call_output",
            "call_id": "c",
            "output": [
                {"type": "input_text", "text": "see"},
                {"type": "input_image", "image_url": data_url(WHOLE)},
            ],
        },
    ]
    answer = http.post(RESPONSES, json={"model": "fake", "input": calls})
    assert answer.status_code == 200, answer.text
    first, second = fake.engine.requests
    assert len(first.images) == 2 and len(second.images) == 1
    for request in (first, second):
        assert all(placeholders(fake, image, request.tokens) for image in request.images)
        text = fake.tokenizer.decode(request.tokens, skip_special=False)
        assert f"<|tool|>see<|vision_start|>{PAD * TOKENS}<|vision_end|><|end|>" in text


def test_an_uploaded_file_is_an_image_of_every_api_that_names_files(
    fake: FakeServer, http: httpx.Client
) -> None:
    uploaded = http.post(
        "/v1/files", data={"purpose": "vision"}, files={"file": ("a.png", WHOLE)}
    ).json()["id"]
    content = [{"type": "input_image", "file_id": uploaded}]
    bodies = {
        RESPONSES: {"model": "fake", "input": [{"role": "user", "content": content}]},
        CHAT: chat({"type": "image_url", "image_url": {"file_id": uploaded}}),
        MESSAGES: body_of(MESSAGES, b""),
    }
    bodies[MESSAGES]["messages"][0]["content"][0]["source"] = {"type": "file", "file_id": uploaded}
    for route, body in bodies.items():
        answer = http.post(route, json=body)
        assert answer.status_code == 200, answer.text
    assert len({request.images[0].digest for request in fake.engine.requests}) == 1


def test_an_earlier_response_brings_its_images_along(fake: FakeServer, http: httpx.Client) -> None:
    first = http.post(RESPONSES, json=body_of(RESPONSES, WHOLE)).json()
    second = {"model": "fake", "input": "And now?", "previous_response_id": first["id"]}
    answer = http.post(RESPONSES, json=second)
    assert answer.status_code == 200, answer.text
    assert [len(request.images) for request in fake.engine.requests] == [1, 1]
    items = http.get(f"{RESPONSES}/{first['id']}/input_items").json()["data"]
    assert items[0]["content"][0]["image_url"] == data_url(WHOLE)


def test_pictures_of_a_camera_that_was_turned_have_their_upright_size(
    fake: FakeServer, http: httpx.Client
) -> None:
    exif = Image.Exif()
    exif[0x0112] = 6
    answer = http.post(CHAT, json=body_of(CHAT, encoded(PICTURE, exif=exif)))
    assert answer.status_code == 200, answer.text
    [image] = fake.engine.requests[0].images
    assert (image.width, image.height) == SEEN[::-1] and image.num_tokens == TOKENS
    pixels = np.frombuffer(image.pixels, np.uint8).reshape(160, 96, 3)
    turned = PICTURE.transpose(Image.Transpose.ROTATE_270).resize((96, 160))
    assert np.abs(pixels.astype(int) - np.asarray(turned)).mean() < 2


def test_a_file_is_an_image_of_its_owner_alone(tmp_path_factory: pytest.TempPathFactory) -> None:
    keys = ("a-secret", "b-secret")
    with vision_server(tmp_path_factory.mktemp("owners"), api_keys=keys) as fake:

        def post(key: str, path: str, **more: Any) -> httpx.Response:
            return httpx.post(fake.url + path, headers={"authorization": f"Bearer {key}"}, **more)

        form = {"data": {"purpose": "vision"}, "files": {"file": ("a.png", WHOLE)}}
        id = post("a-secret", "/v1/files", **form).json()["id"]
        body = chat({"type": "image_url", "image_url": {"file_id": id}})
        assert post("a-secret", CHAT, json=body).status_code == 200
        refused = post("b-secret", CHAT, json=body)
        assert refused.status_code == 400 and "which is no file of yours" in message_of(refused)


@pytest.mark.parametrize("route", [CHAT, RESPONSES, MESSAGES, "/tokenize"])
def test_no_bytes_of_images_stay_when_requests_have_ended(
    tmp_path_factory: pytest.TempPathFactory, route: str
) -> None:
    form = CHAT if route == "/tokenize" else route
    bodies = [body_of(form, data) for data in (WHOLE, WHOLE[:-60], b"%PDF")]
    large = body_of(form, encoded(noise(256, 256)))
    with (
        vision_server(tmp_path_factory.mktemp("held"), context=60) as fake,
        httpx.Client(base_url=fake.url) as client,  # whose connection stays open
    ):
        codes = [client.post(route, json=body).status_code for body in [*bodies, large]]
        assert set(codes) <= {200, 400} and 200 in codes
        fake.engine.requests.clear()
        assert fake.images is not None
        deadline = time.monotonic() + 20
        while fake.images.held_bytes:
            assert time.monotonic() < deadline, fake.images.held_bytes
            time.sleep(0.01)


def refused(http: httpx.Client) -> Counter[str]:
    """Images refused so far, by cause."""
    pattern = r'wavefill_images_refused_total{cause="(\w+)".*} (\S+)'
    found = re.findall(pattern, http.get("/metrics").text)
    return Counter({cause: int(float(count)) for cause, count in found})


def test_refused_images_are_counted_by_cause(fake: FakeServer, http: httpx.Client) -> None:
    whole, cut = data_url(WHOLE), data_url(WHOLE[:300])
    gif = whole.replace("image/png", "image/gif")
    most = http.get("/v1/models").json()["data"][0]["images"]["max_images"]
    cases = {
        "format": [gif],
        "damaged": [cut],
        "source": ["data:,"],
        "not_allowed": ["https://images.example.com/a.png"],
        "count": [whole] * (most + 1),
    }
    before = refused(http)
    for urls in cases.values():
        content = [{"type": "image_url", "image_url": {"url": url}} for url in urls]
        body = {"model": "fake", "messages": [{"role": "user", "content": content}]}
        assert http.post(CHAT, json=body).status_code == 400
    # The difference leaves out the causes of other tests, whose counts stayed as they were.
    assert refused(http) - before == {cause: len(urls) for cause, urls in cases.items()}
