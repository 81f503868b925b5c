"""response_format of type structural_tag, as vLLM's and SGLang's callers send it."""

from __future__ import annotations

from typing import Any

import httpx2 as httpx
import pytest

from tests.support.server.fake_engine import FakeServer

TAGS: dict[str, Any] = {
    "structures": [{"begin": "<f=a>", "schema": {"type": "integer"}, "end": "</f>"}],
    "triggers": ["<f="],
}


@pytest.mark.parametrize("route", ["chat/completions", "completions"])
def test_it_asks_for_the_grammar_of_structured_outputs(fake: FakeServer, route: str):
    asked = {"prompt": "x", "messages": [{"role": "user", "content": "x"}]}
    name = "prompt" if route == "completions" else "messages"
    start = {"model": "fake", name: asked[name]}
    for form in (
        {"response_format": {"type": "structural_tag", **TAGS}},
        {"structured_outputs": {"structural_tag": TAGS}},
    ):
        answer = httpx.post(f"{fake.url}/v1/{route}", json=start | form)
        assert answer.status_code == 200, answer.text
    first, second = (request.params.grammar for request in fake.engine.requests[-2:])
    assert first == second and "tag0" in first
