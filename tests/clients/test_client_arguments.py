"""The newest clients' arguments: we take them or refuse them by name, and know them all."""

from __future__ import annotations

import inspect
from typing import Any

import anthropic
import httpx2 as httpx
import openai
import pytest

from tests.support.server.client_tools import FRANCE, MODEL
from tests.support.server.server_process import Server

OPENAI = openai.OpenAI(base_url="http://127.0.0.1", api_key="none")
ANTHROPIC = anthropic.Anthropic(base_url="http://127.0.0.1", api_key="none")
# What a client makes headers, queries or another field of.
CLIENTS_OWN = {"extra_headers", "extra_query", "extra_body", "timeout", "betas", "workspace_id"}
CLIENTS_OWN |= {"output_format"}
CHAT: dict[str, Any] = {"model": MODEL, "messages": [{"role": "user", "content": FRANCE}]}
MESSAGES = CHAT | {"max_tokens": 1}
ROUTES: list[tuple[str, Any, dict[str, Any]]] = [
    ("/v1/chat/completions", OPENAI.chat.completions.create, CHAT),
    ("/v1/completions", OPENAI.completions.create, {"model": MODEL, "prompt": FRANCE}),
    ("/v1/responses", OPENAI.responses.create, {"model": MODEL, "input": FRANCE}),
    ("/v1/responses/input_tokens", OPENAI.responses.input_tokens.count, {"model": MODEL}),
    ("/v1/embeddings", OPENAI.embeddings.create, {"model": MODEL, "input": FRANCE}),
    ("/v1/messages", ANTHROPIC.messages.create, MESSAGES),
    ("/v1/messages", ANTHROPIC.beta.messages.create, MESSAGES),
    ("/v1/messages/count_tokens", ANTHROPIC.messages.count_tokens, CHAT),
    ("/v1/messages/count_tokens", ANTHROPIC.beta.messages.count_tokens, CHAT),
]


@pytest.mark.parametrize(("path", "method", "body"), ROUTES, ids=lambda value: str(value)[:40])
def test_no_argument_of_a_client_is_unknown(
    server: Server, path: str, method: Any, body: dict[str, Any]
):
    names = inspect.signature(method).parameters.keys() - CLIENTS_OWN
    assert len(names) >= 5
    with httpx.Client(base_url=server.url) as http:
        for name in names:
            # No argument takes this, so that an answer says what it takes, or that there is none.
            answer = http.post(path, json=body | {name: {"no such": 1}})
            assert answer.status_code == 400, (name, answer.text)
            assert f"`{name}` is not a parameter" not in answer.json()["error"]["message"]
