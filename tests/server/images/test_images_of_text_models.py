"""A model that reads text only: images are refused by name, and cost nothing."""

from __future__ import annotations

import subprocess
import sys

import httpx2 as httpx
import pytest

from tests.support.images.pictures import encoded, noise
from tests.support.images.vision_server import (
    CHAT,
    GENERATE,
    MESSAGES,
    OLLAMA,
    RESPONSES,
    body_of,
    message_of,
)
from tests.support.paths import ROOT

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
