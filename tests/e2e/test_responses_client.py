"""The Responses API with the real `openai` client, the built-in model and real processes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from openai import OpenAI

from tests.support.server.server_process import Server

FRANCE = "What is the capital of France?"


def finished(server: Server, client: OpenAI, id: str) -> str | None:
    server.wait_until(lambda: client.responses.retrieve(id).status not in ("queued", "in_progress"))
    return client.responses.retrieve(id).status


def test_create_stream_and_continue(server: Server):
    client = server.client()
    first = client.responses.create(model="tiny-chat", input=FRANCE, temperature=0)
    assert first.status == "completed" and "Paris" in first.output_text
    assert client.responses.retrieve(first.id) == first
    stream = client.responses.create(
        model="tiny-chat",
        input="What is the capital of Italy?",
        previous_response_id=first.id,
        temperature=0,
        stream=True,
    )
    events = list(stream)
    text = "".join(e.delta for e in events if e.type == "response.output_text.delta")
    last = events[-1]
    assert last.type == "response.completed" and last.response.output_text == text
    assert "Rome" in text
    assert last.response.usage and first.usage
    assert last.response.usage.input_tokens > first.usage.input_tokens


def test_several_processes_share_background_responses_that_outlive_the_server(
    own_server: Callable[..., Server], tmp_path: Path
):
    options = ("--api-workers", "2", "--response-store", str(tmp_path / "store"))
    server = own_server(*options)
    # Every call has a connection of its own: the kernel gives them to either process.
    made = server.client().responses.create(
        model="tiny-chat", input=FRANCE, temperature=0, background=True
    )
    endless = [
        server.client().responses.create(
            model="tiny-chat", input="Hello", background=True, extra_body={"ignore_eos": True}
        )
        for _ in range(4)
    ]
    for response in endless:
        assert server.client().responses.cancel(response.id).status == "cancelled"
    assert finished(server, server.client(), made.id) == "completed"
    left = server.client().responses.create(
        model="tiny-chat", input="Hello", background=True, extra_body={"ignore_eos": True}
    )
    server.process.kill()
    server.process.wait(10)
    server = own_server(*options)
    client = server.client()
    assert "Paris" in client.responses.retrieve(made.id).output_text
    assert finished(server, client, left.id) in ("failed", "completed", "incomplete")
    again = client.responses.create(
        model="tiny-chat", input="What is 2 + 3?", previous_response_id=made.id, temperature=0
    )
    assert "5" in again.output_text
