"""The application, engine client and metrics that the lines of a batch use.

Lines run through the same routes as other requests, in this process.  They run after all others, do
not count against --max-queue, and are not part of the latencies in /metrics.
"""

from __future__ import annotations

import asyncio
import logging
from dataclasses import replace
from typing import Any, cast

from starlette.types import ASGIApp, Message

from runtime.ipc.client import EngineClient, Mailbox
from runtime.messages import BACKGROUND, SamplingParams
from server.http.request_context import exchange
from server.metrics.metrics import Metrics
from server.state import ServerState

log = logging.getLogger("wavefill.batches")

ENDPOINTS = ("/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/embeddings")


class BackgroundClient:
    """An EngineClient whose requests have the lowest priority."""

    def __init__(self, client: EngineClient) -> None:
        self._client = client

    def __getattr__(self, name: str) -> Any:
        return getattr(self._client, name)

    def submit(self, tokens: list[int], params: SamplingParams, **options: Any) -> Mailbox:
        options["priority"] = BACKGROUND
        return self._client.submit(tokens, params, **options)


class BackgroundMetrics:
    """Ignores lines, whose latencies are not those that clients see."""

    def request_finished(self, *numbers: object, **times: float) -> None:
        pass

    def inter_token(self, seconds: float) -> None:
        pass

    def rejected(self, reason: str) -> None:
        pass

    def aborted(self, by: str) -> None:
        pass


def in_background(state: ServerState) -> ServerState:
    """The state of an application for lines."""
    return replace(
        state,
        client=cast("EngineClient", BackgroundClient(state.client)),
        metrics=cast("Metrics", BackgroundMetrics()),
        requests=state.batch_requests,
        bounded=False,
    )


class BatchAnswer:
    """Collects the response of an application."""

    def __init__(self, body: bytes) -> None:
        self._request: list[bytes] = [body]
        self._chunks: list[bytes] = []
        self.status = 0

    @property
    def body(self) -> bytes:
        return b"".join(self._chunks)

    async def receive(self) -> Message:
        if self._request:
            return {"type": "http.request", "body": self._request.pop(), "more_body": False}
        await asyncio.Event().wait()  # the client of a line never disconnects
        raise AssertionError

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.status = message["status"]
        else:
            self._chunks.append(message.get("body", b""))


async def ask(app: ASGIApp, endpoint: str, state: dict[str, Any], body: bytes) -> tuple[int, bytes]:
    """Status and body of the application's answer to a POST.

    state   what the middleware notes about a request: its id and its owner
    """
    exchange.set(state)
    answer = BatchAnswer(body)
    scope = {
        "type": "http",
        "asgi": {"version": "3.0"},
        "http_version": "1.1",
        "scheme": "http",
        "method": "POST",
        "path": endpoint,
        "raw_path": endpoint.encode(),
        "root_path": "",
        "query_string": b"",
        "headers": [(b"content-type", b"application/json")],
        "state": dict(state),
    }
    try:
        await app(scope, answer.receive, answer.send)
    except Exception:
        log.exception("a line of a batch failed")
        if not answer.status:
            raise  # else the application has answered with 500
    return answer.status, answer.body
