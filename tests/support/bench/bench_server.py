"""The server that tests of the bench measure."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager
from typing import Any

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route


class BenchFakeServer:
    """Answers with `words` chunks of two tokens each; notes what it was sent."""

    def __init__(self) -> None:
        self.bodies: list[dict[str, Any]] = []
        self.keys: list[str | None] = []
        self.open = self.most_open = 0
        self.refuse: Callable[[int], Response | None] = lambda index: None
        self.refuse_models: Response | None = None

    def app(self) -> Starlette:
        post = ["POST"]
        return Starlette(
            routes=[
                Route("/v1/models", self._models),
                Route("/v1/completions", self._complete, methods=post),
                Route("/v1/chat/completions", self._complete, methods=post),
            ]
        )

    async def _models(self, request: Request) -> Response:
        self.keys.append(request.headers.get("authorization"))
        models = {"object": "list", "data": [{"id": "fake"}]}
        return self.refuse_models or JSONResponse(models)

    async def _complete(self, request: Request) -> Response:
        body = await request.json()
        self.bodies.append(body)
        self.keys.append(request.headers.get("authorization"))
        refusal = self.refuse(len(self.bodies) - 1)
        return refusal or StreamingResponse(self._stream(body), media_type="text/event-stream")

    async def _stream(self, body: dict[str, Any]) -> AsyncIterator[bytes]:
        self.open += 1
        self.most_open = max(self.most_open, self.open)
        for _ in range(body["max_tokens"] // 2):
            await asyncio.sleep(0.001)
            choice = {"text": "ab"} if "prompt" in body else {"delta": {"content": "ab"}}
            yield b"data: %s\n\n" % json.dumps({"choices": [choice]}).encode()
        usage = {"prompt_tokens": 7, "completion_tokens": body["max_tokens"]}
        yield b"data: %s\n\ndata: [DONE]\n\n" % json.dumps({"choices": [], "usage": usage}).encode()
        self.open -= 1


@contextmanager
def listening(fake: BenchFakeServer) -> Iterator[str]:
    """`fake` behind a real socket, in a thread of its own; the base URL."""
    listener = socket.create_server(("127.0.0.1", 0))
    server = uvicorn.Server(uvicorn.Config(fake.app(), log_level="error", lifespan="off"))
    thread = threading.Thread(target=server.run, args=([listener],))
    thread.start()
    try:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}/v1"
    finally:
        server.should_exit = True
        thread.join()
