"""A model that reads text only: images are refused by name, and cost nothing."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import httpx2 as httpx
import pytest
from msgspec.structs import replace

from runtime.config import EngineConfig
from tests.support.images.pictures import encoded, noise
from tests.support.images.vision_server import (
    CHAT,
    GENERATE,
    MESSAGES,
    OLLAMA,
    RESPONSES,
    body_of,
    message_of,
    vision_server,
)
from tests.support.paths import ROOT
from tests.support.server.fake_engine import fake_server

NEEDS = "the model `fake` reads text only, and images need a vision-language model"
TYPES = {
    CHAT: "`messages[0].content[0].type` is image_url: ",
    "/tokenize": "`messages[0].content[0].type` is image_url: ",
    RESPONSES: "`input[0].content[0].type` is input_image: ",
    f"{RESPONSES}/input_tokens": "`input[0].content[0].type` is input_image: ",
    MESSAGES: "`messages[0].content[0].type` is image: ",
    OLLAMA: "`messages[0].images`: ",
    GENERATE: "`images`: ",
}


@pytest.mark.parametrize("route", TYPES)
def test_images_are_refused_by_field_and_model(http: httpx.Client, route: str) -> None:
    form = {"/tokenize": CHAT, f"{RESPONSES}/input_tokens": RESPONSES}.get(route, route)
    answer = http.post(route, json=body_of(form, encoded(noise(40, 30))))
    assert answer.status_code == 400
    assert message_of(answer).startswith(TYPES[route] + NEEDS), answer.text


def test_models_say_that_they_take_no_images(http: httpx.Client) -> None:
    assert http.get("/v1/models").json()["data"][0]["images"] is None
    assert "vision" not in http.post("/api/show", json={"model": "fake"}).json()["capabilities"]


def test_nothing_of_images_is_loaded_at_start() -> None:
    code = (
        "import sys, server.app, server.process.api_process; "
        "found = [n for n in sys.modules if n.startswith(('server.images', 'PIL', 'numpy'))]; "
        "assert not found, found"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT)


def test_files_that_describe_images_do_not_make_a_model_read_them(tmp_path: Path) -> None:
    with vision_server(tmp_path) as fake:
        assert fake.engine.ready is not None
        fake.engine.ready = replace(fake.engine.ready, reads_images=False)
        answer = httpx.post(fake.url + CHAT, json=body_of(CHAT, encoded(noise(40, 30))))
        assert answer.status_code == 400 and NEEDS in message_of(answer)
        assert httpx.get(f"{fake.url}/v1/models").json()["data"][0]["images"] is None


def test_images_that_the_operator_has_switched_off_are_refused_as_such(tmp_path: Path) -> None:
    with fake_server(tmp_path, engine=EngineConfig(model="fake", max_image_pixels=0)) as fake:
        for route in (CHAT, OLLAMA):
            answer = httpx.post(fake.url + route, json=body_of(route, encoded(noise(40, 30))))
            assert answer.status_code == 400
            assert "as the operator has switched images off: " in message_of(answer)


def test_until_the_model_is_loaded_an_image_is_no_mistake(tmp_path: Path) -> None:
    with vision_server(tmp_path) as fake:
        fake.engine.ready = None
        answer = httpx.post(fake.url + CHAT, json=body_of(CHAT, encoded(noise(40, 30))))
        assert answer.status_code == 503 and "not loaded yet" in message_of(answer)
